"""Counts launches in a profiler's file: how many, how long, how many short, how busy the GPU is.

    rocprofv3 --kernel-trace --output-format csv -o results.csv -- python tiny_llama_v2.py
    python analyze_kernel_launches.py --trace-file results.csv
    python analyze_kernel_launches.py --trace-file ./complete_rocm_analysis --csv-out launches.csv

rocprofv3 calls that file results.csv_kernel_trace.csv; the name that it was given finds it. A
PyTorch trace, a profile_*.json, rocprofv3's statistics or database, rocprof-compute's pmc_perf.csv
or databases, ncu's CSV and a folder of these do as well.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of this clone

from common import cli
from tracepage.views import launches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--trace-file", type=Path, required=True, metavar="FILE|DIR", help="a profiler's output")
    add("--top", type=cli.positive, default=15, metavar="N", help="rows of the table (default: 15)")
    add("--csv-out", type=Path, metavar="FILE", help="write all kernels, with full names, in ns")
    options = cli.parse(parser)
    print(launches.write_launches(options.trace_file, options.top, options.csv_out))


if __name__ == "__main__":
    cli.command(main)
