"""Compares two runs: is the current one fast enough, and does it learn the same?

    python ../version1_pytorch_baseline/tiny_llama_v1.py --metrics-out version1_metrics.json
    python tiny_llama_v2.py --metrics-out version2_metrics.json
    python performance_regression_test.py --baseline-results version1_metrics.json \\
        --current-results version2_metrics.json --min-speedup 1.3

The exit code is 1 on a regression. Runs on different devices, shapes, number formats or versions of
PyTorch, and runs that were interrupted, are refused (2).
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of this clone

from common import cli
from tracepage.errors import UsageError
from tracepage.views import performance_regression


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    record = "written with --metrics-out"
    add("--baseline-results", type=Path, required=True, metavar="FILE", help=record)
    add("--current-results", type=Path, required=True, metavar="FILE", help=record)
    add("--min-speedup", type=cli.amount, default=1.0, help="a smaller one fails (default: 1.0)")
    tolerance = "nats by which the losses of a step may differ (default: 1e-2)"
    add("--loss-tolerance", type=cli.amount, default=1e-2, help=tolerance)
    options = cli.parse(parser)
    baseline = options.baseline_results
    current = options.current_results
    for path in (baseline, current):
        if not path.exists():
            raise UsageError(
                f"{path} does not exist; make both runs here: "
                "`python ../version1_pytorch_baseline/tiny_llama_v1.py "
                f"--metrics-out {baseline}` and `python tiny_llama_v2.py --metrics-out {current}`"
            )
    verdict = performance_regression.render_regression(
        baseline, current, options.min_speedup, options.loss_tolerance
    )
    print(verdict.report.terminal())
    return 1 if verdict.failures else 0


if __name__ == "__main__":
    cli.command(main)
