"""Makes the dashboard of what run_lab.py measured: one HTML page that needs no network and no script.

python report.py profiling_lab.json --output profiling_lab.html
"""

from pathlib import Path

from common import cli
from common.documents import lab_dashboard


def main() -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument("results", type=Path, metavar="FILE.json", help="from run_lab.py")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.html")
    options = parser.parse_args()
    lab_dashboard.write_page(options.results, options.output)
    print(f"written: {options.output}")


if __name__ == "__main__":
    cli.command(main)
