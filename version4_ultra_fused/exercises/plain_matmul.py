"""A matrix product y = x W^T in Triton, one program for each tile of y. Read it first; nothing is
to be written here.

A program computes rows p BM to (p + 1) BM - 1 and columns q BN to (q + 1) BN - 1 of y, where p and
q are its numbers in the two dimensions of the grid. `product` is the main loop, which every kernel
of the exercise calls. What comes after it in a kernel is the epilogue. The epilogue of this kernel
only converts the tile and stores it.
"""

import triton
import triton.language as tl


@triton.jit
def product(
    x_ptr,
    w_ptr,
    row,
    column,
    M,
    N,
    K,
    w_row,
    w_depth,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """The tile of x W^T at these rows and columns: [BM, BN] in float32, 0 outside of the matrix.

    Args:
        x_ptr: [M, K], contiguous.
        w_ptr: [N, K]; w[n, k] is at w_ptr + n w_row + k w_depth, so W may be a transposed view.
        row, column: [BM] and [BN], of y.
        BK: depth of a step of the loop.
    """
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        depth = start + tl.arange(0, BK)
        x_inside = (row < M)[:, None] & (depth < K)[None, :]
        w_inside = (depth < K)[:, None] & (column < N)[None, :]
        x = tl.load(x_ptr + row[:, None] * K + depth[None, :], mask=x_inside, other=0.0)  # [BM, BK]
        # [BK, BN]
        w = tl.load(
            w_ptr + depth[:, None] * w_depth + column[None, :] * w_row, mask=w_inside, other=0.0
        )
        acc = tl.dot(x, w, acc, input_precision="ieee")
    return acc


@triton.jit
def matmul_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    M,
    N,
    K,
    w_row,
    w_depth,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """y = x W^T; y [M, N], contiguous; x and w as in `product`."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    column = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    acc = product(x_ptr, w_ptr, row, column, M, N, K, w_row, w_depth, BM, BN, BK)
    inside = (row < M)[:, None] & (column < N)[None, :]
    tl.store(
        y_ptr + row[:, None] * N + column[None, :], acc.to(y_ptr.dtype.element_ty), mask=inside
    )
