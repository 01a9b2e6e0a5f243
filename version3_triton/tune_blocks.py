"""Times the kernels with many tiles on this GPU, to choose the sizes in `kernels/launch_sizes.py`.

    python tune_blocks.py
    python tune_blocks.py --kernels keys --head-dims 128 --seq-len 8192 --output tiles.json

Each kernel is compiled with every candidate, in several processes at once. Its time is the median over runs of the time on the
GPU, summed over forward and backward where one choice serves both. A candidate that needs more shared memory than there is gets
no time. Attention's tiles are chosen for each head dimension, all others for all sizes together, by the mean of time / fastest
time. Printed are the three best of each, and the one in the table now. Some of the fast ones of attention spill registers; none
that does may stand in the table (`compile_kernels.py`).

The JSON file, schema "tiny-llama-tiles/1":

    command, date, device, environment, dtype, batch_size, sequence_length, heads
    rows    {"kernel", "size": of a row, or head dimension, "candidate": of LaunchConfig or TileConfig, "us": median or null}
    chosen  {"kernel", "size": null where it serves all, "candidate", "relative": to the fastest, "in_table": bool}
"""

import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

import argparse
import itertools
import multiprocessing
import operator
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any, NamedTuple

from common import cli
from common.progress import progress

cli.require("triton")

from common import device as devices
from common.analysis.output import tables
from common.config import ModelConfig
from common.errors import UsageError
from common.files import writable_file, write_measurement
from common.precision import Precision
from common.training import record
from version3_triton import benchmark_kernels, kernels
from version3_triton.kernels import launch_sizes
from version3_triton.kernels.launch_sizes import LaunchConfig, TileConfig

import torch
from torch.profiler import ProfilerActivity, profile
from triton.runtime.errors import OutOfResources

SCHEMA = "tiny-llama-tiles/1"
RUNS = 5


class Subject(NamedTuple):
    """What a choice of `kernels/launch_sizes.py` decides: functions of an operation, at these lengths of a row."""

    operation: str
    functions: tuple[str, ...]
    sizes: tuple[int, ...] = ()


SUBJECTS = {
    "forward": Subject("attention", ("_flash_attention_forward",)),
    "queries": Subject("attention", ("_flash_attention_backward_queries",)),
    "keys": Subject("attention", ("_flash_attention_backward_keys",)),
    "norm_forward": Subject("add_rms_norm", ("_rms_norm_forward",), (512, 1024, 2048, 4096)),
    "norm_backward": Subject("add_rms_norm", ("_rms_norm_backward", "_rms_norm_dweight"), (512, 1024, 2048, 4096)),
    "swiglu": Subject("swiglu", ("_swiglu_forward", "_swiglu_backward"), (1408, 4096, 5632, 16384)),  # 2.75 or 4 times D
    "rope": Subject("apply_rope", ("_rope_forward",), (32, 64)),  # half a head
    "cross_entropy": Subject("linear_cross_entropy", ("_linear_cross_entropy_loss_and_gradient",), (1000, 32000)),
}
Candidate = TileConfig | LaunchConfig


def numbers(candidate: Candidate) -> list[int]:
    """A candidate as a row of the file has it; the size of a matrix instruction only where one is asked for."""
    found = list(astuple(candidate))
    return found[:4] if found[4:] == [0] else found


def candidates(kernel: str, dtype: torch.dtype) -> list[Candidate]:
    """Of attention: long in what a program owns, short in what it goes over; in float32 half of that and no pipeline."""
    if kernel in launch_sizes.LAUNCH:
        loops = ((2, 4, 8), (1, 2)) if kernel == "norm_backward" else ((1,), (1,))
        return [LaunchConfig(*values) for values in itertools.product((1024, 2048, 4096, 8192), (4, 8, 16, 32), *loops)]
    owned, passed, stages = ((32, 64, 128), (16, 32), (1,)) if dtype.itemsize == 4 else ((64, 128), (32, 64, 128), (1, 2, 3, 4))
    sizes = [(n, m) if kernel == "keys" else (m, n) for m, n in itertools.product(owned, passed)]
    return [TileConfig(*size, warps, depth) for size, warps, depth in itertools.product(sizes, (4, 8), stages)]


def table_of(kernel: str, size: int, dtype: torch.dtype) -> tuple[dict[str, Any], str]:
    """Where the choice stands in `kernels/launch_sizes.py`: a dictionary and its key."""
    if kernel in launch_sizes.LAUNCH:
        return launch_sizes.LAUNCH[kernel], launch_sizes.family()
    return launch_sizes.ATTENTION[launch_sizes.family(), dtype.itemsize][64 if size <= 64 else 128], kernel


@contextmanager
def in_table(kernel: str, size: int, dtype: torch.dtype, candidate: Candidate) -> Iterator[None]:
    """Inside it the candidate stands in the table of the kernels' sizes."""
    table, key = table_of(kernel, size, dtype)
    now, table[key] = table[key], candidate
    try:
        yield
    finally:
        table[key] = now


