"""Both ends of the model as autograd Functions: the embedding, and the last norm with the head and
the loss.

They share one weight, so its gradient has two parts: the head's comes first in the backward pass,
the embedding's last.
"""

from common.precision import products_dtype
from common.spans import span
from version4_ultra_fused.functions import norm_gradients
from version4_ultra_fused.kernels.fp8.scales import trial
from version4_ultra_fused.memory.memory_plan import MemoryPlan, saved

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class EmbeddingFunction(torch.autograd.Function):
    """Token ids [N] -> [N, D]. Its gradient is the last of the backward pass.

    The gradient needs the ids sorted. With the memory plan they are sorted beside the loss, so
    `sort` sets `ctx.sorted` there.

    `gradient`: whether one will be computed, which `needs_input_grad` does not tell: it is true
    under `no_grad` as well.
    """

    @staticmethod
    def forward(ctx, weight: Tensor, ids: Tensor, plan: MemoryPlan, gradient: bool) -> Tensor:
        ctx.weight = weight
        ctx.plan = plan

        def sort() -> None:
            ctx.sorted = ids.sort(stable=True)  # the ids and their order

        if gradient and plan.buffers.gradient:
            plan.schedule.at_the_loss(sort, ids)
        elif gradient:
            sort()
        return weight.index_select(0, ids)

    @staticmethod
    @once_differentiable
    @span("embed")
    def backward(ctx, dx: Tensor):  # type: ignore[override]
        return ctx.plan.embedding_gradient(ctx.weight, *ctx.sorted, dx), None, None, None


def embed(weight: Tensor, ids: Tensor, plan: MemoryPlan) -> Tensor:
    """The rows of the weight [V, D] at token ids [N]."""
    return EmbeddingFunction.apply(weight, ids, plan, torch.is_grad_enabled())


class LossFunction(torch.autograd.Function):
    """The last norm, the head and the mean cross-entropy in nats: x and branch [N, D], targets [N]
    -> scalar.

    `model.one` is a tensor that holds 1. A backward pass that starts from it, and not from an equal
    one, multiplies nothing.
    """

    @staticmethod
    def forward(ctx, x, branch, targets: Tensor, model, *weights: Tensor) -> Tensor:
        norm_weight, head = weights
        plan = model.plan
        operations = plan.operations
        plan.schedule.run_waiting()
        if _in_fp8(plan, head, products_dtype(x)):
            return _forward_in_fp8(ctx, x, branch, targets, model, norm_weight, head)
        weight = plan.buffers.weight(head, products_dtype(x))
        _, y, norm = operations.add_norm(x, branch, norm_weight, model.norm.eps, weight.dtype)
        logits = y @ weight.T  # [N, V]
        ctx.saved = (y, norm, logits)
        ctx.head = head
        ctx.plan = plan
        ctx.one = model.one
        # The logits become their gradient.
        return operations.cross_entropy(logits, targets, any(ctx.needs_input_grad))

    @staticmethod
    @once_differentiable
    @span("loss")
    def backward(ctx, dloss: Tensor):  # type: ignore[override]
        y, norm, dlogits = saved(ctx)
        head = ctx.head
        plan = ctx.plan
        if not isinstance(y, Tensor):
            return _backward_in_fp8(ctx, dloss, y, norm, dlogits)
        if dloss is not ctx.one:
            dlogits = dlogits * dloss
        dhead = plan.matrix_gradient(head, dlogits, y)
        dy = dlogits @ plan.buffers.weight(head, dlogits.dtype)
        dx, dprevious, dnorm = norm_gradients.of_norm(ctx, plan, dy, None, None, norm)
        return dx, dprevious, None, None, dnorm, dhead


def _in_fp8(plan: MemoryPlan, head: Tensor, dtype: torch.dtype) -> bool:
    return bool(
        trial("HEAD") and plan.scales and dtype == torch.bfloat16 and head.shape[0] % 16 == 0
    )


def _forward_in_fp8(ctx, x, branch, targets: Tensor, model, norm_weight, head) -> Tensor:
    """`LossFunction.forward` with the head's product in FP8."""
    from version4_ultra_fused.functions.fp8_block import Product

    plan = model.plan
    product = Product(plan, head)
    _, y, norm = product.norm(x, branch, norm_weight, model.norm.eps)
    logits = product.forward(y)
    ctx.plan = plan
    ctx.one = model.one
    gradient = any(ctx.needs_input_grad)
    if trial("HEAD") == 1 or not gradient:
        loss = plan.operations.cross_entropy(logits, targets, gradient)
        ctx.saved = (product, norm, logits)
        ctx.head = head
        return loss
    dtype = product.gradient.dtype
    loss, *dlogits, scale = plan.operations.cross_entropy_quantized(logits, targets, dtype)
    # Its largest magnitude is known before, so none is looked for.
    product.gradient = product.gradient._replace(scale=scale)
    ctx.saved = (product, norm, dlogits)
    ctx.head = head
    return loss


def _backward_in_fp8(ctx, dloss: Tensor, product, norm, dlogits):
    scaled = dloss is not ctx.one
    if isinstance(dlogits, Tensor):
        dy = product.backward(dlogits * dloss if scaled else dlogits)
    else:
        if scaled:
            gradient = product.gradient
            product.gradient = gradient._replace(scale=gradient.scale * dloss)
        dy = product.backward_stored(*dlogits)
    dx, dprevious, dnorm = norm_gradients.of_norm(ctx, ctx.plan, dy, None, None, norm)
    return dx, dprevious, None, None, dnorm, None
