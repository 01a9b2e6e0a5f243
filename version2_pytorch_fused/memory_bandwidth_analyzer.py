"""Says how many bytes a kernel moves, at which bandwidth, and where time is lost over the bound.

    bash run_all_profilers.sh --enable-rocm-tools --profile-dir ./complete_rocm_analysis
    python memory_bandwidth_analyzer.py --profile-data ./complete_rocm_analysis \\
        --generate-roofline-plot

Bytes are measured where the folder holds counters of ncu or rocprof-compute, else a minimum that
follows from the shapes of the operators in profile_*.json. Writes bandwidth.csv and .md, and with
the second flag roofline.png, into --output-dir.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of this clone

from common import cli
from tracepage.views import bandwidth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--profile-data", type=Path, required=True, metavar="DIR|FILE", help="what profilers wrote"
    )
    parser.add_argument(
        "--generate-roofline-plot",
        action="store_true",
        help="also draw roofline.png, from profile_*.json",
    )
    cli.add_output_dir(parser, "memory_bandwidth")
    options = cli.parse(parser)
    print(
        bandwidth.write_bandwidth(
            options.profile_data, options.output_dir, options.generate_roofline_plot
        )
    )


if __name__ == "__main__":
    cli.command(main)
