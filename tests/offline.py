"""Compiles the kernels of Versions 3 and 4 for a GPU that is not there, and prints a JSON row for each.

    python -m tests.offline gfx942 bf16,fp32 "D = 512" "Dh = 64"        # without sizes: all

A driver that compiles and does not run stands in for the GPU's, so this needs a process of its own. The kernels are launched as
in training, forward and backward. Tensors are small: the last dimension decides what is compiled.
"""

import contextlib
import functools
import io
import json
import os
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported
torch.cuda.is_available, _available = lambda: True, torch.cuda.is_available  # kernels are loaded where one could run

from common.rope import rope_tables
from version3_triton.kernels import KERNELS as V3
from version3_triton.kernels import launch_sizes
from version4_ultra_fused.kernels import KERNELS as V4
from version4_ultra_fused.kernels import attention, elementwise, matmul, matmul_norm_backward, short_attention, tiles
from version4_ultra_fused.kernels.reference import Norm, Rope, Slot

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

torch.cuda.is_available = _available
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TARGETS = {  # each with the family whose sizes it takes
    "gfx90a": (GPUTarget("hip", "gfx90a", 64), "hip"),
    "gfx942": (GPUTarget("hip", "gfx942", 64), "hip"),
    "gfx950": (GPUTarget("hip", "gfx950", 64), "hip"),
    "sm_75": (GPUTarget("cuda", 75, 32), "sm_75"),
    "sm_90": (GPUTarget("cuda", 90, 32), "sm_90"),
}
FP8 = {  # formats of x and of gradients, on the targets that multiply in them
    "gfx942": (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    **dict.fromkeys(("gfx950", "sm_90"), (torch.float8_e4m3fn, torch.float8_e5m2)),
}


class Launch(NamedTuple):
    """A size, such as "D = 256", and a function of a dtype that launches kernels."""

    size: str
    run: Callable[[torch.dtype], object]
    only_16_bits: bool = False


def step(operation: Callable[..., Any], dtype: torch.dtype, *arguments: object) -> None:
    """Forward under autocast, as in training, and backward."""
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        outputs = operation(*arguments)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def leaf(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, requires_grad=True)


def norms(size: int, dtype: torch.dtype) -> None:
    x, residual, weight = leaf(torch.float32, 16, size), torch.ones(16, size), torch.ones(size, requires_grad=True)
    step(V3["rms_norm"], dtype, x, weight, 1e-5)
    step(V3["add_rms_norm"], dtype, leaf(dtype, 16, size), residual, weight, 1e-5)


def activation(size: int, dtype: torch.dtype) -> None:
    step(V3["swiglu"], dtype, leaf(dtype, 16, size), leaf(dtype, 16, size))


def loss(size: int, dtype: torch.dtype) -> None:
    step(V3["linear_cross_entropy"], dtype, leaf(dtype, 1, 16, 16), leaf(dtype, size, 16), torch.zeros(1, 16).long())


def rotation(size: int, dtype: torch.dtype) -> None:
    step(V3["apply_rope"], dtype, leaf(dtype, 1, 4, 64, size), leaf(dtype, 1, 2, 64, size), *rope_tables(size, 64, 1e4))


def heads(size: int, dtype: torch.dtype) -> None:
    step(V3["attention"], dtype, leaf(dtype, 1, 4, 64, size), *(leaf(dtype, 1, 2, 64, size) for _ in range(2)))


def plain_norms(size: int, dtype: torch.dtype) -> None:
    x, y, weight = torch.zeros(16, size), torch.zeros(16, size, dtype=dtype), torch.zeros(size)
    V4["add_norm"](x, y, weight, 1e-5, dtype)
    for dx in (y, x):  # that of the first layer is for the embedding
        V4["add_norm_backward"](y, y, Norm(weight, x, torch.zeros(16)), dx.dtype)


def plain_rotation(size: int, dtype: torch.dtype) -> None:
    each, table = torch.zeros(1, 4, 64, size, dtype=dtype), torch.zeros(64, size)
    V4["rotate_back"](each, each, each, Rope(table, table, 64))


def plain_loss(size: int, dtype: torch.dtype) -> None:
    V4["cross_entropy"](torch.zeros(16, size, dtype=dtype), torch.zeros(16, dtype=torch.long), True)


def plain_activation(size: int, dtype: torch.dtype) -> None:
    gate_up = torch.zeros(64, 2 * size, dtype=dtype)
    elementwise.swiglu(gate_up)
    for kept in (None, gate_up):
        elementwise.swiglu_backward(gate_up[:, :size].contiguous(), gate_up, kept)


def casts(size: int, dtype: torch.dtype) -> None:
    """To FP8: of x in e4m3, and of gradients in e5m2."""
    for number, form in enumerate(FP8.get(driver.active.get_current_device(), ())):
        x, slot = torch.zeros(64, size, dtype=dtype), Slot(torch.zeros(1), torch.zeros(1), form)
        V4["quantize"](x, slot)
        if number:
            V4["swiglu_backward_quantized"](x[:, : size // 2], x, slot)
        else:
            V4["swiglu_quantized"](x, slot)


def embedding(size: int, dtype: torch.dtype) -> None:
    ids = torch.zeros(64, dtype=torch.long)
    V4["add_embedding_gradient"](torch.zeros(64, size), ids, ids, torch.zeros(1000, size))


def update(size: int, dtype: torch.dtype) -> None:
    weights, moments, working = torch.zeros(size), (torch.zeros(size), torch.zeros(size)), torch.zeros(size, dtype=dtype)
    copy = None if dtype == torch.float32 else working
    rest = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    V4["adamw"](weights, moments, working, copy, torch.zeros(1)[0], **rest)


def products(size: int, dtype: torch.dtype) -> None:
    """Products with each epilogue, at each tile of the family that is compiled for."""
    x, weight, table = (torch.zeros(*shape, dtype=dtype) for shape in ((256, size), (2048, size), (256, 64)))
    choices = tiles.TILES[launch_sizes.family()]
    for tile in choices["rope"]:
        matmul.qkv_rope(x, weight, Rope(table.float(), table.float(), 256), 1536, most=2048 * 256, blocks=tile)
    for tile in choices["swiglu"]:
        matmul.gate_up_swiglu(x, weight, most=2048 * 256, blocks=tile)
    y, dots, rstd = torch.zeros(256, 512, dtype=dtype), torch.zeros(2, 256), torch.zeros(256)
    for tile in choices["norm"]:
        for out in (dtype, torch.float32):  # that of the first layer is for the embedding
            matmul_norm_backward.product_norm_backward(
                x, dots, weight[:size, :512], y, Norm(rstd, y, rstd), dtype=out, most=1 << 40, blocks=tile
            )


def whole_heads(size: int, dtype: torch.dtype) -> None:
    tokens, table, lse = 256, torch.zeros(128, size), torch.zeros(2, 4, 128)
    dy, qkv = torch.zeros(tokens, 4 * size, dtype=dtype), torch.zeros(tokens, 8 * size, dtype=dtype)
    for most in (0, 1 << 40):
        short_attention.attend_backward(dy, qkv, (dy, lse), Rope(table, table, attention.SHORT), (4, 2, 2), most=most)


TABLE = [
    Launch(f"{letter} = {size}", functools.partial(run, size), only_16_bits=run in (products, whole_heads, casts))
    for letter, run, sizes in (
        ("D", norms, (256, 512, 1024, 2048, 4096)), ("F", activation, (256, 4096, 5632)), ("V", loss, (256, 1000, 4096, 32000)),
        ("Dh", rotation, (16, 64, 80, 128)), ("Dh", heads, (16, 32, 64, 80, 128)),
        ("D", plain_norms, (256, 1024, 2048)), ("Dh", plain_rotation, (32, 64, 128)), ("V", plain_loss, (1000, 32000)),
        ("F", plain_activation, (1024,)), ("C", casts, (2048,)), ("D", embedding, (512,)), ("N", update, (4096,)),
        ("K", products, (1024,)), ("Dh", whole_heads, (32, 64)),
    )
    for size in sizes
]  # fmt: skip


def resources(kernel: Any, ptxas_log: str) -> dict[str, int]:
    """Spilled registers (on NVIDIA bytes that are stored and loaded for them), and bytes of shared memory."""
    if "amdgcn" in kernel.asm:
        counted = re.findall(r"^ +(?:- )?\.[sv]gpr_spill_count: +(\d+)$", kernel.asm["amdgcn"], re.MULTILINE)
    else:
        counted = re.findall(r"(\d+) bytes spill (?:stores|loads)", ptxas_log)
    assert len(counted) == 2, ptxas_log
    return {"spills": sum(map(int, counted)), "shared_bytes": kernel.metadata.shared}


def compile_all(target: str, dtypes: list[str], launches: list[Launch]) -> list[dict[str, Any]]:
    """A row for each kernel that the launches compile. Afterwards Triton's driver is still none that can launch."""
    rows: list[dict[str, Any]] = []
    place: dict[str, str] = {}
    logs: dict[str, str] = {}  # by a kernel's hash: within a process a kernel is compiled once

    def compile_only(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as log:
            kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        found = resources(kernel, logs.setdefault(kernel.hash, log.getvalue()))
        rows.append({"kernel": self.fn.__name__, **place, **found})
        for x in arguments:
            if isinstance(x, Tensor) and not x.is_floating_point():
                x.zero_()  # a valid class or id, where the kernel would have written one

    triton.knobs.nvidia.dump_ptxas_log = triton.knobs.compilation.always_compile = True  # no log of what an earlier run compiled
    gpu, family = TARGETS[target]
    stand_in = SimpleNamespace(
        get_current_target=lambda: gpu,
        get_current_device=lambda: target,
        get_current_stream=lambda device: 0,
        map_python_to_cpp_type=str,
    )
    driver.set_active(stand_in)
    run, JITFunction.run = JITFunction.run, compile_only
    launch_sizes.family_of_this_gpu = lambda: family
    for dtype in dtypes:
        for launch in launches:
            place.update(target=target, dtype=dtype, size=launch.size)
            if DTYPES[dtype].itemsize == 2 or not launch.only_16_bits:
                launch.run(DTYPES[dtype])
    return rows


if __name__ == "__main__":
    target, dtypes, *sizes = sys.argv[1:]
    launches = [launch for launch in TABLE if not sizes or launch.size in sizes]
    print(json.dumps(compile_all(target, dtypes.split(","), launches)))
