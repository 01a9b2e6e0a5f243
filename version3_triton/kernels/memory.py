"""What kernels read: float32, whatever the tensor's dtype.

`tl.store` needs no such function: it converts to the dtype of its pointer.
"""

import triton
import triton.language as tl


@triton.jit
def read(pointer, mask, other: tl.constexpr = 0.0):
    """The elements in float32; `other` where the mask is False."""
    return tl.load(pointer, mask=mask, other=other).to(tl.float32)


@triton.jit
def in_matrix(row, rows, column, columns):
    """Which elements of a tile are in a matrix: [ROWS, COLUMNS], from row and column numbers."""
    return (row < rows)[:, None] & (column < columns)[None, :]
