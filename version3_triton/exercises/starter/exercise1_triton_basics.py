"""Exercise 1: one program and its block, row by row. ../exercise1_triton_basics.md has the parts.

Replace each line that says which part it is, and run `pytest test_exercises.py -k exercise1` in the folder above. The arguments
of a kernel are pointers, then sizes, then strides; ../adapter.py passes them. Strides and offsets count numbers, not bytes.
"""

import triton
import triton.language as tl

# ----------------------------------------------------------------------------------------------------------------- part a


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """out[i] = x[i] + y[i] for i < size.

    Program p has the elements p BLOCK to (p + 1) BLOCK - 1; the last program may have fewer.

    Args:
        x_ptr, y_ptr, out_ptr: [size], contiguous.
        BLOCK: elements of a program, a power of two.
    """
    tl.static_assert(False, "add_kernel: part a of exercise1_triton_basics.md")


def add_grid(size: int, block: int) -> tuple[int]:
    """The grid for `add_kernel`: the fewest programs that have all elements."""
    raise NotImplementedError("add_grid: part a of exercise1_triton_basics.md")


# ----------------------------------------------------------------------------------------------------------------- part b


@triton.jit
def softmax_kernel(x_ptr, out_ptr, size, x_row, x_column, BLOCK: tl.constexpr):
    """out[r, c] = exp(x[r, c] - m) / sum of exp(x[r, :] - m), with m the largest number of row r; program r has row r.

    Computed in float32, written in out's type.

    Args:
        x_ptr: [rows, size]; x[r, c] lies at x_ptr + r x_row + c x_column.
        out_ptr: [rows, size], contiguous.
        BLOCK: a power of two, size or more.
    """
    tl.static_assert(False, "softmax_kernel: part b of exercise1_triton_basics.md")


# ----------------------------------------------------------------------------------------------------------------- part c


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, out_ptr, size, eps, x_row, BLOCK: tl.constexpr):
    """out[r, c] = weight[c] x[r, c] / sqrt(mean of x[r, :]^2 + eps); program r has row r.

    Computed in float32, written in out's type.

    Args:
        x_ptr: [rows, size]; x[r, c] lies at x_ptr + r x_row + c.
        weight_ptr: [size], contiguous, of x's type.
        out_ptr: [rows, size], contiguous.
        eps: float.
        BLOCK: a power of two, size or more.
    """
    tl.static_assert(False, "rms_norm_kernel: part c of exercise1_triton_basics.md")
