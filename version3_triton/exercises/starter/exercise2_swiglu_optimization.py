"""Exercise 2: SwiGLU as a forward and a backward kernel, in autograd.
../exercise2_swiglu_optimization.md has the problems.

Replace each line that names its problem, and run `pytest test_exercises.py -k exercise2` in the
folder above. Problem 2c uses the launchers of ../adapter.py.
"""

# ruff: noqa: F401  (imports for your code)

import torch
import triton
import triton.language as tl
from adapter import launch_swiglu_backward, launch_swiglu_forward
from torch import Tensor


@triton.jit
def swiglu_forward_kernel(gate_ptr, up_ptr, y_ptr, size, gate_row, up_row, BLOCK: tl.constexpr):
    """y = g sigmoid(g) u for each element g of gate and u of up; computes in float32 and writes the
    dtype of y.

    Program (r, b) computes columns b BLOCK to (b + 1) BLOCK - 1 of row r; the last one of a row may
    have fewer.

    Args:
        gate_ptr, up_ptr: [rows, size]; gate[r, c] lies at gate_ptr + r gate_row + c, up[r, c] at
            up_ptr + r up_row + c.
        y_ptr: [rows, size], contiguous.
        BLOCK: columns of a program, a power of two.
    """
    tl.static_assert(False, "swiglu_forward_kernel: problem 2a of exercise2_swiglu_optimization.md")


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

    Args:
        dy_ptr: [rows, size], contiguous.
        dgate_ptr, dup_ptr: [rows, size], contiguous; the outputs.
    """
    tl.static_assert(
        False, "swiglu_backward_kernel: problem 2b of exercise2_swiglu_optimization.md"
    )


class SwiGLU(torch.autograd.Function):
    """`SwiGLU.apply(gate, up)` -> y; gate and up [rows, size], rows with any stride.

    Saves only gate and up. The gradient of y can have any strides, but `launch_swiglu_backward`
    needs it contiguous.
    """

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        raise NotImplementedError("SwiGLU.forward: problem 2c of exercise2_swiglu_optimization.md")

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("SwiGLU.backward: problem 2c of exercise2_swiglu_optimization.md")
