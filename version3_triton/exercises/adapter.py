"""Between the kernels of an exercise and their tests: which file is tested, and how its kernels are launched.

    pytest test_exercises.py                               # starter/, which you fill in
    KERNEL_EXERCISES=solution pytest test_exercises.py     # solution/

A launcher takes your kernel and its inputs, makes the outputs, sets grid and block sizes, and passes pointers, sizes and strides
in the order of the kernel's arguments. Strides count numbers, not bytes. Every output holds NaN, and so does the memory behind
it: a number that no program wrote stays NaN, and a store that goes too far is reported.
"""

import importlib
import math
import os
import sys
from pathlib import Path
from types import ModuleType

from common.errors import UsageError

import torch
import triton
from torch import Tensor
from triton.runtime import KernelInterface

FOLDER = Path(__file__).parent
GUARD = 4096  # numbers behind an output: more than any block here


def load(exercise: str) -> ModuleType:
    """The exercise's file in starter/, or with KERNEL_EXERCISES=solution in solution/."""
    which = os.environ.get("KERNEL_EXERCISES", "starter")
    if which not in ("starter", "solution"):
        raise UsageError(f"KERNEL_EXERCISES is {which!r}: set it to solution, or leave it unset for starter/")
    if str(FOLDER / which) not in sys.path:
        sys.path.insert(0, str(FOLDER / which))
    return importlib.import_module(exercise)


def _output(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous tensor of NaN, with GUARD more of them behind it."""
    numbers = math.prod(shape)
    memory = torch.full((numbers + GUARD,), math.nan, dtype=dtype or like.dtype, device=like.device)
    return memory[:numbers].view(shape)


def _launch(kernel: KernelInterface, grid: tuple[int, ...], outputs: tuple[Tensor, ...], *arguments: object, **constants: int):
    kernel[grid](*arguments, **constants)
    for output in outputs:
        behind = output.as_strided((GUARD,), (1,), output.numel())
        assert behind.isnan().all(), f"{kernel.__name__} wrote behind the end of an output: its store needs a mask"


# ------------------------------------------------------------------------------------------------------------- exercise 1


def launch_add(kernel: KernelInterface, grid: tuple[int, ...], x: Tensor, y: Tensor, block: int) -> Tensor:
    """x + y, both [size] and contiguous; the grid is the learner's."""
    out = _output(x, *x.shape)
    _launch(kernel, grid, (out,), x, y, out, x.numel(), BLOCK=block)
    return out


def launch_softmax(kernel: KernelInterface, x: Tensor) -> Tensor:
    """Softmax of each row of x [rows, size], with any strides; a program a row."""
    rows, size = x.shape
    out = _output(x, rows, size)
    _launch(kernel, (rows,), (out,), x, out, size, *x.stride(), BLOCK=triton.next_power_of_2(size))
    return out


def launch_rms_norm(kernel: KernelInterface, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of each row of x [rows, size], rows with any stride; weight [size]; a program a row."""
    rows, size = x.shape
    out = _output(x, rows, size)
    _launch(kernel, (rows,), (out,), x, weight, out, size, eps, x.stride(0), BLOCK=triton.next_power_of_2(size))
    return out


# ------------------------------------------------------------------------------------------------------------- exercise 2


def _elementwise_grid(x: Tensor, block: int) -> tuple[int, int]:
    rows, size = x.shape
    return rows, triton.cdiv(size, block)


def launch_swiglu_forward(kernel: KernelInterface, gate: Tensor, up: Tensor, block: int = 64) -> Tensor:
    """y [rows, size] of gate and up [rows, size], rows of both with any stride; a program for `block` numbers of a row."""
    y = _output(gate, *gate.shape)
    strides = gate.stride(0), up.stride(0)
    _launch(kernel, _elementwise_grid(gate, block), (y,), gate, up, y, gate.shape[1], *strides, BLOCK=block)
    return y


def launch_swiglu_backward(
    kernel: KernelInterface, gate: Tensor, up: Tensor, dy: Tensor, block: int = 64
) -> tuple[Tensor, Tensor]:
    """dgate and dup, contiguous; shapes and strides as forward.

    Raises:
        UsageError: dy is not contiguous. The kernel would read other numbers than its own.
    """
    if not dy.is_contiguous():
        raise UsageError(f"dy has strides {dy.stride()} and the kernel takes rows without gaps: pass dy.contiguous()")
    outputs = _output(gate, *gate.shape), _output(up, *up.shape)
    strides = gate.stride(0), up.stride(0)
    _launch(kernel, _elementwise_grid(gate, block), outputs, gate, up, dy, *outputs, gate.shape[1], *strides, BLOCK=block)
    return outputs


# ------------------------------------------------------------------------------------------------------------- exercise 3


def launch_log_sum_exp(kernel: KernelInterface, x: Tensor, block: int = 16) -> Tensor:
    """Log-sum-exp of each row of x [rows, size], rows with any stride; a program a row. float32."""
    rows, size = x.shape
    lse = _output(x, rows, dtype=torch.float32)
    _launch(kernel, (rows,), (lse,), x, lse, size, x.stride(0), BLOCK=block)
    return lse


def launch_attention(
    kernel: KernelInterface, q: Tensor, k: Tensor, v: Tensor, block_m: int = 16, block_n: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention; a program for `block_m` queries of a head.

    Args:
        q: [B, H, S, Dh], Dh 16, 32 or 64; any strides with Dh contiguous, as for k and v.
        k, v: [B, K, S, Dh], K divides H.

    Returns:
        o [B, H, S, Dh] in q's type, log-sum-exp [B, H, S] in float32, and blocks of keys visited by each program,
        [B, H, ceil(S / block_m)] in int32, -1 where the kernel does not say.
    """
    batch, heads, length, head_dim = q.shape
    programs = triton.cdiv(length, block_m)
    o, lse = _output(q, *q.shape), _output(q, batch, heads, length, dtype=torch.float32)
    visited = torch.full((batch, heads, programs), -1, dtype=torch.int32, device=q.device)
    _launch(
        kernel, (programs, batch * heads), (o, lse), q, k, v, o, lse, visited, length, 1 / math.sqrt(head_dim),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        H=heads, GROUPS=heads // k.shape[1], DIM=head_dim, BLOCK_M=block_m, BLOCK_N=block_n,
    )  # fmt: skip
    return o, lse, visited
