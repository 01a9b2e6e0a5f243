"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), alone and fused with the residual addition
before it.

Rows x of D numbers, weight w [D], r = 1 / sqrt(mean(x^2) + eps), n = x r:

    forward     y = w n
    backward    dx = r (w dy - n mean(w dy n))        dw = sum over the rows of dy n

`add_rms_norm` takes x = a + b, gives x and y, and adds x's own gradient to dx, which is then that
of a and of b.

Numbers moved for N = B S rows (eager: `common.rmsnorm`, an operation at a time):

    rms_norm        forward 2 N D, eager 7 N D        backward 3 N D, eager 23 N D
    add_rms_norm    forward 4 N D, eager 10 N D       backward 4 N D, eager 26 N D

Left out are dw's parts, 2 D float32 for each program: little where there are many more rows than
programs, 4 a multiprocessor. Saved: x, and r for each row; n is computed again. Each program keeps
its part of dw in registers over all its rows and writes it once; a second kernel adds the parts in
a fixed order, so the same input gives the same bits.
"""

from common.precision import products_dtype
from tracepage.errors import UsageError
from version3_triton.kernels.checks import checked
from version3_triton.kernels.dependent_launch import begin
from version3_triton.kernels.launch_sizes import NORM_DWEIGHT, ceil_div, tile
from version3_triton.kernels.memory import in_matrix, read

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_SIZE = 65536  # a row should stay in registers; one much wider than 4,096 may not


@triton.jit
def _rms_norm_forward(
    x_ptr,  # [N, D]
    add_ptr,  # [N, D]: what is added to x; or None
    weight_ptr,  # [D]
    sum_ptr,  # [N, D]: the sum, rounded to its dtype
    y_ptr,  # [N, D]: the norm
    rstd_ptr,  # [N], float32: r
    copy_ptr,  # [N, D]: the sum in another dtype; or None
    rows,  # N
    size,  # D
    eps,  # added to the mean square
    ADD: tl.constexpr,  # whether there is something to add
    COPY: tl.constexpr,  # whether to write the copy
    ROWS: tl.constexpr,  # rows of a tile
    BLOCK: tl.constexpr,  # D, rounded up to a power of two
    DEPENDENT: tl.constexpr = False,  # whether the launch is dependent
):
    begin(DEPENDENT, True)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = in_matrix(row, rows, column, size)
    place = row[:, None] * size + column[None, :]
    x = read(x_ptr + place, inside)
    if ADD:
        x += read(add_ptr + place, inside)
        total = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + place, total, mask=inside)
        x = total.to(tl.float32)  # The backward pass will read this.
    rstd = 1 / tl.sqrt(tl.sum(x * x, axis=1) / size + eps)
    weight = read(weight_ptr + column, column < size)
    y = x * rstd[:, None] * weight[None, :]
    tl.store(y_ptr + place, y, mask=inside)
    if COPY:  # x in another number format
        tl.store(copy_ptr + place, x, mask=inside)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def _rms_norm_backward(
    x_ptr,  # [N, D]: what the norm was of
    weight_ptr,  # [D]
    rstd_ptr,  # [N], float32: r
    dy_ptr,  # [N, D]
    dsum_ptr,  # [N, D]: the sum's own gradient; or None
    dx_ptr,  # [N, D]
    dadd_ptr,  # [N, D]: dx in the other addend's dtype; or None
    by_part_ptr,  # [programs, D], float32: parts of dw
    rows,  # N
    size,  # D
    programs,  # how many there are
    SUM: tl.constexpr,  # whether the sum has a gradient of its own
    ADD: tl.constexpr,  # whether to write dx twice
    ROWS: tl.constexpr,  # rows of a tile
    BLOCK: tl.constexpr,  # D, rounded up to a power of two
    DEPENDENT: tl.constexpr = False,  # whether the launch is dependent
):
    begin(DEPENDENT, True)
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    weight = read(weight_ptr + column, column < size)
    dweight = tl.zeros((BLOCK,), tl.float32)
    for start in range(program * ROWS, rows, programs * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = in_matrix(row, rows, column, size)
        place = row[:, None] * size + column[None, :]
        x = read(x_ptr + place, inside)
        dy = read(dy_ptr + place, inside)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        dy *= rstd
        scaled = dy * weight[None, :]
        mean = (tl.sum(scaled * x, axis=1) / size)[:, None] * rstd * rstd
        dweight += tl.sum(dy * x, axis=0)  # In this order nothing spills: LOG.md.
        dx = scaled - x * mean
        if SUM:
            dx += read(dsum_ptr + place, inside)
        tl.store(dx_ptr + place, dx, mask=inside)
        if ADD:  # the same gradient in the other addend's number format
            tl.store(dadd_ptr + place, dx, mask=inside)
    tl.store(by_part_ptr + program.to(tl.int64) * size + column, dweight, mask=column < size)


@triton.jit
def _rms_norm_dweight(
    by_part_ptr,  # [parts, D], float32
    dweight_ptr,  # [D]
    parts,  # how many there are
    size,  # D
    ROWS: tl.constexpr,  # parts at a time
    BLOCK: tl.constexpr,  # columns of a program
    DEPENDENT: tl.constexpr = False,  # whether the launch is dependent
):
    begin(DEPENDENT, True)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, parts, ROWS):
        part = start + tl.arange(0, ROWS)
        inside = in_matrix(part, parts, column, size)
        total += tl.load(
            by_part_ptr + part[:, None] * size + column[None, :], mask=inside, other=0.0
        )
    tl.store(
        dweight_ptr + column,
        tl.sum(total, axis=0),
        mask=column < size,
    )


class _AddRMSNorm(torch.autograd.Function):
    """x + add and its norm; without `add` only the norm."""

    @staticmethod
    def forward(ctx, x: Tensor, add: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype):
        size = x.shape[-1] if x.ndim else 0
        if size > MAX_SIZE:
            raise UsageError(
                f"the norm's kernel takes rows of at most {MAX_SIZE} numbers, not {size}: "
                "switch it off"
            )
        if not size or weight.shape != x.shape[-1:] or (add is not None and add.shape != x.shape):
            shapes = [[*tensor.shape] for tensor in (x, add, weight) if tensor is not None]
            raise UsageError(
                "the norm's kernel takes [..., D], what is added in the same shape, "
                f"and a weight [D], D at least 1, not {shapes}"
            )
        x = x.contiguous()
        add = None if add is None else add.contiguous()
        weight = weight.contiguous()
        rows = x.numel() // size
        total = x
        if add is not None:
            total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, add.dtype))
        y = torch.empty_like(x, dtype=dtype)
        rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
        blocks = tile("norm_forward", size, x.device)
        _rms_norm_forward[ceil_div(rows, blocks.rows),](
            x,
            add,
            weight,
            total,
            y,
            rstd,
            None,
            rows,
            size,
            eps,
            ADD=add is not None,
            COPY=False,
            ROWS=blocks.rows,
            BLOCK=blocks.columns,
            num_warps=blocks.warps,
        )
        ctx.save_for_backward(total, weight, rstd)
        ctx.dtypes = x.dtype, None if add is None else add.dtype
        ctx.set_materialize_grads(False)
        return (y,) if add is None else (total, y)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor | None):
        total, weight, rstd = ctx.saved_tensors
        x_dtype, add_dtype = ctx.dtypes
        size = total.shape[-1]
        dsum, dy = gradients if add_dtype else (None, *gradients)
        if dy is None:  # The norm was not used, and without dsum nothing was.
            if dsum is None:
                return None, None, None, None, None
            return dsum.to(x_dtype), dsum.to(add_dtype), None, None, None
        dx = torch.empty_like(total, dtype=x_dtype)
        dadd = None
        if add_dtype not in (None, x_dtype):
            dadd = torch.empty_like(total, dtype=add_dtype)
        blocks = tile("norm_backward", size, total.device)
        parts = min(blocks.programs, ceil_div(rstd.numel(), blocks.rows))
        dweight = torch.empty_like(weight)
        by_part = torch.empty(parts, size, dtype=torch.float32, device=total.device)
        _rms_norm_backward[parts,](
            total,
            weight,
            rstd,
            dy.contiguous(),
            None if dsum is None else dsum.contiguous(),
            dx,
            dadd,
            by_part,
            rstd.numel(),
            size,
            parts,
            SUM=dsum is not None,
            ADD=dadd is not None,
            ROWS=blocks.rows,
            BLOCK=blocks.columns,
            num_warps=blocks.warps,
        )
        _rms_norm_dweight[ceil_div(size, NORM_DWEIGHT.columns),](
            by_part,
            dweight,
            parts,
            size,
            ROWS=NORM_DWEIGHT.rows,
            BLOCK=NORM_DWEIGHT.columns,
            num_warps=NORM_DWEIGHT.warps,
        )
        if add_dtype and dadd is None:
            dadd = dx
        return dx, dadd, dweight, None, None


@checked
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps), the mean over the last dimension, computed in float32.

    Args:
        x: [..., D], D at most 65,536.
        weight: [D].
        eps: added to the mean square before the root.

    Returns:
        [..., D] in the type of `weight * x`; under autocast in autocast's type, which the next
        product wants.

    Raises:
        UsageError: D is larger or 0, or the shapes differ.
    """
    dtype = products_dtype(x, torch.promote_types(x.dtype, weight.dtype))
    (y,) = _AddRMSNorm.apply(x, None, weight, eps, dtype)
    return y


@checked
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + residual, and `rms_norm` of that sum, in one pass; shapes, types and errors as there."""
    wide = torch.promote_types(torch.promote_types(x.dtype, residual.dtype), weight.dtype)
    return _AddRMSNorm.apply(x, residual, weight, eps, products_dtype(x, wide))
