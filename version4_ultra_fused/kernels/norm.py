"""RMSNorm with the residual addition before it, forward and backward, by Version 3's kernels (`rms_norm.py` there).

They are called without autograd, because a block's backward pass is written by hand and decides what is saved and where a
gradient goes.
"""

from version3_triton.kernels.checks import interpretable
from version3_triton.kernels.launch_sizes import NORM_DWEIGHT, ceil_div, tile
from version3_triton.kernels.rms_norm import _rms_norm_backward, _rms_norm_dweight, _rms_norm_forward
from version4_ultra_fused.kernels.tiles import multiprocessors

import torch
import triton
from torch import Tensor

# Of the backward kernel, in place of Version 3's sizes: on an H200 29 us in place of 35 for [8192, 1024], and 3.2 for 4.3 for
# [1024, 256] (results/h200/levers.json). Elements of a tile, elements of a thread, and programs of a multiprocessor.
TILE, PER_THREAD, PROGRAMS = 1024, 16, 8


@interpretable
def add_norm(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x + branch [N, D] in x's dtype, its norm [N, D] in `dtype`, and 1 / rms of each row [N].

    Args:
        x: [N, D], the residual stream.
        branch: [N, D] in any dtype, or None.
        weight: [D].
    """
    rows, size = x.shape
    total = x if branch is None else torch.empty_like(x)
    y, rstd = torch.empty_like(x, dtype=dtype), x.new_empty(rows, dtype=torch.float32)
    blocks = tile("norm_forward", size, x.device)
    _rms_norm_forward[ceil_div(rows, blocks.rows),](
        x, branch, weight, total, y, rstd, rows, size, eps,
        ADD=branch is not None, ROWS=blocks.rows, BLOCK=blocks.columns, num_warps=blocks.warps,
    )  # fmt: skip
    return total, y, rstd


@interpretable
def add_norm_backward(
    dy: Tensor, dtotal: Tensor | None, total: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of x in x's dtype and of the branch in dy's (one tensor where these are one), and parts of the weight's.

    Args:
        dy: [N, D], the gradient of the norm.
        dtotal: [N, D], the gradient of the sum from elsewhere, or None.
        total, rstd: from `add_norm`.

    Returns:
        dx [N, D], dbranch [N, D], and [parts, D] float32, of which the sum is the weight's gradient.
    """
    rows, size = total.shape
    dx = torch.empty_like(total)
    dbranch = None if dy.dtype == total.dtype else torch.empty_like(dy)
    columns = triton.next_power_of_2(size)
    height = max(1, TILE // columns)
    programs = min(PROGRAMS * multiprocessors(), ceil_div(rows, height))
    parts = total.new_empty(programs, size, dtype=torch.float32)
    _rms_norm_backward[programs,](
        total, weight, rstd, dy, dtotal, dx, dbranch, parts, rows, size, programs,
        SUM=dtotal is not None, ADD=dbranch is not None, ROWS=height, BLOCK=columns,
        num_warps=min(16, max(1, height * columns // (32 * PER_THREAD))),
    )  # fmt: skip
    return dx, dx if dbranch is None else dbranch, parts


@interpretable
def sum_parts(parts: Tensor, out: Tensor) -> None:
    """The sum of parts [parts, D] in a fixed order, into out [D]."""
    size = out.numel()
    _rms_norm_dweight[ceil_div(size, NORM_DWEIGHT.columns),](
        parts, out, len(parts), size, ROWS=NORM_DWEIGHT.rows, BLOCK=NORM_DWEIGHT.columns, num_warps=NORM_DWEIGHT.warps
    )
