"""What this machine can do.

    python -m common.preflight                    # also `make preflight`; takes about a minute
    python -m common.preflight --json FILE.json   # for an instructor who collects these files

Each check prints one line. MACHINES.md says which part of the workshop needs what, and how to mend
what is missing. Exit code 0 says that Version 1 can be run, 1 that it can't.
"""

import argparse
import os
import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from common import ROOT, cli, data
from common import device as devices
from common.config import ModelConfig
from common.timing import OtherPrograms
from tracepage.errors import RunError, UsageError, first_line
from tracepage.files import writable_file, write_json
from tracepage.terminal import progress, wrapped

import torch

SCHEMA = "tiny-llama-preflight/1"
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
TOOLS = ("rocprofv3", "rocprof-sys-run", "rocprof-compute", "amd-smi", "nsys", "ncu", "nvidia-smi")
NEEDED = ("torch", "training", "text")  # without which no version runs


class Check(NamedTuple):
    """One fact about the machine: what is there, and whether that is enough."""

    name: str
    ok: bool
    found: str  # a key of the JSON file

    def line(self) -> str:
        return wrapped(f"  {'ok' if self.ok else 'missing':<8} {self.name:<14} {self.found}", 26)


def pytorch() -> Check:
    [(oldest, limit)] = re.findall(r'"torch>=([\d.]+),<([\d.]+)"', PROJECT)
    build = "CPU"
    if torch.version.cuda:
        build = f"CUDA {torch.version.cuda}"
    elif torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    fits = oldest <= torch.__version__ < limit  # as versions, not as text
    text = f"{torch.__version__} ({build}), Python {platform.python_version()}"
    if not fits:
        text += f"; {oldest} or newer, below {limit}, is needed"
    return Check("torch", fits, text)


def idle(device: torch.device) -> Check:
    """Whether other programs use the cores or the GPU."""
    note = OtherPrograms(device).note()
    return Check("idle device", not note, note or "no other program is seen to use it")


def gpu(device: torch.device) -> Check:
    if not devices.is_gpu(device):
        advice = "PyTorch sees none: everything runs on the CPU, without GPU times"
        return Check("GPU", False, advice)
    described = devices.describe(device)
    free, total = torch.cuda.mem_get_info(device)
    bf16 = "bf16"
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        bf16 = "no bf16: give --amp-dtype float16"
    gpus = f"{torch.cuda.device_count()} of {described['name']}"
    return Check("GPU", True, f"{gpus}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free, {bf16}")


def training(device: torch.device) -> Check:
    """Forward and backward of a small product."""
    x = torch.ones(64, 64)
    try:
        weight = torch.ones(64, 64, device=device, requires_grad=True)
        (x.to(device) @ weight).sum().backward()
        right = weight.grad is not None and torch.equal(weight.grad.cpu(), x.T @ x)
    except RuntimeError as error:
        return Check("training", False, first_line(error))
    verdict = "a product and its gradient" if right else "a product and its gradient are wrong"
    return Check("training", right, verdict)


def text() -> Check:
    try:
        dataset = data.load("stdlib", ModelConfig().vocab_size, seed=0)
    except (UsageError, RunError) as error:
        return Check("text", False, f"{error}")
    return Check("text", True, f"{len(dataset.tokens):,} tokens are in the cache")


def compiler(device: torch.device) -> Check:
    with progress("compiling with torch.compile"):
        problem = devices.compile_problem(device)
    return Check("torch.compile", not problem, problem or "works")


def triton() -> Check:
    try:
        import triton
    except ImportError as error:
        lost = "Versions 3 and 4 run PyTorch's operations in place of their kernels"
        return Check("triton", False, f"{first_line(error)}: {lost}")
    return Check("triton", True, triton.__version__)


def profiler(device: torch.device) -> Check:
    # PyTorch 2.12 and later print two lines of noise per profile.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    x = torch.ones(64, 64, device=device)
    on_gpu = devices.is_gpu(device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        _ = x @ x
        devices.synchronize(device)
    kernels = any(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())
    seen = "kernels" if kernels else "operators alone"
    return Check("profiler", kernels or not on_gpu, f"torch.profiler sees {seen}")


def tools() -> Check:
    installed = [name for name in TOOLS if shutil.which(name)]
    listed = ", ".join(installed) or f"none of {', '.join(TOOLS)}"
    return Check("tools", bool(installed), f"{listed} on PATH")


def checks(device: torch.device) -> Iterator[Check]:
    """Each check as soon as it is made."""
    yield idle(device)
    yield pytorch()
    yield gpu(device)
    yield training(device)
    yield text()
    yield compiler(device)
    yield triton()
    yield profiler(device)
    yield tools()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    text = "also write the checks as JSON"
    parser.add_argument("--json", type=Path, metavar="FILE.json", help=text)
    options = cli.parse(parser)
    path = writable_file(options.json, "--json") if options.json else None
    ready = True
    rows = []
    for check in checks(devices.select("auto")):
        print(check.line(), flush=True)
        ready = ready and (check.ok or check.name not in NEEDED)
        rows.append(check._asdict())
    if path:
        write_json(path, {"schema": SCHEMA, "environment": devices.environment(), "checks": rows})
    if ready:
        print("\nVersion 1 can be run")
        return 0
    print("\nVersion 1 can't be run: mend what is missing for it first")
    return 1


if __name__ == "__main__":
    cli.command(main)
