"""The program of each version's compile_kernels.py: compiles a table of launches for GPUs that are not there.

A driver that compiles and does not run stands in for the GPU's. Version 3's script says what the columns of the result are. The
occupancy is an estimate from the sizes in TARGETS: a program stays if its registers and its shared memory are free.
"""

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

from common import cli
from common.analysis.output import tables
from common.documents import compiled_kernels
from common.errors import UsageError
from common.files import writable_file, write_json
from common.progress import progress
from common.records import kernel_files
from version3_triton.kernels import dependent_launch, launch_sizes

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LANE_REGISTERS = 512  # of a quarter of a multiprocessor, for each lane of its warps; on all targets
LOGS: dict[str, str] = {}  # of ptxas, by a kernel's hash: within a process a kernel is compiled once
# Instructions of AMD's machine code: matrix products, memory (not what is spilled), and LDS.
INSTRUCTIONS = {
    "mfma": re.compile(r"^\s+v_mfma_", re.MULTILINE),
    "memory": re.compile(r"^\s+(?:global|flat|buffer)_(?:load|store|atomic)(?!.*\boff, s\[)", re.MULTILINE),
    "lds": re.compile(r"^\s+ds_", re.MULTILINE),
}
BLOCKS = ("BM", "BN", "BK", "ROWS", "BLOCK", "BLOCK_M", "BLOCK_N")  # a kernel's arguments that are sizes of its blocks


class Target(NamedTuple):
    """A GPU, the family whose sizes it takes, and of its multiprocessor (on AMD a compute unit) the warps and the shared memory,
    of which a program takes some more."""

    gpu: GPUTarget
    family: str
    warps: int
    shared_bytes: int
    reserved_bytes: int = 0


TARGETS = {
    "gfx90a": Target(GPUTarget("hip", "gfx90a", 64), "hip", 32, 64 << 10),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), "hip", 32, 64 << 10),
    "gfx950": Target(GPUTarget("hip", "gfx950", 64), "hip", 32, 160 << 10),
    "sm_80": Target(GPUTarget("cuda", 80, 32), "sm_80", 64, 164 << 10, 1 << 10),
    "sm_90": Target(GPUTarget("cuda", 90, 32), "sm_90", 64, 228 << 10, 1 << 10),
    "sm_75": Target(GPUTarget("cuda", 75, 32), "sm_75", 32, 64 << 10),
    "sm_89": Target(GPUTarget("cuda", 89, 32), "sm_80", 48, 100 << 10, 1 << 10),
}
DEFAULT = list(TARGETS)[:5]


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
    """What a compiled kernel needs of a multiprocessor, and on AMD how many instructions of some kinds it has."""
    agprs, found = None, dict[str, int | None](dict.fromkeys(INSTRUCTIONS))
    if target.gpu.backend == "hip":
        assembly = kernel.asm["amdgcn"]
        found = {name: len(pattern.findall(assembly)) for name, pattern in INSTRUCTIONS.items()}
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
        "occupancy": occupancy(target, registers, kernel.metadata.num_warps, shared), **found,
    }  # fmt: skip


@contextlib.contextmanager
def _compiling_for(
    name: str, take: Callable[[JITFunction, Any, dict[str, Any], str], None], chosen: Mapping[str, int]
) -> Iterator[None]:
    """Within it a launch of a kernel compiles it for the target and hands it to `take`, with its options and ptxas's log.

    For a process of its own: afterwards Triton's driver is still none that can launch.
    """
    target = TARGETS[name].gpu

    def compile_only(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as log:
            kernel = run(self, *arguments, grid=grid, warmup=True, **{**options, **chosen})
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
        with launch_sizes.sizes_of(TARGETS[name].family):
            yield
    finally:
        JITFunction.run = run


def compile_all(
    name: str, dtypes: Sequence[str], table: Sequence[Launch], chosen: Mapping[str, int] = MappingProxyType({})
) -> list[dict[str, Any]]:
    """A row for each kernel, number format and size as it is compiled for one target.

    Args:
        name: a key of TARGETS.
        dtypes: keys of DTYPES.
        chosen: options of the compiler, in place of the kernels' own.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    dtype = size = ""

    def take(function: JITFunction, kernel: Any, options: dict[str, Any], ptxas_log: str) -> None:
        file = function.fn.__module__.rpartition(".")[2]
        of_file = function.fn.__name__.removeprefix("_").removeprefix(f"{file}_")
        on = [key.lower() for key, value in options.items() if value is True and key not in dependent_launch.ARGUMENTS]
        row = {
            "target": name, "dtype": dtype, "file": file, "size": size,
            "kernel": " + ".join([of_file, *on, *([options["EPILOGUE"]] if "EPILOGUE" in options else [])]),
            "blocks": " x ".join(str(value) for key, value in options.items() if key in BLOCKS),
            "warps": kernel.metadata.num_warps, "stages": kernel.metadata.num_stages,
        }  # fmt: skip
        found[tuple(row.values())] = row | resources(TARGETS[name], kernel, ptxas_log)

    with _compiling_for(name, take, chosen):
        for dtype in dtypes:
            for launch in table:
                size = launch.size
                if DTYPES[dtype].itemsize == 2 or not launch.only_16_bits:
                    launch.run(DTYPES[dtype])
    return list(found.values())


def shown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table, in which a terminal has room for registers and spills."""
    least = ("stages", "warps", "blocks", "scratch_bytes", "agprs", "memory", "lds", "mfma")
    return tables.text(list(rows[0]), [list(row.values()) for row in rows], least=least)


def main(description: str | None, table: Sequence[Launch], dtypes: Sequence[str]) -> None:
    """The program of a version's compile_kernels.py, whose docstring is the description."""
    parser = cli.Parser(description)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=DEFAULT, metavar="ARCH", help=f"default: {DEFAULT}")
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes, metavar="DTYPE", help=f"default: {dtypes}")
    parser.add_argument("--sizes", nargs="+", metavar="SIZE", help='some of the sizes, such as "Dh = 128"; default: all')
    for option, what in (("waves_per_eu", "warps that a SIMD shall hold"), ("matrix_instr_nonkdim", "16 or 32, of products")):
        parser.add_argument(f"--{option.replace('_', '-')}", type=cli.positive, metavar="N", help=f"for AMD alone: {what}")
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
    if not hasattr(triton, "knobs"):
        raise UsageError(f"triton {triton.__version__} is too old to compile without a GPU: this script needs 3.4 or newer")
    if unknown := {*(options.sizes or ())} - {launch.size for launch in table}:
        raise UsageError(f"--sizes {min(unknown)!r}: it is one of {', '.join(dict.fromkeys(launch.size for launch in table))}")
    table = [launch for launch in table if not options.sizes or launch.size in options.sizes]
    chosen = {name: getattr(options, name) for name in ("waves_per_eu", "matrix_instr_nonkdim") if getattr(options, name)}
    if chosen and (others := [name for name in options.targets if TARGETS[name].family != "hip"]):
        raise UsageError(f"--{min(chosen).replace('_', '-')} is for AMD's targets, not {others[0]}: name some with --targets")
    with progress(f"compiling for {', '.join(options.targets)}"):
        rows = [row for name in options.targets for row in compile_all(name, options.dtypes, table, chosen)]
    if not rows:
        raise UsageError("no kernel has such a --sizes in these --dtypes on these --targets")
    if options.output:
        header = {"schema": kernel_files.COMPILED, "triton": triton.__version__} | command
        write_json(options.output, header | {"rows": rows})
    print(shown(rows))
