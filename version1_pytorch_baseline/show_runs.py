"""Shows records of runs side by side: step times, whether losses are equal bit for bit, measured ceilings.

python show_runs.py metrics_v1.json
python show_runs.py metrics_a.json metrics_b.json
"""

import argparse
import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

from common import cli
from tracepage.views import runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, nargs="+", metavar="FILE", help="what a run wrote to --metrics-out")
    print(runs.show(cli.parse(parser).records).terminal())


if __name__ == "__main__":
    cli.command(main)
