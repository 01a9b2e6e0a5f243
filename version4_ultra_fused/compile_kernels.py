"""Compiles every kernel of Version 4 for the GPUs of both vendors, without having one, and shows what each needs.

    python compile_kernels.py                              # gfx90a gfx942 gfx950 sm_80 sm_90
    python compile_kernels.py --targets gfx942 --output kernels.json
    python compile_kernels.py --targets sm_89 sm_90 gfx942 gfx950 --dtypes bf16     # those that have FP8

The columns are those of Version 3's compile_kernels.py. Products with epilogues and the attention kernel for short sequences are
compiled for all targets, but run on Hopper only, where they were measured (`kernels/tiles.py`, `kernels/attention.py`).
Elsewhere some of them spill: on AMD the many scalars of the tensor descriptors.
"""

import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

import functools
import os

from common import cli

os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported
cli.require("triton")

from version3_triton.kernels import launch_sizes, offline
from version4_ultra_fused.kernels import KERNELS, attention, matmul, matmul_norm_backward, short_attention, tiles
from version4_ultra_fused.kernels.elementwise import swiglu, swiglu_backward
from version4_ultra_fused.kernels.reference import Slot

import torch
from triton.runtime import driver

# What the products of a GPU read, by format; as `scales.formats` on the GPU itself.
FP8 = {
    **dict.fromkeys((89, 90, "gfx950"), {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}),
    "gfx942": {"e4m3": torch.float8_e4m3fnuz, "e5m2": torch.float8_e5m2fnuz},
}

# The launches at a size, on small tensors: the sizes are those of the presets that decide how a kernel is compiled.


def norms(size: int, dtype: torch.dtype) -> None:
    x, y, weight = torch.zeros(16, size), torch.zeros(16, size, dtype=dtype), torch.zeros(size)
    KERNELS["add_norm"](x, y, weight, 1e-5, dtype)
    for dx in (y, x):  # that of the first layer is for the embedding
        KERNELS["add_norm_backward"](y, y, x, weight, torch.zeros(16), dx.dtype)


def rotation(size: int, dtype: torch.dtype) -> None:
    heads, table = torch.zeros(1, 4, 64, size, dtype=dtype), torch.zeros(64, size)
    KERNELS["rotate_back"](heads, heads, heads, table, table)


def loss(size: int, dtype: torch.dtype) -> None:
    KERNELS["cross_entropy"](torch.zeros(16, size, dtype=dtype), torch.zeros(16, dtype=torch.long), True)


def activation(size: int, dtype: torch.dtype) -> None:
    gate_up = torch.zeros(64, 2 * size, dtype=dtype)
    swiglu(gate_up)
    for kept in (None, gate_up):
        swiglu_backward(gate_up[:, :size].contiguous(), gate_up, kept)


def quantized(form: str, dtype: torch.dtype) -> None:
    """e4m3 is the format of x and weights, e5m2 that of gradients."""
    if formats := FP8.get(driver.active.get_current_target().arch):
        x, slot = torch.zeros(64, 2048, dtype=dtype), Slot(torch.zeros(1), torch.zeros(1), formats[form])
        KERNELS["quantize"](x, slot)
        if form == "e4m3":
            KERNELS["swiglu_quantized"](x, slot)
        else:
            KERNELS["swiglu_backward_quantized"](x[:, :1024], x, slot)


def embedding(size: int, dtype: torch.dtype) -> None:
    ids = torch.zeros(64, dtype=torch.long)
    KERNELS["add_embedding_gradient"](ids, ids, torch.zeros(64, size), torch.zeros(1000, size))


def update(size: int, dtype: torch.dtype) -> None:
    weights, moments, working = torch.zeros(size), (torch.zeros(size), torch.zeros(size)), torch.zeros(size, dtype=dtype)
    copy = None if dtype == torch.float32 else working
    KERNELS["adamw"](weights, *moments, working, copy, torch.zeros(1)[0], 1e-3, 0.9, 0.999, 1e-8, 0.01)


def products(size: int, dtype: torch.dtype) -> None:
    """Products with each epilogue, at each tile of the family that is compiled for."""
    x, weight, table = (torch.zeros(*shape, dtype=dtype) for shape in ((256, size), (2048, size), (256, 64)))
    choices = tiles.TILES[launch_sizes.family()]
    for tile in choices["rope"]:
        matmul.qkv_rope(x, weight, table.float(), table.float(), 256, 1536, most=2048 * 256, blocks=tile)
    for tile in choices["swiglu"]:
        matmul.gate_up_swiglu(x, weight, most=2048 * 256, blocks=tile)
    y, dots, rstd = torch.zeros(256, 512, dtype=dtype), torch.zeros(2, 256), torch.zeros(256)
    for tile in choices["norm"]:
        for out in (dtype, torch.float32):  # that of the first layer is for the embedding
            matmul_norm_backward.product_norm_backward(
                x, weight[:size, :512], dots, y, y, rstd, rstd, out, most=1 << 40, blocks=tile
            )


def whole_heads(size: int, dtype: torch.dtype) -> None:
    tokens, table, lse = 256, torch.zeros(128, size), torch.zeros(2, 4, 128)
    dy, qkv = torch.zeros(tokens, 4 * size, dtype=dtype), torch.zeros(tokens, 8 * size, dtype=dtype)
    for most in (0, 1 << 40):
        short_attention.attend_backward(qkv, dy, lse, dy, table, table, attention.SHORT, 4, 2, most)


TABLE = [
    offline.Launch(f"{letter} = {size}", functools.partial(run, size), only_16_bits=run in (products, whole_heads))
    for letter, run, sizes in (
        ("D", norms, (256, 1024, 2048)), ("Dh", rotation, (32, 64, 128)), ("V", loss, (1000, 32000)), ("F", activation, (1024,)),
        ("D", embedding, (512,)), ("N", update, (4096,)), ("K", products, (1024,)), ("Dh", whole_heads, (32, 64)),
    )
    for size in sizes
]  # fmt: skip
TABLE += [offline.Launch(form, functools.partial(quantized, form), only_16_bits=True) for form in ("e4m3", "e5m2")]

if __name__ == "__main__":
    cli.command(lambda: offline.main(__doc__, TABLE, ["fp32", "bf16"]))
