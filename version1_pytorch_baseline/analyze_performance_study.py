"""Summarizes what launch_performance_study.sh measured, of any version: prints it, and writes it as Markdown and as a page.

    python analyze_performance_study.py --folder performance_study/tiny

Writes performance_study.md, .html and, with a profile, spans.png into the folder.
"""

from pathlib import Path

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
