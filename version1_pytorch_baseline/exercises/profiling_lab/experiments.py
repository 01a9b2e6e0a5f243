"""Four bottlenecks, four fixes for Version 1, and one layer of Version 1 by span.

    python experiments.py bottlenecks
    python experiments.py fixes --preset small --num-steps 20
    python experiments.py layer --device cpu

A bottleneck is the same work done in two or three ways, and the first way is the mistake. A fix changes one thing in the training
of Version 1. Each fix runs in its own process with the same weights and the same batch, so the loss is the same within rounding.
"""

import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

import concurrent.futures
import functools
import multiprocessing
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from common import cli, spans
from common import device as devices
from common.analysis.profiles import chrome_trace
from common.config import PRESETS
from common.options import Options
from common.precision import Precision
from common.records import step_profile
from common.rope import rope_tables
from common.spans import span
from common.timing import benchmark, summarize
from common.training import version_files

import toolkit
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

V1 = Path(__file__).resolve().parents[2] / "tiny_llama_v1.py"
Ways = dict[str, Callable[[], object]]  # the same work, by name; the first is the mistake


# --------------------------------------------------------------------------------------------------- four bottlenecks


def memory_bandwidth(device: torch.device, elements: int) -> Ways:
    """a + b c of large tensors takes 2 FLOPs per element either way; two operations move 6 numbers per element, one moves 4."""
    a, b, c, out = (torch.ones(elements, device=device) for _ in range(4))

    def two_passes() -> Tensor:
        torch.mul(b, c, out=out)
        return torch.add(a, out, out=out)

    return {"mul, then add": two_passes, "addcmul": lambda: torch.addcmul(a, b, c, out=out)}


def launch_overhead(device: torch.device, elements: int) -> Ways:
    """Doubling many small tensors takes one launch for each tensor, or one for all of them."""
    flat = torch.zeros(elements, device=device)
    parts = flat.split(64)

    def one_by_one() -> None:
        for part in parts:
            part.mul_(2)

    return {
        f"{len(parts)} operations": one_by_one,
        "one operation on a list": lambda: torch._foreach_mul_(parts, 2),
        "one operation on one tensor": lambda: flat.mul_(2),
    }


def transfer(device: torch.device, elements: int) -> Ways:
    """Doubling numbers of the host. A copy from pageable memory goes through a pinned buffer; resident numbers need no copy."""
    if not devices.is_gpu(device):
        return {}
    pageable = torch.ones(elements)
    pinned, resident = pageable.pin_memory(), pageable.to(device)
    return {
        "copied from pageable memory": lambda: pageable.to(device) * 2,
        "copied from pinned memory": lambda: pinned.to(device, non_blocking=True) * 2,
        "already on the device": lambda: resident * 2,
    }


