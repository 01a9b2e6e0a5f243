"""Writes the profile of a stage as one table: a row per kernel (on a CPU per operator), the longest first.

python stage_profile.py results/stage2_profile --csv results/stage2_profile.csv

Columns: name, category, calls, total_ns, mean_ns, min_ns, max_ns, share (0 to 1). It reads the statistics of rocprofv3 from the
folder if there are any, otherwise the newest profile of torch.profiler.
"""

from pathlib import Path

from common import cli
from common.analysis.profiles import load_kernels
from common.analysis.reports import launches
from common.errors import UsageError

SOURCES = ("rocprofv3-kernel-stats", "profile")


def main() -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument("folder", type=Path, help="the folder of a profiler")
    parser.add_argument("--csv", type=Path, required=True, metavar="FILE", help="the table")
    options = parser.parse_args()
    found = load_kernels.find(options.folder)
    files = [found[source][0] for source in SOURCES if source in found]
    if not files:
        raise UsageError(f"{options.folder} holds neither a profile_*.json nor a *_kernel_stats.csv of rocprofv3")
    print(launches.analyze(files[0], top=10, csv_out=options.csv))


if __name__ == "__main__":
    cli.command(main)
