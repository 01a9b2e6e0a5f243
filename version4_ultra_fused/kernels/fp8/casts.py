"""Matrices in FP8, each with one scale (Micikevicius et al. 2022, arXiv:2209.05433), and the
kernels that write them.

A number x of a tensor is stored in 8 bits as x / s. The scale s puts the tensor's largest magnitude
at the largest number of the format: 448 in e4m3 (3 bits of mantissa; 240 on MI300), 57,344 in e5m2
(2 bits, for gradients, which span more powers of two). The largest magnitude is known only when all
of the tensor is there. So s follows from the last HISTORY steps ("delayed scaling"), and one pass
over the tensor scales it, clamps what is too large, and finds the maximum for the steps that
follow. SwiGLU's kernel does this as it computes the tensor. The gradient of logits needs no maximum
(`logits.py`). All other tensors are read again by `quantize`.

Tensor cores read both factors of an FP8 product along the summed dimension. A product x W^T and its
two gradients sum over inputs, outputs and tokens, so each kernel writes its result twice: by rows
[N, C], and transposed [C, N]. Bytes moved for each number of the result, where a number of 16 bits
has 2:

    quantize               4          reads 2, writes 1 + 1
    swiglu                 6          reads gate and up (4), writes 1 + 1
    swiglu_backward        5          reads 2 for its part of gate and up, 1 for dy; writes 1 + 1
"""

import functools

from version3_triton.kernels.checks import checked
from version3_triton.kernels.launch_sizes import ceil_div
from version3_triton.kernels.memory import in_matrix, read
from version4_ultra_fused.kernels.elementwise import swiglu_gradient
from version4_ultra_fused.kernels.reference import Slot

import torch
import triton
import triton.language as tl
from torch import Tensor

# The size of a program's tile; its columns are of gate and up, where these take turns.
TOKENS = 32
COLUMNS = 128


