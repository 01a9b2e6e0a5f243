"""Compiles every kernel of Version 4 for the GPUs of both vendors, without having one, and shows what each needs.

    python compile_kernels.py                              # gfx90a gfx942 gfx950 sm_80 sm_90
    python compile_kernels.py --targets gfx942 --output kernels.json

The columns are those of Version 3's compile_kernels.py. Products with epilogues and the attention kernel for short sequences are
compiled for all targets, but run on Hopper only, where they were measured (`kernels/tiles.py`, `kernels/attention.py`).
Elsewhere some of them spill: on AMD the many scalars of the tensor descriptors.
"""

import os
import shlex
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from common import cli
from common.progress import progress

os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported
cli.require("triton")

from common.analysis.output import tables
from common.files import writable_file, write_json
from version3_triton.kernels.offline import TARGETS, compiling_for, resources
from version4_ultra_fused.kernels import KERNELS, attention, matmul, short_attention, tiles

import torch
import triton
from triton.runtime.jit import JITFunction

SCHEMA = "tiny-llama-ultra-fused-kernels/1"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def launches(dtype: torch.dtype) -> list[Callable[[], object]]:
    """Every kernel at the sizes of the presets that decide how it is compiled, on small tensors."""

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    def wide(*shape: int) -> torch.Tensor:
        return zeros(*shape, dtype=torch.float32)

    ids, found = torch.zeros(64, dtype=torch.long), []
    for size in (256, 1024, 2048):
        x, weight, rstd = wide(16, size), wide(size), wide(16)
        found.append(lambda x=x, w=weight, n=size: KERNELS["add_norm"](x, zeros(16, n), w, 1e-5, dtype))
        found.append(lambda x=x, w=weight, r=rstd, n=size: KERNELS["add_norm_backward"](zeros(16, n), x, x, w, r))
    for head_dim in (32, 64, 128):
        heads, table = zeros(1, 4, 64, head_dim), wide(64, head_dim)
        found.append(lambda h=heads, t=table: KERNELS["rotate_back"](h, h, h, t, t))
    for vocabulary in (1000, 32000):
        found.append(lambda v=vocabulary: KERNELS["cross_entropy"](zeros(16, v), ids[:16], True))
    found += [
        lambda: matmul.elementwise.swiglu(zeros(64, 2048)),
        lambda: matmul.elementwise.swiglu_backward(zeros(64, 1024), zeros(64, 2048)),
        lambda: KERNELS["add_embedding_gradient"](ids, ids, wide(64, 512), wide(1000, 512)),
        lambda: KERNELS["adamw"](
            *(wide(4096) for _ in range(3)), zeros(4096), None if dtype == torch.float32 else zeros(4096), wide(1)[0],
            1e-3, 0.9, 0.999, 1e-8, 0.01,
        ),
    ]  # fmt: skip
    if dtype.itemsize == 2:
        for head_dim in (32, 64):
            table, lse, size = wide(128, head_dim), wide(2, 4, 128), 256
            found.append(
                lambda t=table, e=lse, d=head_dim, n=size: short_attention.attend_backward(
                    zeros(n, 8 * d), zeros(n, 4 * d), e, zeros(n, 4 * d), t, t, attention.SHORT, 4, 2
                )
            )
    return found


def products(dtype: torch.dtype, choose: Callable[[tiles.Tile], None]) -> list[Callable[[], object]]:
    """Products with each epilogue, at each tile of the family that is compiled for; `choose` sets the tile."""
    x, table, found = torch.zeros(256, 1024, dtype=dtype), torch.zeros(256, 64), []
    calls = {
        "rope": lambda: matmul.qkv_rope(x, torch.zeros(2048, 1024, dtype=dtype), table, table, 256, 1536),
        "swiglu": lambda: matmul.gate_up_swiglu(x, torch.zeros(2048, 1024, dtype=dtype)),
    }
    for epilogue, choices in tiles.TILES[tiles.launch_sizes.family()].items():
        found += [lambda t=each, e=epilogue: (choose(t), calls[e]()) for each in choices]
    return found


def compile_all(target: str, dtypes: Collection[str] = DTYPES) -> list[dict[str, Any]]:
    """A row for each kernel as it is compiled for a target; dtypes are keys of DTYPES."""
    rows: dict[tuple, dict[str, Any]] = {}
    dtype = ""

    def take(function: JITFunction, kernel: Any, options: dict[str, Any], ptxas_log: str) -> None:
        name, epilogue = function.fn.__name__, options.get("EPILOGUE", "")
        block = " x ".join(str(options[key]) for key in ("BM", "BN", "BK", "ROWS", "BLOCK") if key in options)
        row = {
            "target": target, "dtype": dtype, "kernel": f"{name} {epilogue}".strip(), "blocks": block,
            "warps": kernel.metadata.num_warps, "stages": kernel.metadata.num_stages, **resources(kernel, ptxas_log),
        }  # fmt: skip
        rows[tuple(list(row.values())[:6])] = row

    def choose(tile: tiles.Tile) -> None:
        matmul.tile = lambda *_: tile

    chosen, largest = matmul.tile, matmul.largest
    matmul.largest = lambda epilogue: 1 << 40
    try:
        with compiling_for(target, take):
            for dtype in dtypes:
                sixteen = DTYPES[dtype].itemsize == 2
                for call in launches(DTYPES[dtype]) + (products(DTYPES[dtype], choose) if sixteen else []):
                    call()
    finally:
        matmul.tile, matmul.largest = chosen, largest
    return list(rows.values())


def main() -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="ARCH", help="default: all five")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), metavar="DTYPE", help="default: fp32 bf16")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="also write the rows, with the version of triton")
    options = parser.parse_args()
    if options.output:
        writable_file(options.output, "--output")
    with progress(f"compiling for {', '.join(options.targets)}"):
        rows = [row for name in options.targets for row in compile_all(name, options.dtypes)]
    if options.output:
        write_json(
            options.output, {"schema": SCHEMA, "triton": triton.__version__, "command": shlex.join(sys.argv), "rows": rows}
        )
    print(tables.text(list(rows[0]), [list(row.values()) for row in rows]))


if __name__ == "__main__":
    cli.command(main)
