"""The program of each version's compile_kernels.py: compiles a table of launches for GPUs that are not there.

A driver that compiles and does not run stands in for the GPU's. Version 3's script says what the columns of the result are. The
occupancy is an estimate from the sizes in TARGETS: a program stays if its registers and its shared memory are free.
"""

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from common import cli
from common.analysis.output import tables
from common.documents import compiled_kernels
from common.errors import UsageError
from common.files import writable_file, write_json
from common.progress import progress
from common.records import kernel_files
from version3_triton.kernels import launch_sizes

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LANE_REGISTERS = 512  # of a quarter of a multiprocessor, for each lane of its warps; on all targets
LOGS: dict[str, str] = {}  # of ptxas, by a kernel's hash: within a process a kernel is compiled once
BLOCKS = ("BM", "BN", "BK", "ROWS", "BLOCK", "BLOCK_M", "BLOCK_N")  # a kernel's arguments that are sizes of its blocks


class Target(NamedTuple):
    """A GPU's multiprocessor (a compute unit on AMD): its warps, and its shared memory, of which a program takes some more."""

    gpu: GPUTarget
    warps: int
    shared_bytes: int
    reserved_bytes: int = 0


TARGETS = {
    "gfx90a": Target(GPUTarget("hip", "gfx90a", 64), 32, 64 << 10),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 32, 64 << 10),
    "gfx950": Target(GPUTarget("hip", "gfx950", 64), 32, 160 << 10),
    "sm_80": Target(GPUTarget("cuda", 80, 32), 64, 164 << 10, 1 << 10),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 64, 228 << 10, 1 << 10),
}


class Launch(NamedTuple):
    """A row of a version's table: a size, such as "D = 256", and a function of a dtype that launches kernels on small tensors."""

    size: str
    run: Callable[[torch.dtype], object]
    only_16_bits: bool = False


def occupancy(target: Target, registers: int, warps: int, shared_bytes: int) -> int:
    """Percent of a multiprocessor's warps that are resident at once, at most."""
    by_registers = 4 * min(target.warps // 4, LANE_REGISTERS // (-(-registers // 8) * 8))
    programs = min(by_registers // warps, target.shared_bytes // max(1, shared_bytes + target.reserved_bytes))
    return round(100 * programs * warps / target.warps)


def resources(target: Target, kernel: Any, ptxas_log: str) -> dict[str, int | None]:
    """What a compiled kernel needs of a multiprocessor."""
    agprs = None
    if target.gpu.backend == "hip":
        assembly = kernel.asm["amdgcn"]
        counts = {key: int(value) for key, value in re.findall(r"^ +(?:- )?\.(\w+): +(\d+)$", assembly, re.MULTILINE)}
        registers, agprs, scratch = (counts[key] for key in ("vgpr_count", "agpr_count", "private_segment_fixed_size"))
        spills = counts["vgpr_spill_count"] + counts["sgpr_spill_count"]
    else:
        counted = {what: int(count) for count, what in re.findall(r"(\d+) (registers|bytes (?:stack|spill) \w+)", ptxas_log)}
        registers, scratch = counted["registers"], counted["bytes stack frame"]
        spills = counted["bytes spill stores"] + counted["bytes spill loads"]
    shared = kernel.metadata.shared
    return {
        "registers": registers, "agprs": agprs, "spills": spills, "scratch_bytes": scratch, "shared_bytes": shared,
        "occupancy": occupancy(target, registers, kernel.metadata.num_warps, shared),
    }  # fmt: skip


@contextlib.contextmanager
def _compiling_for(name: str, take: Callable[[JITFunction, Any, dict[str, Any], str], None]) -> Iterator[None]:
    """Within it a launch of a kernel compiles it for the target and hands it to `take`, with its options and ptxas's log.

    For a process of its own: afterwards Triton's driver is still none that can launch.
    """
    target = TARGETS[name].gpu

    def compile_only(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as log:
            kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        take(self, kernel, options, LOGS.setdefault(kernel.hash, log.getvalue()))
        for x in arguments:
            if isinstance(x, torch.Tensor) and not x.is_floating_point():
                x.zero_()  # a valid class or id, where the kernel would have written one

    triton.knobs.nvidia.dump_ptxas_log = triton.knobs.compilation.always_compile = True  # no log of what an earlier run compiled
    stand_in = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: name,
        get_current_stream=lambda device: 0,
        map_python_to_cpp_type=str,
    )
    driver.set_active(stand_in)
    run, JITFunction.run = JITFunction.run, compile_only
    try:
        with launch_sizes.sizes_of("hip" if target.backend == "hip" else name):
            yield
    finally:
        JITFunction.run = run


def compile_all(name: str, dtypes: Sequence[str], table: Sequence[Launch]) -> list[dict[str, Any]]:
    """A row for each kernel, number format and size as it is compiled for one target.

    Args:
        name: a key of TARGETS.
        dtypes: keys of DTYPES.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    dtype = size = ""

    def take(function: JITFunction, kernel: Any, options: dict[str, Any], ptxas_log: str) -> None:
        file = function.fn.__module__.rpartition(".")[2]
        of_file = function.fn.__name__.removeprefix("_").removeprefix(f"{file}_")
        on = [key.lower() for key, value in options.items() if value is True]
        row = {
            "target": name, "dtype": dtype, "file": file, "size": size,
            "kernel": " + ".join([of_file, *on, *([options["EPILOGUE"]] if "EPILOGUE" in options else [])]),
            "blocks": " x ".join(str(value) for key, value in options.items() if key in BLOCKS),
            "warps": kernel.metadata.num_warps, "stages": kernel.metadata.num_stages,
        }  # fmt: skip
        found[tuple(row.values())] = row | resources(TARGETS[name], kernel, ptxas_log)

    with _compiling_for(name, take):
        for dtype in dtypes:
            for launch in table:
                size = launch.size
                if DTYPES[dtype].itemsize == 2 or not launch.only_16_bits:
                    launch.run(DTYPES[dtype])
    return list(found.values())


def shown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table, in which a terminal has room for registers and spills."""
    least = ("stages", "warps", "blocks", "scratch_bytes", "agprs")
    return tables.text(list(rows[0]), [list(row.values()) for row in rows], least=least)


def main(description: str | None, table: Sequence[Launch], dtypes: Sequence[str]) -> None:
    """The program of a version's compile_kernels.py, whose docstring is the description."""
    parser = cli.Parser(description)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="ARCH", help="default: all five")
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes, metavar="DTYPE", help=f"default: {dtypes}")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="also write the rows, with the version of triton")
    parser.add_argument(
        "--summarize", type=Path, nargs="+", metavar="FILE.json",
        help="compile nothing; write a summary of these files to --output",
    )  # fmt: skip
    options = parser.parse_args()
    if options.summarize and not options.output:
        raise UsageError("--summarize needs --output FILE.json")
    if options.output:
        writable_file(options.output, "--output")
    command = {"command": shlex.join(sys.argv)}
    if options.summarize:
        summary = compiled_kernels.summary(options.summarize)
        write_json(options.output, {"schema": kernel_files.SUMMARY} | command | summary)
        return
    with progress(f"compiling for {', '.join(options.targets)}"):
        rows = [row for name in options.targets for row in compile_all(name, options.dtypes, table)]
    if options.output:
        header = {"schema": kernel_files.COMPILED, "triton": triton.__version__} | command
        write_json(options.output, header | {"rows": rows})
    print(shown(rows))
