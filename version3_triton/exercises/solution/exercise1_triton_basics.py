"""Exercise 1, solved: one program and its block, row by row."""

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
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # a block of element numbers
    inside = i < size  # only in the last program are some outside
    x = tl.load(x_ptr + i, mask=inside)  # a block of pointers in, a block of numbers out; unspecified where outside
    y = tl.load(y_ptr + i, mask=inside)
    tl.store(out_ptr + i, x + y, mask=inside)  # where outside nothing is written


def add_grid(size: int, block: int) -> tuple[int]:
    """The grid for `add_kernel`: the fewest programs that have all elements."""
    return (triton.cdiv(size, block),)


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
    row = tl.program_id(0).to(tl.int64)  # row * x_row can pass 2^31 in a large tensor
    column = tl.arange(0, BLOCK)
    inside = column < size
    # Lanes outside must not count: not in the maximum, and exp(-inf) = 0 not in the sum.
    x = tl.load(x_ptr + row * x_row + column * x_column, mask=inside, other=float("-inf")).to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))  # at most exp(0) = 1: nothing overflows
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(out_ptr + row * size + column, y.to(out_ptr.dtype.element_ty), mask=inside)


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
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    # The square of 256 is already too large for float16, so the conversion comes first. A sum wants 0 outside.
    x = tl.load(x_ptr + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    mean_square = tl.sum(x * x, axis=0) / size  # by the row's length, not by the block's
    y = weight * x / tl.sqrt(mean_square + eps)
    tl.store(out_ptr + row * size + column, y.to(out_ptr.dtype.element_ty), mask=inside)
