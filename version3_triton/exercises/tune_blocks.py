"""Compiles flash attention's forward kernel in several block sizes, and on a GPU times each.

    python tune_blocks.py --head-dim 128
    python tune_blocks.py --target gfx942 --stages 1     # for a GPU that need not be here

Each row is one compiled kernel:

    spills      NVIDIA: bytes that a thread stores and loads for registers; AMD: spilled registers
    shared KiB  shared memory of a program (AMD: LDS)
    programs    most programs on a multiprocessor at once; 0: not even one fits
    limit       registers or shared memory, whichever allows fewer programs
    ms          median time in bf16 for B = 4, H = 16, S = 4096, where the GPU is the target
    in use      * for the size in `kernels/launch_sizes.py`
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the root of this clone

import argparse
import contextlib
import io
import itertools
import os
import re
import statistics
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)  # It is read by `import triton`: compile instead.

from common import cli
from tracepage.show import tables
from version3_triton.kernel_cases import replayed
from version3_triton.kernels.flash_attention import _flash_attention_forward, attend
from version3_triton.kernels.launch_sizes import ATTENTION, TileConfig

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

# GPU: the family of its sizes, and the most KiB of shared memory of a program.
TARGETS = {"sm_75": ("sm_75", 64), "sm_80": ("sm_80", 163), "sm_90": ("sm_90", 227)}
TARGETS |= {"gfx90a": ("hip", 64), "gfx942": ("hip", 64), "gfx950": ("hip", 160)}
BLOCKS = (16, 32, 64, 128)
FLAGS: dict[str, tuple[tuple[int, ...], list[int]]] = {  # choices and default
    "--block-m": (BLOCKS, [64, 128]),
    "--block-n": (BLOCKS, [32, 64, 128]),
    "--warps": ((2, 4, 8), [4, 8]),
    "--stages": ((1, 2, 3, 4), [3]),
}
TYPES = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), "*bf16")
TYPES |= {"lse_ptr": "*fp32", "scale": "fp32"}
HEADER = ["BLOCK_M", "BLOCK_N", "warps", "stages", "registers", "spills", "shared KiB"]
HEADER += ["programs", "limit", "ms", "in use"]


def resources(tile: TileConfig, head_dim: int, gpu: GPUTarget) -> tuple[int, int, int]:
    """Registers of a thread, spills, and bytes of shared memory; strides are multiples of 16."""
    constants = {"H": 16, "GROUPS": 1, "DIM": head_dim, "BLOCK_D": head_dim, "PRECISION": "ieee"}
    constants |= {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "DEPENDENT": False}
    names = _flash_attention_forward.arg_names
    types = dict.fromkeys(names, "i32") | TYPES | dict.fromkeys(constants, "constexpr")
    multiples = [place for place, name in enumerate(names) if types[name][0] in "*i"]
    hints = {(place,): [["tt.divisibility", 16]] for place in multiples}
    source = ASTSource(_flash_attention_forward, types, constants, hints)
    log = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True  # The log is of a compilation.
        kernel = triton.compile(source, gpu, {"num_warps": tile.warps, "num_stages": tile.stages})
    counts = kernel.asm.get("amdgcn", log.getvalue())
    registers = re.findall(r"(?:\.vgpr_count: +|Used )(\d+)", counts)[0]
    spills = re.findall(r"\d+(?= bytes spill)|(?<=gpr_spill_count:) +\d+", counts)
    return int(registers), sum(map(int, spills)), kernel.metadata.shared


def occupancy(threads: int, registers: int, shared: int, target: str) -> tuple[int, str]:
    """Programs that a multiprocessor holds at once, and what allows no more."""
    by_registers = (131072 if target.startswith("gfx") else 65536) // (registers * threads)
    by_shared = TARGETS[target][1] * 1024 // shared
    limit = "registers" if by_registers <= by_shared else "shared memory"
    return min(by_registers, by_shared), limit


def milliseconds(tile: TileConfig, sizes: dict[str, TileConfig], head_dim: int) -> float:
    x = torch.randn(4, 4096, 16, head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    with patch.dict(sizes, {"forward": tile}):
        return statistics.median(replayed({"": lambda: attend(x, x, x)}, x.device)[""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=TARGETS, default="sm_90")
    parser.add_argument("--head-dim", type=int, choices=BLOCKS, default=64)
    for flag, (choices, default) in FLAGS.items():
        parser.add_argument(flag, type=int, nargs="+", choices=choices, default=default)
    options = cli.parse(parser)
    target = options.target
    head_dim = options.head_dim
    amd = target.startswith("gfx")
    gpu = GPUTarget("hip", target, 64) if amd else GPUTarget("cuda", int(target[3:]), 32)
    sizes = ATTENTION[TARGETS[target][0], 2][64 if head_dim <= 64 else 128]
    rows: list[list[object]] = []
    flags = options.block_m, options.block_n, options.warps, options.stages
    for values in itertools.product(*flags):
        tile = TileConfig(*values)
        registers, spills, shared = resources(tile, head_dim, gpu)
        programs, limit = occupancy(tile.warps * gpu.warp_size, registers, shared, target)
        runs = torch.cuda.is_available() and driver.active.get_current_target() == gpu
        ms = milliseconds(tile, sizes, head_dim) if runs and programs else None
        in_use = "*" if tile == sizes["forward"] else ""
        rows.append([*values, registers, spills, shared / 1024, programs, limit, ms, in_use])
    print(f"{target}, Dh = {head_dim}, Triton {triton.__version__}")
    print(tables.text(HEADER, rows))


if __name__ == "__main__":
    cli.command(main)
