"""Exercise 1, solved: programs, blocks and rows. ../starter/ describes the arguments."""

import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """out[i] = x[i] + y[i] for i < size."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # a block of indices
    inside = i < size  # only the last program has indices outside
    # takes a block of pointers, returns a block of numbers; outside they are undefined
    x = tl.load(x_ptr + i, mask=inside)
    y = tl.load(y_ptr + i, mask=inside)
    tl.store(out_ptr + i, x + y, mask=inside)  # writes nothing outside


def add_grid(size: int, block: int) -> tuple[int]:
    """The grid of `add_kernel`: the fewest programs that cover all elements."""
    return (triton.cdiv(size, block),)


@triton.jit
def softmax_kernel(x_ptr, out_ptr, size, x_row, x_column, BLOCK: tl.constexpr):
    """out[r, c] = exp(x[r, c] - m) / sum of exp(x[r, :] - m), with m the maximum of row r; program
    r computes row r.
    """
    row = tl.program_id(0).to(tl.int64)  # row * x_row can exceed 2^31 in a large tensor
    column = tl.arange(0, BLOCK)
    inside = column < size
    # Lanes outside must change neither the maximum nor the sum: exp(-inf) = 0.
    x = tl.load(x_ptr + row * x_row + column * x_column, mask=inside, other=float("-inf")).to(
        tl.float32
    )
    numerator = tl.exp(x - tl.max(x, axis=0))  # at most exp(0) = 1, so nothing overflows
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(out_ptr + row * size + column, y.to(out_ptr.dtype.element_ty), mask=inside)
