"""The backward pass of the norm before a product, for x, the branch that was added to it, and the
norm's weight.

The sum x + branch has one gradient, which is that of both. Autograd is given it for the branch, in
the dtype of the products. In the first block, which has no branch, and everywhere with
--enable-fp32-residual-gradient it is given it for x, in the dtype of the residual stream.
"""

from common.spans import span
from version4_ultra_fused.kernels.reference import Norm
from version4_ultra_fused.memory.memory_plan import MemoryPlan

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _dtypes(ctx, dy: Tensor, norm: Norm) -> tuple[torch.dtype, torch.dtype]:
    """Of the gradients of x and the branch; equal ones if only one of them is needed."""
    needs_x, needs_branch, *_ = ctx.needs_input_grad
    dtype = norm.weight.dtype if needs_x else dy.dtype
    return dtype, dy.dtype if needs_branch else dtype


def _gradients(
    ctx, plan: MemoryPlan, results: tuple[Tensor, Tensor, Tensor], norm: Norm
) -> Gradients:
    needs_x, needs_branch, *_ = ctx.needs_input_grad
    dx, dbranch, parts = results
    dweight = plan.norm_gradient(norm.weight, parts)
    return dx if needs_x else None, dbranch if needs_branch else None, dweight


def of_norm(
    ctx,
    plan: MemoryPlan,
    dy: Tensor,
    dtotal: Tensor | None,
    dbranch: Tensor | None,
    norm: Norm,
) -> Gradients:
    """The gradients of x, the branch and the norm's weight, or None where autograd needs none.

    Args:
        ctx: of a Function whose first arguments are x and branch.
        dy: [N, D], the gradient of the norm's result.
        dtotal: [N, D], the gradient of the sum x + branch from elsewhere, in the dtype of the
            residual stream; None where it has none of its own, or only `dbranch`.
        dbranch: the same in the products' dtype, or None.
        norm: from `add_norm`.
    """
    with span("norm"):
        dtypes = _dtypes(ctx, dy, norm)
        added = dbranch if dtotal is None else dtotal
        results = plan.operations.add_norm_backward(dy, added, norm, *dtypes)
        return _gradients(ctx, plan, results, norm)


def through_product(
    ctx,
    plan: MemoryPlan,
    product: tuple[Tensor, Tensor, Tensor | None, Tensor],
    dtotal: Tensor | None,
    dbranch: Tensor,
    norm: Norm,
) -> tuple[Gradients, Tensor | None]:
    """`of_norm` of dy = dout W, where out = y W^T, and the gradient of W.

    `product` is the parameter W [C, D], dout [N, C], `dots` of `product_norm_backward`, and y [N,
    D].
    """
    parameter, dout, dots, y = product
    weight = plan.buffers.weight(parameter, dout.dtype)
    ready = plan.schedule.mark()
    dtype, branch_dtype = _dtypes(ctx, dout, norm)
    added = dbranch if dtotal is None else dtotal
    results = plan.operations.product_norm_backward(
        dout, dots, weight, added, norm, dtype=dtype, branch_dtype=branch_dtype
    )
    dweight = plan.matrix_gradient(parameter, dout, y, ready)
    return _gradients(ctx, plan, results, norm), dweight
