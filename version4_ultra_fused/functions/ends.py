"""Both ends of the model as autograd Functions: the embedding, and the last norm with the head and
the loss.

They share one weight, so its gradient has two parts: the head's comes first in the backward pass,
the embedding's last.
"""

from typing import Any

from common.precision import products_dtype
from common.spans import span
from version4_ultra_fused.functions import norm_gradients
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
        if dloss is not ctx.one:
            dlogits = dlogits * dloss
        dy, dhead = plan.product_gradients(head, dlogits, y)
        dx, dprevious, dnorm = norm_gradients.of_norm(ctx, plan, dy, None, None, norm)
        return dx, dprevious, None, None, dnorm, dhead


def loss(x: Tensor, branch: Tensor | None, targets: Tensor, model: Any) -> Tensor:
    """`LossFunction` for a model of tiny_llama_v4.py, or the same with the head in FP8."""
    model.plan.schedule.run_waiting()
    head = model.lm_head.weight
    function: type[torch.autograd.Function] = LossFunction
    if model.plan.in_fp8(head, products_dtype(x)):
        from version4_ultra_fused.functions import fp8_block

        function = fp8_block.FP8LossFunction
    return function.apply(x, branch, targets, model, model.norm.weight, head)
