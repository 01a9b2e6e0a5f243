"""The activation and the loss as separate PyTorch operations: those of Versions 1 and 2, and the oracle of the kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, arXiv:2002.05202); all [..., F]."""
    return F.silu(gate) * up


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean over the tokens of -log softmax(x @ weight.T)[target], in nats, computed in at least float32.

    Args:
        x: [B, S, D], the last hidden states.
        weight: [V, D].
        targets: [B, S], the tokens that follow.
    """
    logits = F.linear(x, weight).flatten(0, 1)  # [B S, V]
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten())
