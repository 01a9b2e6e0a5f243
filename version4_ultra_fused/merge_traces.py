"""Merges the traces of all processes of a job into one, which Perfetto shows with a group of tracks for each rank.

    torchrun --standalone --nproc-per-node 2 tiny_llama_v4.py --num-steps 10 --enable-pytorch-profiler --profile-dir traces
    python merge_traces.py traces --output all_ranks.json.gz

The folder holds the traces of one run. Processes of one host share a clock, so a rank that is late to a collective can be seen.
"""

import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

from common import cli
from common.analysis.comparisons import merge_traces


def main() -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument("folder", type=Path, help="of the traces, as --profile-dir named it")
    parser.add_argument(
        "--output", type=Path, default=Path("all_ranks.json.gz"), metavar="FILE", help="default: all_ranks.json.gz"
    )
    options = parser.parse_args()
    print(f"written: {options.output} ({merge_traces.write(options.folder, options.output)} ranks)")


if __name__ == "__main__":
    cli.command(main)
