"""Compares what two versions launch in a step: kernels on a GPU, working operator calls on a CPU.

    (cd ../version1_pytorch_baseline && python run_pytorch_profiler.py --batch-size 8)
    python run_pytorch_profiler.py --batch-size 8 --profile-dir ./fusion_analysis
    python analyze_kernel_reduction.py --fused ./fusion_analysis \\
        --baseline ../version1_pytorch_baseline/pytorch_profiles

Counts and times by kind of work, by span and by name, before and after. Writes kernel_reduction.csv
and .md into --output-dir. Profiles of different devices, shapes or precisions are refused (exit
code 2).
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of this clone

from common import cli
from tracepage.views import kernel_reduction


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    newest = "of a folder the newest profile_*.json is taken, or else what another profiler wrote"
    add("--baseline", type=Path, required=True, metavar="DIR|FILE", help=newest)
    add("--fused", type=Path, required=True, metavar="DIR|FILE", help="of the fused version")
    cli.add_output_dir(parser, "kernel_reduction")
    add("--top", type=cli.positive, default=15, help="names in each table (default: 15)")
    options = cli.parse(parser)
    report = kernel_reduction.render_kernel_reduction(options.baseline, options.fused, options.top)
    print(report.publish(options.output_dir, "kernel_reduction"))


if __name__ == "__main__":
    cli.command(main)
