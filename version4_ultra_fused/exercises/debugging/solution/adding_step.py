"""Version 4's step with products that add to the gradients, repaired: it resets them first."""

import functools

from common.precision import Precision
from common.training.preparation import Batch, Step
from version4_ultra_fused import tiny_llama_v4 as v4
from version4_ultra_fused.memory.memory_plan import MemoryPlan
from version4_ultra_fused.memory.optimizer import MasterAdamW
from version4_ultra_fused.tiny_llama_v4 import SWITCHES, TinyLlama, make_model, make_optimizer

import torch
from torch import Tensor

__all__ = ["SWITCHES", "TinyLlama", "make_model", "make_optimizer", "make_step"]


def add_gradient(
    plan: MemoryPlan, parameter: Tensor, dy: Tensor, x: Tensor, after: torch.cuda.Event | None
) -> None:
    """Adds the gradient dy^T x of a weight [O, I] to its buffer, when dy [N, O] and x [N, I] are
    there.
    """
    gradient = plan.buffers.gradient[parameter]
    plan.schedule.on_products(parameter, lambda: gradient.add_(dy.T @ x), dy, x, after=after)


def make_step(model: TinyLlama, optimizer: MasterAdamW, precision: Precision) -> Step:
    step = v4.make_step(model, optimizer, precision)
    matrix_gradient = functools.partial(add_gradient, model.plan)
    model.plan.matrix_gradient = matrix_gradient  # type: ignore[method-assign]

    def step_from_zero(batch: Batch) -> Tensor:
        for flat in (optimizer.matrices, optimizer.others):
            flat.gradient.zero_()  # inside the step, so that a captured graph does it too
        return step(batch)

    return step_from_zero
