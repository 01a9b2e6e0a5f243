"""Compares two versions: the newest runs and profiles in their folders that can be compared, and their code.

python compare_versions.py --v1 ../version1_pytorch_baseline --v2 .
python compare_versions.py --v1 ../version1_pytorch_baseline --v2 . --output version_comparison.md
"""

from pathlib import Path

from common import cli
from common.analysis.comparisons import compare


def main() -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument("--v1", type=Path, required=True, metavar="DIR", help="folder of the version to compare against")
    parser.add_argument("--v2", type=Path, required=True, metavar="DIR", help="folder of the other version")
    parser.add_argument("--output", type=Path, metavar="FILE.md", help="write the same as Markdown")
    options = parser.parse_args()
    print(compare.versions(options.v1, options.v2, options.output))


if __name__ == "__main__":
    cli.command(main)
