"""Shows records of runs side by side: step times, whether losses are equal bit for bit, ceilings.

python show_runs.py metrics_v1.json
python show_runs.py metrics_a.json metrics_b.json
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of this clone

from common import cli
from tracepage.views import runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "records", type=Path, nargs="+", metavar="FILE", help="what a run wrote to --metrics-out"
    )
    print(runs.render_runs(cli.parse(parser).records).terminal())


if __name__ == "__main__":
    cli.command(main)
