"""RMSNorm with the residual addition before it, forward and backward, by Version 3's kernels
(`rms_norm.py` there).

They are called without autograd, because a block's backward pass is written by hand and decides
what is saved and where a gradient goes.
"""

from version3_triton.kernels.checks import checked
from version3_triton.kernels.dependent_launch import dependent
from version3_triton.kernels.launch_sizes import (
    LAUNCH,
    NORM_DWEIGHT,
    LaunchConfig,
    ceil_div,
    family,
    tile_of,
)
from version3_triton.kernels.rms_norm import (
    _rms_norm_backward,
    _rms_norm_dweight,
    _rms_norm_forward,
)
from version4_ultra_fused import trials
from version4_ultra_fused.kernels.reference import Norm

import torch
from torch import Tensor

# Of the backward kernel where Version 3's sizes are not the fastest: on an H200 2.9 us in place of
# 4.0 for [1024, 256], and 37.5 in place of 39.7 for [8192, 2048]; for [8192, 1024] 20.3 in place of
# 18.8 (LOG.md has the table).
BACKWARD = {"sm_90": LaunchConfig(1024, 16, programs=8)}


@checked
def add_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Norm]:
    """x + branch in x's dtype, its norm in `dtype`, and what the backward pass needs, with x +
    branch in `dtype`.

    A sum in bf16 is rounded like the norm, which the backward pass reads as well, and takes half
    the memory.

    Args:
        x: [N, D], the residual stream.
        branch: [N, D] in any dtype, or None.
        weight: [D].

    Returns:
        [N, D] twice, and a Norm.
    """
    rows, size = x.shape
    x = x.contiguous()
    branch = None if branch is None else branch.contiguous()
    total = x if branch is None else torch.empty_like(x)
    y = torch.empty_like(x, dtype=dtype)
    rstd = x.new_empty(rows, dtype=torch.float32)
    rounded = total if x.dtype == dtype else torch.empty_like(y)
    sizes = LAUNCH[family()]["norm_forward"]
    if "norm" in trials.ON:
        sizes = LaunchConfig(*trials.numbers("NORM", 1024, 16))
    blocks = tile_of(sizes, "norm_forward", size, x.device)
    _rms_norm_forward[ceil_div(rows, blocks.rows),](
        x,
        branch,
        weight,
        total,
        y,
        rstd,
        rounded,
        rows,
        size,
        eps,
        ADD=branch is not None,
        COPY=rounded is not total,
        ROWS=blocks.rows,
        BLOCK=blocks.columns,
        num_warps=blocks.warps,
        **dependent(),
    )
    return total, y, Norm(weight, rounded, rstd)


@checked
def add_norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    norm: Norm,
    dtype: torch.dtype,
    branch_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the sum x + branch, which is that of both, and parts of the weight's.

    Args:
        dy: [N, D], the gradient of the norm.
        dtotal: [N, D], the gradient of the sum from elsewhere, or None.
        norm: from `add_norm`.
        dtype: of the sum's gradient.
        branch_dtype: of the same gradient as the branch is given it; None: `dtype`.

    Returns:
        [N, D] twice, one tensor if the dtypes are equal, and [parts, D] float32, of which the sum
        is the weight's gradient.
    """
    rows, size = norm.total.shape
    dy = dy.contiguous()
    total = norm.total.contiguous()
    dtotal = None if dtotal is None else dtotal.contiguous()
    dx = torch.empty_like(total, dtype=dtype)
    dbranch = branch_gradient(dx, branch_dtype)
    sizes = BACKWARD.get(family(), LAUNCH[family()]["norm_backward"])
    blocks = tile_of(sizes, "norm_backward", size, total.device)
    programs = min(blocks.programs, ceil_div(rows, blocks.rows))
    parts = total.new_empty(programs, size, dtype=torch.float32)
    _rms_norm_backward[programs,](
        total,
        norm.weight,
        norm.rstd,
        dy,
        dtotal,
        dx,
        dbranch,
        parts,
        rows,
        size,
        programs,
        SUM=dtotal is not None,
        ADD=dbranch is not dx,
        ROWS=blocks.rows,
        BLOCK=blocks.columns,
        num_warps=blocks.warps,
        **dependent(),
    )
    return dx, dbranch, parts


def branch_gradient(dx: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Where a kernel writes dx for the branch: dx itself, or new memory in another dtype."""
    return dx if dtype in (None, dx.dtype) else torch.empty_like(dx, dtype=dtype)


@checked
def sum_parts(parts: Tensor, out: Tensor) -> None:
    """The sum of parts [parts, D] in a fixed order, into out [D]."""
    parts = parts.contiguous()
    size = out.numel()
    _rms_norm_dweight[ceil_div(size, NORM_DWEIGHT.columns),](
        parts,
        out,
        len(parts),
        size,
        ROWS=NORM_DWEIGHT.rows,
        BLOCK=NORM_DWEIGHT.columns,
        num_warps=NORM_DWEIGHT.warps,
        **dependent(),
    )
