"""SwiGLU's elementwise part (Shazeer 2020, arXiv:2002.05202) with g the gate, u the other product,
s = sigmoid(g):

    forward     y = g s u
    backward    dg = dy u s (1 + g (1 - s))        du = dy g s

Numbers moved per element: forward 3 (eager 5: silu, then the product), backward 5 (eager 9,
TECHNICAL_APPENDICES.md B.1). Saved are g and u, as the products gave them; s and silu(g) are
computed again, which costs nothing where memory is the limit. Inputs may have strided rows, as the
halves of a fused product have. Programs go along the rows, so that those that run at the same time
read and write neighbouring memory.
"""

from tracepage.errors import UsageError
from version3_triton.kernels.checks import checked
from version3_triton.kernels.launch_sizes import ceil_div, tile
from version3_triton.kernels.memory import in_matrix, read

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable


@triton.jit
def _swiglu_forward(
    gate_ptr,  # [rows, F], rows strided
    up_ptr,  # [rows, F], rows strided
    y_ptr,  # [rows, F]
    rows,  # B S
    size,  # F
    gate_stride,  # elements between rows
    up_stride,  # the same
    ROWS: tl.constexpr,  # rows of a tile
    BLOCK: tl.constexpr,  # columns of a tile
):
    parts = tl.cdiv(size, BLOCK)
    row = (tl.program_id(0) // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    inside = in_matrix(row, rows, column, size)
    gate = read(gate_ptr + row[:, None] * gate_stride + column[None, :], inside)
    up = read(up_ptr + row[:, None] * up_stride + column[None, :], inside)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + row[:, None] * size + column[None, :], y, mask=inside)


@triton.jit
def _swiglu_backward(
    gate_ptr,  # [rows, F], rows strided
    up_ptr,  # [rows, F], rows strided
    dy_ptr,  # [rows, F]
    dgate_ptr,  # [rows, F]
    dup_ptr,  # [rows, F]
    rows,  # B S
    size,  # F
    gate_stride,  # elements between rows
    up_stride,  # the same
    ROWS: tl.constexpr,  # rows of a tile
    BLOCK: tl.constexpr,  # columns of a tile
):
    parts = tl.cdiv(size, BLOCK)
    row = (tl.program_id(0) // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    inside = in_matrix(row, rows, column, size)
    place = row[:, None] * size + column[None, :]
    gate = read(gate_ptr + row[:, None] * gate_stride + column[None, :], inside)
    up = read(up_ptr + row[:, None] * up_stride + column[None, :], inside)
    dy = read(dy_ptr + place, inside)
    sigmoid = tl.sigmoid(gate)
    dgate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(dgate_ptr + place, dgate, mask=inside)
    tl.store(dup_ptr + place, dy * gate * sigmoid, mask=inside)


def _rows(x: Tensor) -> Tensor:
    """[..., F] -> [rows, F] with unit stride in F; a copy only where no such view exists."""
    return (x if x.stride(-1) == 1 else x.contiguous()).reshape(-1, x.shape[-1])


def _launch(kernel, gate: Tensor, up: Tensor, *tensors: Tensor) -> None:
    """Launches a kernel on gate and up [rows, F] and its other tensors."""
    rows, size = gate.shape
    blocks = tile("swiglu", size, gate.device)
    programs = ceil_div(rows, blocks.rows) * ceil_div(size, blocks.columns)
    kernel[programs,](
        gate,
        up,
        *tensors,
        rows,
        size,
        gate.stride(0),
        up.stride(0),
        ROWS=blocks.rows,
        BLOCK=blocks.columns,
        num_warps=blocks.warps,
    )


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        y = gate.new_empty(gate.shape)
        gate = _rows(gate)
        up = _rows(up)
        _launch(_swiglu_forward, gate, up, y)
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        gate, up = ctx.saved_tensors
        dgate = gate.new_empty(dy.shape)
        dup = up.new_empty(dy.shape)
        _launch(_swiglu_backward, gate, up, dy.contiguous(), dgate, dup)
        return dgate, dup


@checked
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, computed in float32; all [..., F] in one type.

    Raises:
        UsageError: shapes or types differ, or F is 0.
    """
    if not gate.ndim or not gate.shape[-1]:
        raise UsageError(f"the SwiGLU kernel takes [..., F] with F at least 1, not {[*gate.shape]}")
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise UsageError(
            "the SwiGLU kernel takes gate and up of one shape and type, "
            f"not {[*gate.shape]} {gate.dtype} and {[*up.shape]} {up.dtype}"
        )
    return _SwiGLU.apply(gate, up)
