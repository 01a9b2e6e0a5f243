"""Activations that are computed again in the backward pass and not kept for it
(`--checkpoint-activations`).

    block        a block keeps its input, and the backward pass runs its forward pass again
                 (Chen et al. 2016, arXiv:1604.06174)
    selective    a block also keeps the results of KEPT, and computes the rest again: norms, RoPE,
                 SwiGLU, casts, and the scores of attention that is not fused
                 (Korthikanti et al. 2022, arXiv:2205.05198)

What is kept is a list of operators with their overload (`mm.default`). PyTorch compares the
operator that runs with the list: one without an overload equals none. A Triton kernel is no
operator of PyTorch, so it runs again.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten
KEPT = [
    aten.mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def apply(model: nn.Module, kind: str) -> None:
    """`block` or `selective`, for each block in the model's `layers`."""
    if kind == "selective":
        keep = functools.partial(create_selective_checkpoint_contexts, KEPT)
        recompute(model, context_fn=keep)
    else:
        recompute(model)


def recompute(model: nn.Module, **options: Any) -> None:
    """Makes each block run under torch.utils.checkpoint, with further options of it. Parameters
    keep their names.
    """
    for block in cast(nn.ModuleList, model.layers):
        block.forward = functools.partial(_checkpointed, options, block.forward)


def _checkpointed(options: dict[str, Any], forward: Callable, *inputs: Any) -> Any:
    # Nothing here draws random numbers, whose state could not be asked for while a step is
    # captured.
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **options)
