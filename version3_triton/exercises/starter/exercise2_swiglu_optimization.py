"""Exercise 2: SwiGLU as one kernel forward and one backward, in autograd. ../exercise2_swiglu_optimization.md has the parts.

Replace each line that says which part it is, and run `pytest test_exercises.py -k exercise2` in the folder above. The launchers
from ../adapter.py are for part c.
"""

# ruff: noqa: F401  (imports for what is still to be written)

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
    tl.static_assert(False, "swiglu_forward_kernel: part a of exercise2_swiglu_optimization.md")


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
    tl.static_assert(False, "swiglu_backward_kernel: part b of exercise2_swiglu_optimization.md")


# ----------------------------------------------------------------------------------------------------------------- part c


class SwiGLU(torch.autograd.Function):
    """`SwiGLU.apply(gate, up)` -> y; gate and up [rows, size], rows with any stride.

    Saves gate and up, and nothing else. The gradient of y can have any strides; `launch_swiglu_backward` wants it contiguous.
    """

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        raise NotImplementedError("SwiGLU.forward: part c of exercise2_swiglu_optimization.md")

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("SwiGLU.backward: part c of exercise2_swiglu_optimization.md")


# ----------------------------------------------------------------------------------------------------------------- part d


def bytes_moved(rows: int, size: int, element_size: int, fused: bool) -> tuple[int, int]:
    """(forward, backward): bytes that SwiGLU reads and writes at least, of tensors [rows, size].

    Every operator reads each of its inputs once and writes each of its outputs once.

    Args:
        element_size: bytes of a number.
        fused: with the kernels of parts a and b; otherwise as autograd runs `F.silu(gate) * up`, five operators.
    """
    raise NotImplementedError("bytes_moved: part d of exercise2_swiglu_optimization.md")
