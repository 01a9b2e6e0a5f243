"""Summarizes what launch_performance_study.sh measured, of any version: prints it, and writes it as Markdown and as a page.

    python analyze_performance_study.py --folder performance_study/tiny

Writes performance_study.md, .html and, with a profile, spans.png into the folder.
"""

import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

from common import cli
from common.analysis.comparisons import performance_study


def main() -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path("performance_study/tiny"), metavar="DIR", help="default: performance_study/tiny"
    )
    options = parser.parse_args()
    report = performance_study.analyze(options.folder)
    print(report.publish(options.folder, "performance_study", ("md", "html", "png"), "--folder"))


if __name__ == "__main__":
    cli.command(main)