def prefetching(device: torch.device, elements: int) -> Ways:
    """Using eight batches of the host: each is copied before it is used, or by a thread while the one before it is used."""
    on_gpu = devices.is_gpu(device)
    here = torch.ones(8, elements // 8, pin_memory=on_gpu)
    there, stream = torch.empty(here.shape, device=device), torch.cuda.Stream(device) if on_gpu else None
    thread = concurrent.futures.ThreadPoolExecutor(1)

    def copy(i: int) -> Tensor:
        return there[i].copy_(here[i], non_blocking=True)

    def copy_ahead(i: int) -> Tensor:
        with torch.cuda.stream(stream):  # a queue of its own; on a CPU there is none
            row = copy(i)
        if stream:
            stream.synchronize()
        return row

    def use(row: Tensor) -> Tensor:
        for _ in range(16 if on_gpu else 1):  # about as long as a copy
            row.mul_(2)
        return row.sum()

    return {
        "each batch copied, then used": lambda: float(sum(map(use, map(copy, range(8))))),
        "the next batch copied meanwhile": lambda: float(sum(map(use, thread.map(copy_ahead, range(8))))),
    }


def synchronization(device: torch.device, elements: int) -> Ways:
    """Adding up the results of a hundred operations: `.item()` waits for the device each time, or once at the end."""
    x = torch.ones(elements, device=device)

    def each_time() -> float:
        return sum((x * i).sum().item() for i in range(100))

    def at_the_end() -> float:
        total = torch.zeros((), device=device)
        for i in range(100):
            total += (x * i).sum()
        return total.item()

    return {".item() each time": each_time, ".item() at the end": at_the_end}


# Elements on a CPU and on a GPU: more than the caches hold to measure bandwidth, few to measure overhead.
BOTTLENECKS = {
    memory_bandwidth: (2**24, 2**27), launch_overhead: (2**15, 2**15), transfer: (2**24, 2**26), prefetching: (2**24, 2**26),
    synchronization: (2**10, 2**10),
}  # fmt: skip


def bottlenecks(device: torch.device, smaller: int = 1) -> Iterator[dict[str, Any]]:
    """The time of each way, as it is measured: `bottleneck`, `way`, `ms`. A CPU has no `transfer`.

    Args:
        smaller: divides the number of elements, for tests.
    """
    for make, sizes in BOTTLENECKS.items():
        for way, fn in make(device, sizes[devices.is_gpu(device)] // smaller).items():
            milliseconds = summarize(benchmark(fn, device))["median"]
            yield {"bottleneck": make.__name__, "way": way, "ms": milliseconds}


# --------------------------------------------------------------------------------------------------------- four fixes


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Version 1's causal attention in one kernel that writes no [S, S] matrix.

    PyTorch's float32 kernel for GPUs does not support grouped heads, so they are repeated first.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)  # [B, H, S, Dh]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def training_step(fix: str, options: Options) -> Callable[[], Tensor]:
    """A training step of Version 1 with one of FIXES, on one batch; it returns the loss before the update."""
    device = devices.select(options.device)
    devices.prepare(device, options.seed)
    v1 = version_files.load(V1)  # a separate module, so that a change to it changes nothing else
    if fix == "flash attention":
        vars(v1)["attention"] = fused_attention
    model = v1.make_model(options).to(device)
    if fix == "gradient checkpointing":
        for layer in model.layers:  # saves only the input of each layer, and recomputes the layer in the backward pass
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    if fix == "torch.compile":
        model.loss = torch.compile(model.loss)
    precision = Precision(device, torch.bfloat16 if fix == "mixed precision" else None)
    step, batch = v1.make_step(model, v1.make_optimizer(model, options), precision), version_files.random_batch(options, device)
    return lambda: step(batch)


@dataclass(frozen=True, kw_only=True)
class LabOptions(Options):
    num_steps: int


FIXES = ("none", "torch.compile", "flash attention", "mixed precision", "gradient checkpointing")


def measure_fix(fix: str, options: LabOptions) -> dict[str, Any]:
    """Step time and peak memory after warm-up, and the loss after `options.num_steps` further steps."""
    device, step = devices.select(options.device), training_step(fix, options)
    for _ in range(3):
        step()
    devices.synchronize(device)
    devices.reset_peak_memory(device)
    times = benchmark(step, device, warmup=0, iterations=options.num_steps)
    memory = devices.peak_memory(device)
    return {"fix": fix, "step_ms": summarize(times), **memory, "loss": step().item()}


def fixes(options: LabOptions) -> Iterator[dict[str, Any]]:
    """`measure_fix` of all FIXES that work here, each in a new process, so that it inherits no memory and no caches."""
    fresh = multiprocessing.get_context("spawn")
    for fix in FIXES:
        if fix == "torch.compile" and devices.compile_problem(devices.select(options.device)):
            continue
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=fresh) as process:
            yield process.submit(measure_fix, fix, options).result()


# ------------------------------------------------------------------------------------------------- one layer, by span

LAYER_STEPS = 3


def layer(options: Options) -> dict[str, Any]:
    """Forward and backward pass of one transformer layer of Version 1.

    Returns:
        ms: time of both passes without the profiler; profiled_ms: with it; on_gpu: whether GPU kernels ran;
        spans: {span: {"forward": ms, "backward": ms}}, of GPU kernels, or of operators on a CPU, the largest span first.
    """
    device, config = devices.select(options.device), options.model
    devices.prepare(device, options.seed)
    block = version_files.load(V1).Block(config).to(device)
    cos, sin = (table.to(device) for table in rope_tables(config.head_dim, options.seq_len, config.rope_theta))  # [S, Dh]
    x = torch.randn(options.batch_size, options.seq_len, config.hidden_size, device=device, requires_grad=True)
    gradient = torch.randn_like(x)

    def step() -> None:
        block.zero_grad()
        x.grad = None
        y = block(x, cos, sin)  # [B, S, D]
        with span("backward"):
            y.backward(gradient)

    undisturbed = summarize(benchmark(step, device))["median"]
    spans.recording = True
    trace = toolkit.trace(step, device, LAYER_STEPS, record_shapes=True)  # shapes identify the residual additions
    spans.recording = False
    profile = chrome_trace.profile_tables(trace)
    return {
        "ms": undisturbed, "profiled_ms": sum(profile["step_us"]) / LAYER_STEPS / 1e3, "on_gpu": bool(profile["kernels"]),
        "spans": step_profile.span_milliseconds(profile),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- command


def add_flags(parser: cli.Parser) -> None:
    """The flags of `resolve`."""
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="of Version 1, for fixes and layer (default: tiny)")
    parser.add_argument("--num-steps", type=cli.positive, default=20, metavar="N", help="timed steps of a fix (default: 20)")
    cli.add(parser, "--device")


def resolve(arguments: Namespace) -> LabOptions:
    """The options for a preset, a device and a number of steps."""
    defaults = vars(version_files.parser(None).parse_args([]))
    return cli.resolve(LabOptions, Namespace(**defaults | vars(arguments)))


def main() -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument("what", choices=("bottlenecks", "fixes", "layer"))
    add_flags(parser)
    options = parser.parse_args()
    from common.analysis.output import tables
    from common.documents.lab_dashboard import PARTS

    measured = {
        "bottlenecks": lambda: list(bottlenecks(devices.select(options.device))),
        "fixes": lambda: list(fixes(resolve(options))),
        "layer": lambda: layer(resolve(options)),
    }[options.what]()
    print(tables.text(*PARTS[options.what].rows(measured)))


if __name__ == "__main__":
    cli.command(main)
