"""Lists the kernels (on a CPU: operators) that take longest in all, from what any profiler wrote.

    python top_kernels.py out/1234_kernel_stats.csv
    python top_kernels.py results/stage2_profile --top 30 --csv-out results/stage2_profile.csv

`sort -t, -k4 -nr` on a kernel_stats.csv loses kernels: the names are quoted and hold commas, which move the columns behind them.
Beside such a file it reads traces and databases of rocprofv3, profiles and traces of torch.profiler, ncu's CSV, and a folder with
some: there rocprofv3's statistics, otherwise the newest profile of torch.profiler, otherwise what has the most detail. Columns of
--csv-out: name, category, calls, total_ns, mean_ns, share (0 to 1).
"""

import argparse
import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

from common import cli
from common.analysis.profiles import load_kernels
from common.analysis.reports import launches

FIRST = ("rocprofv3-kernel-stats", "profile")  # of a folder: without the steps before the profiled ones


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, metavar="FILE|DIR", help="what a profiler wrote, or its folder")
    parser.add_argument("--top", type=cli.positive, default=20, metavar="N", help="kernels in the table (default: 20)")
    parser.add_argument("--csv-out", type=Path, metavar="FILE", help="write all kernels, with full names and times in ns")
    options = cli.parse(parser)
    found = load_kernels.find(options.path) if options.path.is_dir() else {}
    files = [found[source][0] for source in FIRST if source in found]
    print(launches.analyze(files[0] if files else options.path, options.top, options.csv_out))


if __name__ == "__main__":
    cli.command(main)
