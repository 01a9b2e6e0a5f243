"""Compares profiles that differ only in the batch size: throughput, step time and memory.

    for bs in 4 8 16 32; do
        python tiny_llama_v1.py --batch-size $bs --num-steps 5 --profile-dir ./scaling_bs$bs
    done
    python analyze_batch_scaling.py --profile-dirs scaling_bs*

Writes batch_scaling.csv and .md into --output-dir.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of this clone

from common import cli
from tracepage.views import batch_scaling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--profile-dirs",
        type=Path,
        nargs="+",
        required=True,
        metavar="DIR",
        help="folders with profiles; the newest of each is taken",
    )
    cli.add_output_dir(parser, "batch_scaling")
    options = cli.parse(parser)
    report = batch_scaling.render_batch_scaling(options.profile_dirs)
    print(report.publish(options.output_dir, "batch_scaling"))


if __name__ == "__main__":
    cli.command(main)