@triton.jit
def _stored(x, scale_ptr, largest_ptr, MAX: tl.constexpr):
    """A tile x over its scale, clamped; numbers outside of the matrix are 0."""
    tl.atomic_max(largest_ptr, tl.max(tl.abs(x)))  # in any order the result has the same bits
    return tl.clamp(x * (1 / tl.load(scale_ptr)), -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def store(x, row, column, rows, columns, out_ptr):
    """A tile x of out [rows, columns]."""
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(
        out_ptr + place,
        x,
        mask=in_matrix(row, rows, column, columns),
    )


@triton.jit
def _quantize(
    x_ptr,  # [N, C], rows strided
    rows_ptr,  # the result by rows
    columns_ptr,  # the result transposed
    scale_ptr,  # one float32 element: s
    largest_ptr,  # one float32 element: the largest magnitude
    N,  # tokens
    C,  # columns
    x_row,  # elements between rows
    MAX: tl.constexpr,  # the format's largest number
    TOKENS: tl.constexpr,  # rows of a tile
    COLUMNS: tl.constexpr,  # columns of a tile
):
    n = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = n.to(tl.int64)[:, None] * x_row + c[None, :]
    x = read(x_ptr + place, mask=in_matrix(n, N, c, C))
    x = _stored(x, scale_ptr, largest_ptr, MAX)
    store(x, n, c, N, C, rows_ptr)
    store(tl.trans(x), c, n, C, N, columns_ptr)


@triton.jit
def _swiglu_quantized(
    gate_up_ptr,  # [N, 2 F]
    dy_ptr,  # [N, F]; or None
    rows_ptr,  # the result by rows
    columns_ptr,  # the result transposed
    scale_ptr,  # one float32 element: s
    largest_ptr,  # one float32 element: the largest magnitude
    N,  # tokens
    F,  # columns of gate or up
    BACKWARD: tl.constexpr,  # whether dy is there
    MAX: tl.constexpr,  # the format's largest number
    TOKENS: tl.constexpr,  # rows of a tile
    COLUMNS: tl.constexpr,  # columns of a tile
):
    """silu(gate) up [N, F], or backward the gradient of gate and up [N, 2 F], which take turns."""
    n = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    both = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    pair = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    row = n.to(tl.int64)[:, None]
    gate_up = tl.load(
        gate_up_ptr + row * (2 * F) + both[None, :],
        mask=in_matrix(n, N, both, 2 * F),
        other=0.0,
    )
    gate, up = tl.split(tl.reshape(gate_up.to(tl.float32), (TOKENS, COLUMNS // 2, 2)))
    if BACKWARD:
        dy = read(dy_ptr + row * F + pair[None, :], mask=in_matrix(n, N, pair, F))
        dgate, dup = swiglu_gradient(gate, up, dy)
        gradients = _stored(
            tl.reshape(tl.join(dgate, dup), (TOKENS, COLUMNS)), scale_ptr, largest_ptr, MAX
        )
        store(gradients, n, both, N, 2 * F, rows_ptr)
        dgate, dup = tl.split(tl.reshape(gradients, (TOKENS, COLUMNS // 2, 2)))
        store(tl.trans(dgate), 2 * pair, n, 2 * F, N, columns_ptr)
        store(tl.trans(dup), 2 * pair + 1, n, 2 * F, N, columns_ptr)
    else:
        y = _stored(gate * tl.sigmoid(gate) * up, scale_ptr, largest_ptr, MAX)
        store(y, n, pair, N, F, rows_ptr)
        store(tl.trans(y), pair, n, F, N, columns_ptr)


def _empty(rows: int, columns: int, slot: Slot) -> tuple[Tensor, Tensor]:
    new = functools.partial(torch.empty, dtype=slot.dtype, device=slot.scale.device)
    return new(rows, columns), new(columns, rows)


@checked
def quantize(x: Tensor, slot: Slot) -> tuple[Tensor, Tensor]:
    """x [N, C] in the slot's format, by rows [N, C] and transposed [C, N]. The slot takes the
    largest magnitude.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = _empty(x.shape[0], x.shape[1], slot)
    _quantize[ceil_div(x.shape[0], TOKENS), ceil_div(x.shape[1], COLUMNS)](
        x,
        rows,
        columns,
        slot.scale,
        slot.largest,
        *x.shape,
        x.stride(0),
        MAX=torch.finfo(slot.dtype).max,
        TOKENS=TOKENS,
        COLUMNS=COLUMNS,
        num_warps=4,
    )
    return rows, columns


def _swiglu(gate_up: Tensor, dy: Tensor | None, slot: Slot) -> tuple[Tensor, Tensor]:
    (tokens, width) = gate_up.shape
    backward = dy is not None
    rows, columns = _empty(tokens, width if backward else width // 2, slot)
    _swiglu_quantized[ceil_div(tokens, TOKENS), ceil_div(width, COLUMNS)](
        gate_up,
        dy,
        rows,
        columns,
        slot.scale,
        slot.largest,
        tokens,
        width // 2,
        BACKWARD=backward,
        MAX=torch.finfo(slot.dtype).max,
        TOKENS=TOKENS,
        COLUMNS=COLUMNS,
        num_warps=4,
    )
    return rows, columns


@checked
def swiglu_quantized(gate_up: Tensor, slot: Slot) -> tuple[Tensor, Tensor]:
    """silu(gate) up of gate_up [N, 2 F], by rows [N, F] and transposed [F, N]."""
    return _swiglu(gate_up.contiguous(), None, slot)


@checked
def swiglu_backward_quantized(
    dhidden: Tensor, gate_up: Tensor, slot: Slot
) -> tuple[Tensor, Tensor]:
    """The gradient of gate_up [N, 2 F], by rows and transposed [2 F, N], from that of silu(gate) up
    [N, F].
    """
    return _swiglu(gate_up.contiguous(), dhidden.contiguous(), slot)
