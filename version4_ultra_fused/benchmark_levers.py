"""Times work that Version 4 can do in more than one way, on a GPU in bf16.

The choices in `kernels/tiles.py`, `kernels/attention.py`, `kernels/norm.py` and for the update follow from these times.

    python benchmark_levers.py --presets tiny small medium large --metrics-out ../results/h200/levers.json

    rope, swiglu     a product with its epilogue, beside a library's product and a kernel after it
    attention        forward and backward: the kernel for short sequences, Version 3's kernels, PyTorch's (cuDNN)
    norm_backward    with Version 3's sizes, and with Version 4's
    norm after ...   its gradient in the epilogue of the product before it, beside that product and a kernel after it
    step             a whole captured step, as it is and without one of its levers
    update           AdamW before eight products of 8192 x 8192 x 1024, and beside them on a second stream

Times are microseconds of a replayed graph: the median of several, each of ten passes, or of 50 steps.
"""

import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import cast
from unittest.mock import patch

from common import cli
from common import config as configs
from common import device as devices
from common.analysis.reports.levers import report
from common.errors import UsageError
from common.files import writable_file, write_measurement
from common.options import Options
from common.progress import progress
from common.records import kernel_files
from common.records.fields import Summary
from common.studies import known_models
from common.studies.benchmark import benchmark_process
from common.timing import benchmark, summarize
from common.training import record, version_files

cli.require("triton")

from version3_triton.kernels import dependent_launch, launch_sizes
from version4_ultra_fused.kernels import KERNELS, attention, matmul, matmul_norm_backward, norm, tiles
from version4_ultra_fused.kernels.attention import CausalAttention

import torch

PASSES, REPLAYS, STEPS = 10, 7, 50
SWITCHED = {
    "as it is": (), "without the memory plan": ("--disable-memory-plan",), "without the side stream": ("--disable-side-stream",),
    "without the early update": ("--disable-early-update",), "exact attention": ("--enable-exact-attention",),
}  # fmt: skip
# Levers without a switch, which a step can do without.
CHOSEN = {
    "without dependent launches": patch.dict(dependent_launch.ARGUMENTS, clear=True),
    "every SwiGLU in a kernel of its own": patch.dict(tiles.LARGEST, sm_90=tiles.LARGEST["sm_90"] | {"swiglu": 0}),
    "every norm's gradient in a kernel of its own": patch.dict(tiles.LARGEST, sm_90=tiles.LARGEST["sm_90"] | {"norm": 0}),
}
Lever = tuple[str, dict[str, Callable[[], object]]]


