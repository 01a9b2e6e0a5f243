"""Variant B, repaired: the products read the working weights, so the update writes them too."""

from functools import partial

from common.training.capture import Step
from version4_ultra_fused import kernels
from version4_ultra_fused import tiny_llama_v4 as v4
from version4_ultra_fused.memory.optimizer import Flat, MasterAdamW
from version4_ultra_fused.tiny_llama_v4 import CAPTURED, SWITCHES, TinyLlama, make_model, make_optimizer, train

__all__ = ["CAPTURED", "SWITCHES", "TinyLlama", "make_model", "make_optimizer", "make_step", "train"]


def make_step(model, optimizer, precision) -> Step:
    step = v4.make_step(model, optimizer, precision)
    optimizer._update = partial(update, optimizer)
    return step


def update(optimizer: MasterAdamW, flat: Flat, part: slice) -> None:
    """AdamW for a part of the weights, in one process."""
    weight, gradient, working = flat.master[part], flat.gradient[part], None if flat.working is None else flat.working[part]
    kernels.adamw(weight, flat.moments(part), gradient, working, optimizer.steps, **optimizer.settings())
