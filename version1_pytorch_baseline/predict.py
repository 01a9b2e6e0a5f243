"""Notes your guess of what a change to Version 1 gains, beside its bound, and checks both.

    python predict.py pytorch_profiles --change torch-compile --expect 1.3
    python predict.py --check pytorch_profiles ../version2_pytorch_fused/pytorch_profiles

The bounds are those of analyze_bottlenecks.py.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of this clone

from common import cli
from tracepage.cost.optimization_targets import CHANGES
from tracepage.views import predictions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    profiles = "a profile_*.json of Version 1 or its folder; with --check also one after the change"
    add("profiles", type=Path, nargs="+", metavar="DIR|FILE", help=profiles)
    add("--change", choices=CHANGES, help="what you will change")
    add("--expect", type=cli.amount, metavar="X", help="how many times as fast the step will be")
    add("--check", action="store_true", help="compare a guess with two profiles: before and after")
    add("--file", type=Path, default=Path("predictions.json"), help="default: predictions.json")
    options = cli.parse(parser)
    if len(options.profiles) != 1 + options.check:
        parser.error("--check takes two profiles, a prediction one")
    if options.check and options.expect is not None:
        parser.error("--check reads the guess from --file: leave --expect out")
    if options.check:
        report = predictions.check(
            options.profiles[0], options.profiles[1], options.change, options.file
        )
    elif options.change and options.expect is not None:
        report = predictions.predict(
            options.profiles[0], options.change, options.expect, "v1", options.file
        )
    else:
        parser.error("a prediction needs --change and --expect")
    print(report.terminal())


if __name__ == "__main__":
    cli.command(main)
