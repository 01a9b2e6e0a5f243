"""Times launches on the host, for the problem (explanations): what one costs in PyTorch, Triton, a
compiled and a captured graph.

    python launch_cost.py                     # needs a GPU, and two to four minutes
    python launch_cost.py --presets tiny

Nothing waits for the GPU while the host is timed, and the kernels of calls and chains are shorter
than their launches. The file launch_cost.json has three lists:

    calls     one launch, with less and more of Python around it
    chains    x = silu(x W) x, 20 times over with its gradient: eager, compiled, with Version 3's
              kernel, and that captured
    steps     a training step in bf16 of compiled Version 2 and of Versions 3 and 4, in turns, not
              captured
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the root of this clone

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

from common import ROOT, cli
from common import device as devices
from common.config import PRESETS
from common.options import Options
from common.precision import Precision
from common.timing import benchmark
from common.training import record
from studies import ablation, version_files
from tracepage.errors import UsageError
from tracepage.files import write_measurement
from tracepage.show import tables
from tracepage.terminal import progress
from version3_triton import kernels

import torch
import torch.nn.functional as F
from torch import Tensor

OUT = Path("launch_cost.json")
LINKS = 20  # of a chain
VERSIONS = {  # file and flags
    "v2-compile": ("version2_pytorch_fused/tiny_llama_v2.py", "--enable-torch-compile"),
    "v3": ("version3_triton/tiny_llama_v3.py",),
    "v4": ("version4_ultra_fused/tiny_llama_v4.py",),
}


def host_us(function: Callable[[], object], calls: int) -> float:
    """Microseconds of the host for a call, the median of seven rounds; the GPU catches up between
    the rounds.
    """
    times = []
    for _ in range(8):  # the first warms up
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times[1:])


def launches(function: Callable[[], object]) -> int:
    """Kernels, copies and fills that one call launches, after one that may compile."""
    counted = ablation.count(function)
    assert counted.steps, "a trace of ours marks its steps"
    return round(counted.table.calls.sum() / counted.steps)


def calls(device: torch.device) -> list[dict[str, Any]]:
    from version3_triton.kernels.launch_sizes import ceil_div, tile
    from version3_triton.kernels.rms_norm import _rms_norm_forward

    rows = 256
    size = 512
    x = torch.ones(rows, size, device=device)
    weight = torch.ones(size, device=device)
    out = torch.empty_like(x)
    y = torch.empty_like(x)
    rstd = torch.empty(rows, device=device)
    square = torch.empty(size, size, device=device)
    blocks = tile("norm_forward", size, device)
    constants = {"ADD": False, "COPY": False, "ROWS": blocks.rows, "BLOCK": blocks.columns}
    arguments = (x, None, weight, x, y, rstd, None, rows, size, 1e-6)
    grid = (ceil_div(rows, blocks.rows), 1, 1)

    def triton_launch() -> Any:
        return _rms_norm_forward[grid](*arguments, **constants, num_warps=blocks.warps)

    compiled = triton_launch()
    ways: dict[str, Callable[[], object]] = {
        "PyTorch, an operation that has its result's memory": lambda: torch.mul(x, x, out=out),
        "PyTorch, a matrix product that has its result's memory": lambda: torch.mm(
            x.T, x, out=square
        ),
        "PyTorch, its own RMSNorm": lambda: F.rms_norm(x, (size,), weight, 1e-6),
        "Triton, a compiled kernel by its handle": lambda: compiled[grid](
            *arguments, *constants.values(), False
        ),
        "Triton, the same by kernel[grid]": triton_launch,
        "Version 3's rms_norm around it": lambda: kernels.KERNELS.rms_norm(x, weight, 1e-6),
    }
    return [{"call": name, "host_us": host_us(way, calls=200)} for name, way in ways.items()]


def chains(device: torch.device) -> list[dict[str, Any]]:
    x = torch.ones(256, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    matrix = torch.eye(256, device=device, dtype=torch.bfloat16, requires_grad=True)

    def chain(value: Tensor, swiglu: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        for _ in range(LINKS):
            value = swiglu(value @ matrix, value)
        return value

    def with_gradient(
        function: Callable[..., Tensor], swiglu: Callable[[Tensor, Tensor], Tensor]
    ) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(x, swiglu).sum(), (x, matrix))

    ours = with_gradient(chain, kernels.KERNELS.swiglu)
    ways = {
        "eager": with_gradient(chain, kernels.REFERENCE.swiglu),
        "compiled": with_gradient(devices.compiled(chain, device), kernels.REFERENCE.swiglu),
        "Version 3's kernel": ours,
    }
    rows = [
        {"chain": name, "launches": launches(way), "host_us": host_us(way, calls=20)}
        for name, way in ways.items()
    ]
    captured = host_us(devices.capture_graph(ours), calls=20)
    rows.append(rows[-1] | {"chain": "that, captured", "host_us": captured})
    return rows


def steps(preset: str, device: torch.device) -> list[dict[str, Any]]:
    calls: dict[str, Callable[[], object]] = {}
    for name, (path, *flags) in VERSIONS.items():
        version = version_files.load(ROOT / path)
        wanted = version_files.parser(None).parse_args(["--preset", preset, "--use-amp"])
        options: Options = version_files.switched(version, version_files.resolve(wanted), *flags)
        model = version.make_model(options).to(device)
        optimizer = version.make_optimizer(model, options)
        step = version.make_step(model, optimizer, Precision(device, torch.bfloat16))
        calls[name] = functools.partial(step, version_files.random_batch(options, device))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(5):
        for name, call in calls.items():
            times[name] += benchmark(call, device, warmup=5)
    rows = []
    for name, call in calls.items():
        row: dict[str, Any] = {"preset": preset, "version": name, "launches": launches(call)}
        row["ms"] = statistics.median(times[name])
        row["us_per_launch"] = 1e3 * row["ms"] / row["launches"]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--presets",
        nargs="*",
        choices=PRESETS,
        default=["tiny", "small", "medium"],
        help="of the whole steps",
    )
    arguments = cli.parse(parser)
    device = devices.select("auto")
    if not devices.is_gpu(device) or kernels.missing(device):
        raise UsageError("launch_cost.py times launches of Triton kernels: it needs a GPU")
    devices.configure(device, seed=0)
    measured = record.header("tiny-llama-launch-cost/1", device, "bf16")
    with progress("timing launches"):
        measured["calls"] = calls(device)
        measured["chains"] = chains(device)
        for row in measured["chains"]:
            row["us_per_launch"] = row["host_us"] / row["launches"]
        measured["steps"] = [row for preset in arguments.presets for row in steps(preset, device)]
    write_measurement(OUT, measured, "launch_cost.json")
    for part in ("calls", "chains", "steps"):
        rows = [list(row.values()) for row in measured[part]]
        print(tables.markdown(list(measured[part][0]), rows) if rows else "")


if __name__ == "__main__":
    cli.command(main)