def levers(preset: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> list[Lever]:
    """Each lever at a preset's sizes: its name, and the ways to do the work by name."""
    settings = configs.resolve(preset, None, model={}, training={})
    config, training = settings.model, settings.training
    length, tokens = training.sequence_length, training.batch_size * training.sequence_length
    hidden, ffn, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
    width, rotated = sum(heads) * head_dim, sum(heads[:2]) * head_dim

    def half(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    x, qkv, gate_up, out = half(tokens, hidden), half(width, hidden), half(2 * ffn, hidden), half(tokens, hidden)
    packed, table = half(tokens, width), torch.randn(length, head_dim, device=device)
    total, rstd, weight = torch.randn(tokens, hidden, device=device), x.new_ones(tokens).float(), x.new_ones(hidden).float()

    def both(work: Callable[[int], object]) -> dict[str, Callable[[], object]]:
        """`work` is given the most elements of a product with an epilogue."""
        return {"epilogue": lambda: work(1 << 40), "library and a kernel": lambda: work(0)}

    def attend(form: str) -> Callable[[], object]:
        return lambda: CausalAttention(packed, table, table, length, heads, False, form).gradient(out)

    def norm_backward(sizes: launch_sizes.LaunchConfig) -> Callable[[], object]:
        return lambda: norm.add_norm_backward(x, x, total, weight, rstd, dtype, sizes)

    def product_norm_backward(matrix: torch.Tensor) -> dict[str, Callable[[], object]]:
        dout, dots = half(tokens, len(matrix)), torch.zeros(8, tokens, device=device)
        return both(
            lambda most: matmul_norm_backward.product_norm_backward(dout, matrix, dots, x, out, weight, rstd, dtype, most)
        )

    forms = {"Version 3's kernels": attend("own"), "PyTorch's": attend("library")}
    if length <= attention.SHORT and head_dim <= 64:
        forms = {"short": attend("short")} | forms
    return [
        ("rope", both(lambda most: matmul.qkv_rope(x, qkv, table, table, length, rotated, most))),
        ("swiglu", both(lambda most: matmul.gate_up_swiglu(x, gate_up, most))),
        ("norm after q, k and v", product_norm_backward(qkv)),
        ("norm after gate and up", product_norm_backward(gate_up)),
        ("attention", forms),
        ("norm_backward", {
            "Version 3's sizes": norm_backward(launch_sizes.LAUNCH["norm_backward"][launch_sizes.family()]),
            "Version 4's sizes": norm_backward(norm.BACKWARD["sm_90"]),
        }),
    ]  # fmt: skip


def update(device: torch.device) -> Lever:
    """AdamW on 47 million parameters and eight products, one after the other or on two streams."""
    buffers = [torch.zeros(47_000_000, device=device) for _ in range(3)]
    gradient, steps = torch.zeros_like(buffers[0], dtype=torch.bfloat16), torch.ones((), device=device)
    a, b = (torch.randn(8192, 1024, device=device, dtype=torch.bfloat16) for _ in range(2))
    side = torch.cuda.Stream()

    def adamw() -> None:
        KERNELS["adamw"](*buffers, gradient, gradient, steps, 1e-3, 0.9, 0.999, 1e-8, 0.01)

    def products() -> None:
        for _ in range(8):
            a @ b.T

    def one_after_the_other() -> None:
        adamw()
        products()

    def beside() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            adamw()
        products()
        torch.cuda.current_stream().wait_stream(side)

    return "update", {"one after the other": one_after_the_other, "beside": beside}


def steps(preset: str, device: torch.device, seed: int) -> Iterator[tuple[str, Summary]]:
    """Each way to switch a step of the preset, and its time in microseconds; all start from the same weights."""
    settings = configs.resolve(preset, None, model={}, training={})
    training = settings.training
    options = Options(
        preset=preset, config=None, model=settings.model, batch_size=training.batch_size, seq_len=training.sequence_length,
        learning_rate=training.learning_rate, seed=seed, device=str(device), use_amp=True, amp_dtype=None,
    )  # fmt: skip
    batch, path = version_files.random_batch(options, device), known_models.version_scripts()["v4"]

    def switched(flags: tuple[str, ...], chosen: AbstractContextManager) -> list[float]:
        with chosen:
            step = benchmark_process.built(known_models.Model("v4", path, flags), options)[0].step
        return benchmark(lambda: step(batch), device, iterations=STEPS)

    ways = {way: (flags, nullcontext()) for way, flags in SWITCHED.items()} | {way: ((), one) for way, one in CHOSEN.items()}
    for way, how in ways.items():
        yield way, cast(Summary, summarize([1e3 * one for one in switched(*how)]))


def microseconds(work: Callable[[], object], device: torch.device) -> Summary:
    times = benchmark(devices.capture_graph(work, PASSES), device, warmup=1, iterations=REPLAYS)
    return cast(Summary, summarize([1e3 * one / PASSES for one in times]))


def measure(presets: list[str], device: torch.device, seed: int) -> Iterator[kernel_files.Lever]:
    """A row for each way to do each lever's work, as it is measured."""
    for preset in (*presets, ""):
        for lever, ways in levers(preset, device) if preset else [update(device)]:
            for way, work in ways.items():
                yield {"preset": preset, "lever": lever, "way": way, "us": microseconds(work, device)}
    for preset in presets:
        for way, us in steps(preset, device, seed):
            yield {"preset": preset, "lever": "step", "way": way, "us": us}


def main() -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument("--presets", nargs="+", choices=configs.PRESETS, default=["tiny"], help="default: tiny")
    cli.add(parser, "--seed", "--device")
    parser.add_argument("--metrics-out", type=Path, metavar="FILE.json", help="also write the rows")
    options = parser.parse_args()
    device = devices.select(options.device)
    if not devices.is_gpu(device):
        raise UsageError("the levers are timed as replayed graphs, which need a GPU")
    if options.metrics_out:
        writable_file(options.metrics_out, "--metrics-out")
    seed = options.seed or 0
    torch.manual_seed(seed)
    head = record.header(kernel_files.LEVERS, device, "bf16")
    rows: list[kernel_files.Lever] = []
    with progress("timing the levers"):
        for row in measure(options.presets, device, seed):
            rows.append(row)
            if options.metrics_out:  # after each row: whatever ends the measurement, they are kept
                write_measurement(options.metrics_out, head | {"rows": rows}, "--metrics-out")
    print(report(rows).terminal())


if __name__ == "__main__":
    cli.command(main)
