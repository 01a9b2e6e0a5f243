"""Exercise 2, solved: SwiGLU as a forward and a backward kernel, in autograd. ../starter/ describes
the arguments.
"""

import torch
import triton
import triton.language as tl
from adapter import launch_swiglu_backward, launch_swiglu_forward
from torch import Tensor


@triton.jit
def swiglu_forward_kernel(gate_ptr, up_ptr, y_ptr, size, gate_row, up_row, BLOCK: tl.constexpr):
    """y = g sigmoid(g) u for each element g of gate and u of up; computes in float32 and writes the
    dtype of y.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_ptr + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up  # silu(gate) stays in registers
    tl.store(y_ptr + row * size + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(
    gate_ptr,
    up_ptr,
    dy_ptr,
    dgate_ptr,
    dup_ptr,
    size,
    gate_row,
    up_row,
    BLOCK: tl.constexpr,
):
    """dgate and dup from dy; recomputes sigmoid(gate). Programs, dtypes, gate and up are those of
    the forward kernel.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    place = row * size + column  # in the three contiguous tensors
    gate = tl.load(gate_ptr + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + place, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dgate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    dup = dy * gate * sigmoid
    tl.store(dgate_ptr + place, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + place, dup.to(dup_ptr.dtype.element_ty), mask=inside)


class SwiGLU(torch.autograd.Function):
    """`SwiGLU.apply(gate, up)` -> y; gate and up [rows, size], rows with any stride."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        # The product before made both, so this takes no extra memory.
        ctx.save_for_backward(gate, up)
        return launch_swiglu_forward(swiglu_forward_kernel, gate, up)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        # The gradient of a sum is one number, expanded to a tensor with strides 0.
        return launch_swiglu_backward(swiglu_backward_kernel, gate, up, dy.contiguous())
