"""Exercise 2, solved: SwiGLU as one kernel forward and one backward, in autograd, with its bytes."""

import torch
import triton
import triton.language as tl
from adapter import launch_swiglu_backward, launch_swiglu_forward
from torch import Tensor

# ----------------------------------------------------------------------------------------------------------------- part a


@triton.jit
def swiglu_forward_kernel(gate_ptr, up_ptr, y_ptr, size, gate_row, up_row, BLOCK: tl.constexpr):
    """y = g sigmoid(g) u, elementwise, with g of gate and u of up; computed in float32, written in y's type.

    Program (r, b) has the columns b BLOCK to (b + 1) BLOCK - 1 of row r; the last of a row may have fewer.

    Args:
        gate_ptr, up_ptr: [rows, size]; gate[r, c] lies at gate_ptr + r gate_row + c, up[r, c] likewise.
        y_ptr: [rows, size], contiguous.
        BLOCK: columns of a program, a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_ptr + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up  # silu(gate) lives in registers and never in memory
    tl.store(y_ptr + row * size + column, y.to(y_ptr.dtype.element_ty), mask=inside)


# ----------------------------------------------------------------------------------------------------------------- part b


@triton.jit
def swiglu_backward_kernel(
        gate_ptr, up_ptr, dy_ptr, dgate_ptr, dup_ptr, size, gate_row, up_row, BLOCK: tl.constexpr,
):  # fmt: skip
    """dgate and dup from dy; sigmoid(gate) is computed again. Programs, types and gate and up as forward.

    Args:
        dy_ptr: [rows, size], contiguous.
        dgate_ptr, dup_ptr: [rows, size], contiguous, to be written.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    place = row * size + column  # of the three contiguous tensors
    gate = tl.load(gate_ptr + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + place, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dgate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    dup = dy * gate * sigmoid
    tl.store(dgate_ptr + place, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + place, dup.to(dup_ptr.dtype.element_ty), mask=inside)


# ----------------------------------------------------------------------------------------------------------------- part c


class SwiGLU(torch.autograd.Function):
    """`SwiGLU.apply(gate, up)` -> y; gate and up [rows, size], rows with any stride.

    Saves gate and up, and nothing else. The gradient of y can have any strides; `launch_swiglu_backward` wants it contiguous.
    """

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)  # they exist anyway, as outputs of the product before: no further memory
        return launch_swiglu_forward(swiglu_forward_kernel, gate, up)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        # The gradient of a sum is one number seen as a whole tensor, with strides 0.
        return launch_swiglu_backward(swiglu_backward_kernel, gate, up, dy.contiguous())


# ----------------------------------------------------------------------------------------------------------------- part d


def bytes_moved(rows: int, size: int, element_size: int, fused: bool) -> tuple[int, int]:
    """(forward, backward): bytes that SwiGLU reads and writes at least, of tensors [rows, size].

    Every operator reads each of its inputs once and writes each of its outputs once.

    Args:
        element_size: bytes of a number.
        fused: with the kernels of parts a and b; otherwise as autograd runs `F.silu(gate) * up`, five operators.
    """
    # Eager forward: silu reads 1 and writes 1, the product reads 2 and writes 1. Backward: two products for the gradients of the
    # product's factors, and silu's gradient from dsilu and gate; each reads 2 and writes 1.
    forward, backward = (3, 5) if fused else (2 + 3, 3 * 3)
    return forward * rows * size * element_size, backward * rows * size * element_size
