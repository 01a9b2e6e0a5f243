"""Exercise 1: programs, blocks and rows. ../exercise1_triton_basics.md describes the problems.

Replace each line that names its problem, and run `pytest test_exercises.py -k exercise1` in the
folder above. The arguments of a kernel are pointers, then sizes, then strides; ../adapter.py passes
them. Strides and offsets count elements, not bytes.
"""

import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """out[i] = x[i] + y[i] for i < size.

    Program p computes elements p BLOCK to (p + 1) BLOCK - 1; the last program may have fewer.

    Args:
        x_ptr, y_ptr, out_ptr: [size], contiguous.
        BLOCK: elements of a program, a power of two.
    """
    tl.static_assert(False, "add_kernel: problem 1a of exercise1_triton_basics.md")


def add_grid(size: int, block: int) -> tuple[int]:
    """The grid of `add_kernel`: the fewest programs that cover all elements."""
    raise NotImplementedError("add_grid: problem 1a of exercise1_triton_basics.md")


@triton.jit
def softmax_kernel(x_ptr, out_ptr, size, x_row, x_column, BLOCK: tl.constexpr):
    """out[r, c] = exp(x[r, c] - m) / sum of exp(x[r, :] - m), with m the maximum of row r; program
    r computes row r.

    Computes in float32 and writes the dtype of out.

    Args:
        x_ptr: [rows, size]; x[r, c] lies at x_ptr + r x_row + c x_column.
        out_ptr: [rows, size], contiguous.
        BLOCK: a power of two, size or more.
    """
    tl.static_assert(False, "softmax_kernel: problem 1b of exercise1_triton_basics.md")
