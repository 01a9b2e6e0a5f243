"""Shows what your functions predict, and who holds the peak of a snapshot.

python choose.py --preset medium --limit-gib 16
python choose.py --snapshot ../../../results/h100/memory_snapshot_v2_medium.json
"""

import argparse
import bisect
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the root of this clone

import exercise_tools as exercises
from common import cli
from common.options import Options
from tracepage import files
from tracepage.records.study_files import MemorySnapshot
from tracepage.show import tables

BATCHES = range(1, 2**16)
LENGTHS = range(1, 2**24)


def predict(memory, options: Options, limit: float) -> None:
    batch = options.batch_size
    length = options.seq_len
    room = limit * 2**30
    rows = []
    for kind in ("none", "block", "selective"):
        peak = functools.partial(memory.peak_bytes, options.model, kind=kind)
        largest = bisect.bisect_right(BATCHES, room, key=functools.partial(peak, length=length))
        longest = bisect.bisect_right(LENGTHS, room, key=functools.partial(peak, 1))
        rows.append([kind, peak(batch, length) / 2**20, largest, longest])
    print(
        tables.text(
            ["kind", f"MiB at {batch} x {length}", "largest batch", "longest sequence"], rows
        )
    )


@exercises.unsolved()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    cli.add(parser, "--preset", "--batch-size", "--seq-len")
    parser.add_argument(
        "--limit-gib",
        type=cli.amount,
        default=16,
        metavar="G",
        help="memory of the GPU (default: 16)",
    )
    parser.add_argument(
        "--snapshot", type=Path, metavar="FILE.json", help="show who holds its peak"
    )
    arguments = cli.parse(parser)
    memory = exercises.load(Path(__file__).parent, "memory")
    if arguments.snapshot:
        snapshot = files.read(arguments.snapshot, MemorySnapshot)
        for place, size in memory.holders(snapshot).most_common(12):
            print(f"{size / 2**20:8,.0f} MiB  {place}")
    else:
        predict(memory, cli.resolve(Options, arguments), arguments.limit_gib)


if __name__ == "__main__":
    cli.command(main)
