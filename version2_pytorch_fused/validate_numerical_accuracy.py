"""Compares two version files on the same weights and batch: logits, loss and every gradient.

    baseline=../version1_pytorch_baseline/tiny_llama_v1.py
    python validate_numerical_accuracy.py --baseline $baseline --optimized tiny_llama_v2.py \\
        --tolerance 1e-4
    python validate_numerical_accuracy.py --baseline $baseline --optimized tiny_llama_v2.py \\
        --disable-flash-attention --enable-torch-compile

The exit code is 1 past the tolerance. Flags that are not listed here go to the optimized version.
--use-amp applies to it alone; the baseline stays in fp32.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of this clone

from common import cli
from common import device as devices
from common.precision import Precision, amp_dtype
from studies import accuracy, version_files
from tracepage.views.numerical_accuracy import render_accuracy


def main() -> int:
    parser = version_files.parser(__doc__, "--capture-step")
    add = parser.add_argument
    add("--baseline", type=Path, required=True, metavar="FILE.py", help="the version that is right")
    add("--optimized", type=Path, required=True, metavar="FILE.py", help="the version to check")
    add("--tolerance", type=cli.amount, default=1e-4, help="largest passing error (default: 1e-4)")
    arguments, own_flags = cli.parse_known(parser)
    options = version_files.resolve(arguments)
    baseline = version_files.load(arguments.baseline)
    optimized = version_files.load(arguments.optimized)
    errors = accuracy.compare(baseline, optimized, options, own_flags)
    precision = Precision(devices.select(options.device), amp_dtype(options)).name
    report, passed = render_accuracy(errors, precision, arguments.tolerance)
    print(report.terminal())
    return 0 if passed else 1


if __name__ == "__main__":
    cli.command(main)
