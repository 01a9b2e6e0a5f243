"""Compares two versions: the newest runs and profiles in their folders that can be compared.

python compare_versions.py --v1 ../version1_pytorch_baseline --v2 .
python compare_versions.py --v1 ../version1_pytorch_baseline --v2 . --output comparison.md
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of this clone

from common import cli
from tracepage.views import version_comparison


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--v1", type=Path, required=True, metavar="DIR", help="folder of the version before")
    add("--v2", type=Path, required=True, metavar="DIR", help="folder of the other version")
    add("--output", type=Path, metavar="FILE.md", help="write the same as Markdown")
    options = cli.parse(parser)
    report = version_comparison.render_versions(options.v1, options.v2)
    print(
        report.publish_as(options.output, ("md",), "--output")
        if options.output
        else report.terminal()
    )


if __name__ == "__main__":
    cli.command(main)
