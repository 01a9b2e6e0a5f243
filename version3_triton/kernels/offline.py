"""Compiles kernels for GPUs that are not there: a driver that compiles and does not run stands in for the GPU's.

registers        of a thread; on AMD its vector registers, accumulation registers included
spills           values that did not fit into registers and live in memory, which is slow. On AMD it is the number of such
                 registers, vector and scalar; on NVIDIA the bytes that a thread stores and loads for them, as ptxas counts
shared_bytes     of shared memory (LDS on AMD), for a program
"""

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from version3_triton.kernels import launch_sizes

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TARGETS = {
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
}
LOGS: dict[str, str] = {}  # of ptxas, by a kernel's hash: within a process a kernel is compiled once


def resources(kernel: Any, ptxas_log: str) -> dict[str, int]:
    """Registers, spills and shared memory of a compiled kernel."""
    if "amdgcn" in kernel.asm:
        counts = {key: int(value) for key, value in re.findall(r"^\s+\.(\w+):\s+(\d+)$", kernel.asm["amdgcn"], re.MULTILINE)}
        registers, spills = counts["vgpr_count"], counts["vgpr_spill_count"] + counts["sgpr_spill_count"]
    else:
        registers = int(re.search(r"Used (\d+) registers", ptxas_log)[1])
        spills = sum(int(size) for size in re.findall(r"(\d+) bytes spill", ptxas_log))
    return {"registers": registers, "spills": spills, "shared_bytes": kernel.metadata.shared}


@contextlib.contextmanager
def compiling_for(name: str, take: Callable[[JITFunction, Any, dict[str, Any], str], None]) -> Iterator[None]:
    """Within it a launch of a kernel compiles it for the target and hands it to `take`, with its options and ptxas's log.

    For a process of its own: afterwards Triton's driver is still none that can launch.
    """
    target = TARGETS[name]

    def compile_only(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as log:
            kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        take(self, kernel, options, LOGS.setdefault(kernel.hash, log.getvalue()))
        for x in arguments:
            if isinstance(x, torch.Tensor) and not x.is_floating_point():
                x.zero_()  # a valid class or id, where the kernel would have written one

    run, family = JITFunction.run, launch_sizes.family
    JITFunction.run, launch_sizes.family = compile_only, lambda: "hip" if target.backend == "hip" else name
    triton.knobs.nvidia.dump_ptxas_log = triton.knobs.compilation.always_compile = True  # no log of what an earlier run compiled
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: name,
            get_current_stream=lambda device: 0,
            map_python_to_cpp_type=str,
        )
    )
    try:
        yield
    finally:
        JITFunction.run, launch_sizes.family = run, family
