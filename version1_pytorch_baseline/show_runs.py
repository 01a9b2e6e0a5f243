"""Shows records of runs side by side: step times, whether losses are equal bit for bit, measured ceilings.

python show_runs.py metrics_v1.json
python show_runs.py metrics_a.json metrics_b.json
"""

from pathlib import Path

from common import cli
from common.analysis.comparisons import runs


def main() -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument("records", type=Path, nargs="+", metavar="FILE", help="what a run wrote to --metrics-out")
    print(runs.show(parser.parse_args().records).terminal())


if __name__ == "__main__":
    cli.command(main)
