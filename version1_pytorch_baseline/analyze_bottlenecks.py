"""Says where the time of a profiled step goes, what limits operators, and what to improve first.

    python analyze_bottlenecks.py --profile-data pytorch_profiles/ --output-report bottlenecks_v1.md

Writes the report and, beside it, operator_timing.csv and optimization_targets.json. Their names
begin with that of the report where it is not the default: FILE_operator_timing.csv.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of this clone

from common import cli
from tracepage.views import bottlenecks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--profile-data",
        type=Path,
        default=Path("pytorch_profiles"),
        metavar="DIR|FILE",
        help="a profile_*.json, or a folder: its newest is taken (default: pytorch_profiles)",
    )
    parser.add_argument(
        "--output-report",
        type=Path,
        default=Path(bottlenecks.DEFAULT),
        metavar="FILE.md",
        help="a bare name goes into bottleneck_analysis/ (default: bottlenecks_v1.md)",
    )
    options = cli.parse(parser)
    print(bottlenecks.write_bottlenecks(options.profile_data, options.output_report, version="v1"))


if __name__ == "__main__":
    cli.command(main)
