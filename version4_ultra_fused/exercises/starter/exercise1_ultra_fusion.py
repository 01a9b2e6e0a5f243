"""Exercise 1: the epilogue of a matrix product. ../exercise1_ultra_fusion.md describes the
problems.

Replace each line that names its problem, and run `pytest test_exercises.py` in the folder above.
`acc` is the program's tile of the product, [BM, BN] in float32; ../plain_matmul.py has the main
loop and a kernel with the plainest epilogue.
"""

# ruff: noqa: F841  (the tile is for your code)

import triton
import triton.language as tl
from plain_matmul import product


@triton.jit
def gate_up_kernel(
    x_ptr,
    w_ptr,
    gate_up_ptr,
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
    """gate_up = x W^T, and y = silu(gate) up from the float32 tile. Column 2 i of gate_up is gate,
    column 2 i + 1 is up.

    Args:
        x_ptr: [M, K].
        w_ptr: [N, K], the rows of gate and up interleaved; N = 2 F.
        gate_up_ptr: [M, N], contiguous; an output.
        y_ptr: [M, N / 2], contiguous; an output.
    """
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    column = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    acc = product(x_ptr, w_ptr, row, column, M, N, K, w_row, w_depth, BM, BN, BK)
    tl.static_assert(False, "gate_up_kernel: problem 1a of exercise1_ultra_fusion.md")


@triton.jit
def residual_kernel(
    x_ptr,
    w_ptr,
    stream_ptr,
    out_ptr,
    M,
    N,
    K,
    w_row,
    w_depth,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """out = stream + x W^T, added in float32.

    Args:
        x_ptr: [M, K].
        w_ptr: [N, K].
        stream_ptr: [M, N], contiguous, float32.
        out_ptr: [M, N], contiguous, float32; the output.
    """
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    column = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    acc = product(x_ptr, w_ptr, row, column, M, N, K, w_row, w_depth, BM, BN, BK)
    tl.static_assert(False, "residual_kernel: problem 1b of exercise1_ultra_fusion.md")