def step_of(kernel: str, size: int, dtype: torch.dtype, batch: int, heads: int, length: int) -> Callable[[], object]:
    """Forward and backward of the kernel's operation, as `benchmark_kernels.py` times it."""
    operation, head_dim = SUBJECTS[kernel].operation, 2 * size if kernel == "rope" else size
    sizes = {
        "add_rms_norm": {"hidden_size": size},
        "swiglu": {"intermediate_size": size},
        "linear_cross_entropy": {"vocab_size": size, "hidden_size": 16},
    }.get(operation, {"hidden_size": heads * head_dim, "num_attention_heads": heads})
    precision = Precision(devices.select("auto"), None if dtype == torch.float32 else dtype)
    work = benchmark_kernels.case(operation, (ModelConfig(**sizes), batch, length), precision)
    return work.step(kernels.KERNELS[operation])


def compile_one(kernel: str, size: int, dtype: torch.dtype, candidate: Candidate, heads: int) -> bool:
    """Fills Triton's cache on disk; False if the tile does not fit."""
    with in_table(kernel, size, dtype, candidate):
        try:
            step_of(kernel, size, dtype, 1, heads, 256)()
        except OutOfResources:
            return False
    return True


def gpu_time(functions: Sequence[str], step: Callable[[], object]) -> float:
    """Microseconds of these functions on the GPU in a forward and backward pass, by the median of each."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        for _ in range(RUNS):
            step()
        torch.cuda.synchronize()
    events = recorded.events()
    return sum(statistics.median(event.device_time for event in events if event.name == name) for name in functions)


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The content of the JSON file after each kernel and size, and at the end, when all are timed, with what is chosen."""
    dtype = getattr(torch, options.dtype)
    rows: list[dict[str, Any]] = []
    chosen: list[dict[str, Any]] = []
    measured = record.header(SCHEMA, torch.device("cuda")) | {
        "dtype": options.dtype, "batch_size": options.batch_size, "sequence_length": options.seq_len, "heads": options.heads,
        "rows": rows, "chosen": chosen,
    }  # fmt: skip
    cases = [
        (kernel, size, dtype, candidate)
        for kernel in options.kernels
        for size in SUBJECTS[kernel].sizes or options.head_dims
        for candidate in dict.fromkeys([*candidates(kernel, dtype), operator.getitem(*table_of(kernel, size, dtype))])
    ]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        fits = pool.starmap(compile_one, [(*case, options.heads) for case in cases], chunksize=4)
    for (kernel, size), of_size in itertools.groupby(zip(cases, fits, strict=True), key=lambda pair: pair[0][:2]):
        step = step_of(kernel, size, dtype, options.batch_size, options.heads, options.seq_len)
        for case, fit in of_size:
            with in_table(*case):
                us = gpu_time(SUBJECTS[kernel].functions, step) if fit else None
            rows.append({"kernel": kernel, "size": size, "candidate": numbers(case[3]), "us": us})
        yield measured
    for kernel in options.kernels:
        for sizes in [SUBJECTS[kernel].sizes] if SUBJECTS[kernel].sizes else [(size,) for size in options.head_dims]:
            now = numbers(operator.getitem(*table_of(kernel, sizes[0], dtype)))
            chosen += ranked([row for row in rows if row["kernel"] == kernel and row["size"] in sizes], now)
    yield measured


def ranked(rows: list[dict[str, Any]], in_table: list[int]) -> list[dict[str, Any]]:
    """Of one choice: the three best candidates and the table's, by the mean over the sizes of time / fastest time."""
    sizes = {row["size"] for row in rows}
    fastest = {size: min(row["us"] for row in rows if row["size"] == size and row["us"]) for size in sizes}
    relative: dict[tuple[int, ...], list[float]] = {}
    for row in rows:
        if row["us"]:
            relative.setdefault(tuple(row["candidate"]), []).append(row["us"] / fastest[row["size"]])
    order = sorted((statistics.mean(values), one) for one, values in relative.items() if len(values) == len(sizes))
    return [
        {"kernel": rows[0]["kernel"], "size": rows[0]["size"] if len(sizes) == 1 else None, "candidate": list(one),
         "relative": mean, "in_table": list(one) == in_table}
        for place, (mean, one) in enumerate(order) if place < 3 or list(one) == in_table
    ]  # fmt: skip


def main() -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument("--kernels", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), metavar="NAME", help="default: all")
    parser.add_argument("--head-dims", type=cli.positive, nargs="+", default=[64, 128], help="of attention (default: 64 128)")
    parser.add_argument("--batch-size", type=cli.positive, default=4, help="default: 4")
    parser.add_argument("--heads", type=cli.positive, default=16, help="default: 16")
    parser.add_argument("--seq-len", type=cli.positive, default=4096, help="default: 4096")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="default: bfloat16")
    parser.add_argument("--processes", type=cli.positive, default=8, help="that compile at once (default: 8)")
    parser.add_argument("--output", type=Path, default=Path("tiles.json"), metavar="FILE", help="default: tiles.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise UsageError("tiles are chosen by their time on a GPU, and there is none")
    writable_file(options.output, "--output")
    with progress("compiling and timing candidates"):
        for measured in measure(options):
            write_measurement(options.output, measured, "--output")
    body = [
        [row["kernel"], row["size"], " x ".join(map(str, row["candidate"])), row["relative"], "*" if row["in_table"] else ""]
        for row in measured["chosen"]
    ]
    print(tables.text(["kernel", "size", "candidate", "x fastest", "in table"], body))


if __name__ == "__main__":
    cli.command(main)
