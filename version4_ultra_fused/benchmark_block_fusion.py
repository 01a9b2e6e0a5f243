"""Times one block, forward: as a single kernel with a program for each sequence, and as Version 4's kernels one after the other.

    python benchmark_block_fusion.py --use-amp
    python benchmark_block_fusion.py --use-amp --batch-sizes 64,96,128,192 --metrics-out block_fusion.json

Both are captured as a CUDA or HIP graph of several passes and take turns, so neither pays for the host. The layered path is given
a branch to add, as in the model, so both do all the work of a block. Weights are in the dtype of the products from the start.
`kernels/block.py` says what was expected, and why. The results of the two are compared first.

The JSON file, schema "tiny-llama-block-fusion/1":

    command, date, device, environment, model, precision   as in a run record
    sequence_length                                        S
    rows    {"batch_size", "single_ms" and "layered_ms": {"median", "p20", "p80", "count"} of a pass,
            "difference": the largest between the two results, relative to the largest element}
"""

from argparse import Namespace
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import cli
from common import device as devices
from common.analysis.output import tables
from common.errors import RunError, UsageError
from common.files import writable_file, write_measurement
from common.precision import Precision
from common.progress import progress
from common.timing import benchmark, summarize
from common.training import record, version_files
from version3_triton.kernels import missing
from version4_ultra_fused.tiny_llama_v4 import TinyLlama

import torch

SCHEMA = "tiny-llama-block-fusion/1"
BATCH_SIZES = [1, 8, 32, 64, 128, 256, 512]
PASSES, ROUNDS, ITERATIONS = 20, 5, 20  # of a graph; turns of each contender; replays in a turn
ALLOWED = 0.03  # relative difference of the two results, which round to 16 bits at different places


def times(works: dict[str, Callable[[], object]], device: torch.device) -> dict[str, dict[str, float | int]]:
    """A summary of the milliseconds of a pass for each of `works`."""
    graphs = {name: devices.capture_graph(work, PASSES) for name, work in works.items()}
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, replay in graphs.items():
            found[name] += [ms / PASSES for ms in benchmark(replay, device, iterations=ITERATIONS)]
    return {name: summarize(values) for name, values in found.items()}


@torch.no_grad()
def measure(
    options: Namespace, device: torch.device, keep: Callable[[dict[str, Any]], None] = lambda measured: None
) -> dict[str, Any]:
    """The content of the JSON file.

    Args:
        keep: called with that content after each batch size; its rows are those so far.

    Raises:
        UsageError: the kernel does not take a block of this shape.
        RunError: the two results differ.
    """
    from version4_ultra_fused.kernels import block  # needs Triton, of which main has made sure

    devices.prepare(device, options.seed)
    precision, length, hidden = Precision(device, cli.amp_dtype(options)), options.seq_len, options.model.hidden_size
    model = TinyLlama(options.model.model_copy(update={"num_layers": 1})).to(device)
    layer = model.layers[0]
    if not block.takes(torch.empty(length, hidden, device=device), layer, length):
        raise UsageError(f"S {length}, {tables.letters(options.model.model_dump())}: the kernel of a block {block.LIMITS}")
    for parameter in layer.parameters():
        parameter.working = parameter.detach().to(precision.dtype)
    rows: list[dict[str, Any]] = []
    head = record.header(SCHEMA, device, precision.name, tf32=False, model=options.model)
    measured = head | {"sequence_length": length, "rows": rows}
    with precision.autocast():
        for size in sorted(set(options.batch_sizes)):
            x = torch.randn(size * length, hidden, device=device)
            branch = torch.zeros_like(x, dtype=precision.dtype)
            works = {
                "single": lambda x=x: block.block_forward(x, layer, model.cos, model.sin, length),
                "layered": lambda x=x, branch=branch: layer(x, branch, model, length),
            }
            ours, right = works["single"](), sum(works["layered"]())
            difference = ((ours - right).abs().max() / right.abs().max()).item()
            if not difference <= ALLOWED:
                raise RunError(f"B {size}: the single kernel and the layered path differ by {difference:.2g}")
            row = {f"{name}_ms": summary for name, summary in times(works, device).items()}
            rows.append({"batch_size": size, **row, "difference": difference})
            keep(measured)
    return measured


def break_even(rows: list[dict[str, Any]]) -> float | None:
    """The batch size, by linear interpolation, at which the single kernel first becomes as fast as the layered path.

    None if it never does, or is as fast at the smallest batch size already.
    """
    lost = [(row["batch_size"], row["single_ms"]["median"] - row["layered_ms"]["median"]) for row in rows]  # ms
    for (before, slower), (after, faster) in pairwise(lost):
        if slower > 0 >= faster:
            return before + (after - before) * slower / (slower - faster)
    return None


def report(measured: dict[str, Any]) -> str:
    """A row for each batch size, and where the single kernel is faster."""
    rows, programs = measured["rows"], measured["device"]["multiprocessors"]
    unit, factor = tables.time_unit(max(row[f"{name}_ms"]["median"] for row in rows for name in ("single", "layered")))
    header = ["B", "B / multiprocessors"]
    header += [f"{name} {key}" for name in ("single", "layered") for key in (unit, "p20", "p80")] + ["layered / single"]
    body = [
        [row["batch_size"], row["batch_size"] / programs]
        + [row[f"{name}_ms"][key] * factor for name in ("single", "layered") for key in ("median", "p20", "p80")]
        + [row["layered_ms"]["median"] / row["single_ms"]["median"]]
        for row in rows
    ]
    faster = [str(row["batch_size"]) for row in rows if row["single_ms"]["median"] < row["layered_ms"]["median"]]
    verdict = f"The single kernel is faster at B = {', '.join(faster)}." if faster else "The single kernel is never faster."
    if (size := break_even(rows)) is not None:
        verdict += f" It breaks even near B = {size:.0f}."
    where = (
        f"One block forward, S {measured['sequence_length']}, {tables.letters(measured['model'])}, "
        f"{measured['precision']['compute']}, {measured['device']['name']}, torch {measured['environment']['torch']}"
    )
    return f"{where}\n\n{tables.text(header, body)}\n\n{verdict}"


def main() -> None:
    parser = version_files.parser(__doc__, batch_size=False, capture=False)
    parser.add_argument("--batch-sizes", type=cli.positive_list, default=BATCH_SIZES, metavar="B,B,...")
    parser.add_argument("--metrics-out", type=Path, metavar="FILE.json", help="also write the times")
    options = version_files.resolve(parser.parse_args())
    device = devices.select(options.device)
    if not devices.is_gpu(device):
        raise UsageError("this benchmark needs a GPU: its times on a CPU would say nothing about one")
    if reason := missing(device):
        raise UsageError(f"this benchmark times a Triton kernel: {reason}")
    if options.metrics_out:
        writable_file(options.metrics_out, "--metrics-out")

    def keep(measured: dict[str, Any]) -> None:
        if options.metrics_out:
            write_measurement(options.metrics_out, measured, "--metrics-out")

    with progress("timing the block"):
        measured = measure(options, device, keep)
    print(report(measured))


if __name__ == "__main__":
    cli.command(main)
