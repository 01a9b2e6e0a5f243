"""A matrix product whose epilogue is the gradient of RMSNorm before another product, so the
product's result is never written.

With the norm's result y [N, D] and the product out = y W^T of the forward pass, W [C, D], the
backward pass has

    dy = dout W        dx = (w dy - n mean(dy y)) / rms + dtotal        n = x / rms, y = w n

The mean is over a whole row, which no tile of dy has. But a row of dy with the row of y is dout W
y^T = dout out^T: a row of dout with the row of out. The kernel that computes dout has both rows in
registers, and adds up their products (`dots`).

    alone       dy is written and read, x and dtotal are read, dx is written: 5 N D elements
    epilogue    x and dtotal are read, dx is written: 3 N D, and a launch less

It gains where a launch counts (LOG.md has the table). In large products it loses: a tile waits for
x and dtotal after its last multiplication. The weight's gradient leaves as parts, one for each row
of tiles. All sums have a fixed order.
"""

from common.spans import span
from version3_triton.kernels.checks import checked
from version3_triton.kernels.dependent_launch import begin, dependent
from version3_triton.kernels.launch_sizes import ceil_div
from version3_triton.kernels.memory import in_matrix, read
from version4_ultra_fused import trials
from version4_ultra_fused.kernels import tiles
from version4_ultra_fused.kernels.matmul import GROUP, NEXT, TensorDescriptor, corner, in_epilogue
from version4_ultra_fused.kernels.norm import add_norm_backward, branch_gradient
from version4_ultra_fused.kernels.reference import Norm
from version4_ultra_fused.kernels.tiles import multiprocessors, product_tile

import torch
import triton
import triton.language as tl
from torch import Tensor



@triton.jit
def _matmul_norm_backward(
    dout,  # descriptor of [M, K]
    matrix,  # descriptor of [K, N]
    total,  # descriptor of x [M, N]
    dtotal,  # descriptor of [M, N]
    out,  # descriptor of dx [M, N]
    branch,  # descriptor of dx [M, N] in another dtype; or out
    total_ptr,  # [M, N]
    dtotal_ptr,  # [M, N]
    total_row,  # elements between rows
    dtotal_row,  # elements between rows
    weight_ptr,  # [N]: w
    rstd_ptr,  # [M]: 1 / rms
    dots_ptr,  # [parts_of_dots, M]
    parts_ptr,  # [tiles of M, N]: parts of dw
    M,  # rows of the result
    N,  # columns of the result
    K,  # the summed dimension
    parts_of_dots,  # how many there are
    COPY: tl.constexpr,  # whether to write dx to branch as well
    PROGRAMS: tl.constexpr,  # how many there are
    GROUP: tl.constexpr,  # rows of tiles, as in `corner`
    BM: tl.constexpr,  # rows of a tile
    BN: tl.constexpr,  # columns of a tile
    BK: tl.constexpr,  # depth of a step
    PREFETCH: tl.constexpr,
    DEPENDENT: tl.constexpr = False,  # whether the launch is dependent
):
    """dout [M, K], matrix [K, N], total, dtotal and out [M, N]; dots [parts_of_dots, M], parts
    [tiles of M, N].
    """
    begin(DEPENDENT, NEXT)
    for number in tl.range(
        tl.program_id(0), tl.cdiv(M, BM) * tl.cdiv(N, BN), PROGRAMS, flatten=True
    ):
        m, n = corner(number, M, N, GROUP, BM, BN)
        row = m + tl.arange(0, BM)
        column = n + tl.arange(0, BN)
        if PREFETCH:
            inside = in_matrix(row, M, column, N)
            row64 = row[:, None].to(tl.int64)
            x = tl.load(total_ptr + row64 * total_row + column[None, :], mask=inside, other=0.0)
            dx0 = tl.load(dtotal_ptr + row64 * dtotal_row + column[None, :], mask=inside, other=0.0)
            mean = tl.zeros((BM,), tl.float32)
            for part in range(parts_of_dots):
                mean += tl.load(dots_ptr + part * M + row, mask=row < M, other=0.0)
            rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
            weight = read(weight_ptr + column, column < N)
        dy = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            dy = tl.dot(dout.load([m, k]), matrix.load([k, n]), dy)
        if not PREFETCH:
            mean = tl.zeros((BM,), tl.float32)
            for part in range(parts_of_dots):
                mean += tl.load(dots_ptr + part * M + row, mask=row < M, other=0.0)
            rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
            weight = read(weight_ptr + column, column < N)
            x = total.load([m, n])
            dx0 = dtotal.load([m, n])
        normalized = x.to(tl.float32) * rstd
        tl.store(
            parts_ptr + (m // BM) * N + column, tl.sum(dy * normalized, axis=0), mask=column < N
        )
        dx = (dy * weight[None, :] - normalized * (mean / N)[:, None]) * rstd + dx0.to(tl.float32)
        out.store([m, n], dx.to(out.dtype))
        if COPY:
            branch.store([m, n], dx.to(branch.dtype))


@checked
def product_norm_backward(
    dout: Tensor,
    dots: Tensor | None,
    matrix: Tensor,
    dtotal: Tensor,
    norm: Norm,
    *,
    dtype: torch.dtype,
    branch_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`add_norm_backward` of dy = dout W.

    Args:
        dout: [N, C].
        dots: [parts, N], of which the sum is that of dout out over a row; None: it is not known.
        matrix: W [C, D].
        dtotal, norm, dtype, branch_dtype: as of `add_norm_backward`.
    """
    rows, size = norm.total.shape
    columns = dout.shape[1]
    total = norm.total
    read = (dout, matrix, dtotal, total)
    if dots is None or not in_epilogue("norm", rows, size, *read, depth=columns):
        dy = dout @ matrix
        with span("norm"):
            return add_norm_backward(dy, dtotal, norm, dtype, branch_dtype)
    blocks = product_tile("norm", rows, size)
    m, n, k = blocks[:3]
    dx = torch.empty_like(total, dtype=dtype)
    dbranch = branch_gradient(dx, branch_dtype)
    parts = dots.new_empty(ceil_div(rows, m), size)
    results = (total, dtotal, dx, dbranch)
    described = (dout, [m, k]), (matrix, [k, n]), *((x, [m, n]) for x in results)
    programs = min(tiles.PROGRAMS * multiprocessors(), ceil_div(rows, m) * ceil_div(size, n))
    _matmul_norm_backward[programs,](
        *(TensorDescriptor.from_tensor(matrix, block) for matrix, block in described),
        total,
        dtotal,
        total.stride(0),
        dtotal.stride(0),
        norm.weight,
        norm.rstd,
        dots,
        parts,
        rows,
        size,
        columns,
        len(dots),
        COPY=dbranch is not dx,
        PREFETCH="prefetch" in trials.ON,
        PROGRAMS=programs,
        GROUP=GROUP,
        **blocks.arguments,
        **dependent(),
    )
    return dx, dbranch, parts
