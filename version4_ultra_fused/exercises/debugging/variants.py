"""Trains or checks a variant of Version 4: a file with its functions, one of them replaced.

    python variants.py starter/variant_a.py --num-steps 100 --use-amp
    python variants.py starter/variant_a.py --use-amp --check

`--check` takes six steps with two batches in turn, beside Version 4's without side stream and graph, from the same weights. Exit
code 1 where losses differ or a run is refused. On a GPU all work on the side stream is made to start late, because a program that
waits where it has to computes the same, however long its parts take. All other flags are Version 4's.
"""

import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType

from common import cli
from common import device as devices
from common.analysis.output import tables
from common.options import RunOptions
from common.precision import Precision, amp_dtype
from common.training import preparation, version_files
from version4_ultra_fused import tiny_llama_v4 as v4
from version4_ultra_fused.memory.side_stream import SideStream

import torch

STEPS, TOLERANCE = 6, 0.02  # nats
LATE = 2_000_000  # cycles of the device, about 1 ms


@contextmanager
def late_side_stream() -> Iterator[None]:
    """Inside it each piece of work on a side stream starts late."""
    run = SideStream.run
    SideStream.run = lambda side, work, *tensors: run(side, lambda: (torch.cuda._sleep(LATE), work()), *tensors)  # type: ignore
    try:
        yield
    finally:
        SideStream.run = run  # type: ignore[method-assign]


def losses(version: ModuleType, options: RunOptions) -> list[float]:
    """Of STEPS training steps, with two batches in turn."""
    device = devices.select(options.device)
    devices.configure(device, options.seed)
    precision = Precision(device, amp_dtype(options))
    batches = [version_files.random_batch(replace(options, seed=options.seed + i), device) for i in range(2)]
    prepared = preparation.prepare_for_study(version, options, precision, batches[0])
    return [prepared.step(batches[i % 2]).item() for i in range(STEPS)]


def check(version: ModuleType, options: RunOptions) -> int:
    """Prints the losses beside Version 4's. Returns the exit code."""
    expected = losses(v4, replace(options, capture_step=False, switches={**options.switches, "side-stream": False}))
    with late_side_stream():
        got = losses(version, options)
    rows = [[i + 1, "AB"[i % 2], *pair] for i, pair in enumerate(zip(expected, got, strict=True))]
    print(tables.text(["step", "batch", "Version 4", "variant"], rows))
    if not all(abs(ours - theirs) <= TOLERANCE for ours, theirs in zip(expected, got, strict=True)):
        print(f"FAIL: losses differ by more than {TOLERANCE} nats")
        return 1
    on_gpu = devices.is_gpu(devices.select(options.device))
    unseen = "" if on_gpu else "; but a CPU has no side stream, whose faults show on a GPU alone"
    print(f"PASS: the losses are Version 4's{unseen}")
    return 0


def main() -> int:
    parser = version_files.run_parser(v4, __doc__)
    parser.add_argument("file", type=Path, metavar="FILE.py", help="the variant")
    parser.add_argument("--check", action="store_true", help="compare its losses with Version 4's, in place of training")
    arguments = cli.parse(parser)
    version, options = version_files.load(arguments.file), cli.resolve(RunOptions, arguments, v4.SWITCHES)
    if arguments.check:
        return check(version, options)
    return v4.train(replace(options, name=arguments.file.stem), version.make_model, version.make_step).exit_code


if __name__ == "__main__":
    cli.command(main)
