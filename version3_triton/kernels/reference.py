"""Each kernel's operation in PyTorch, with the same signature: what runs where Triton cannot, or a
kernel is switched off.
"""

from common.attention import attention  # noqa: F401
from common.rmsnorm import rms_norm
from common.rope import apply_rope  # noqa: F401

import torch
import torch.nn.functional as F
from torch import Tensor


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + residual and the norm of that sum; all [..., D]."""
    total = x + residual
    return total, rms_norm(total, weight, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, arXiv:2002.05202); all [..., F]."""
    return F.silu(gate) * up


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log softmax(x @ weight.T)[target] in nats, computed in float32 or wider.

    x [B, S, D], the last hidden states; weight [V, D]; targets [B, S], the next tokens. A target of
    -100 does not count.
    """
    logits = F.linear(x, weight).flatten(0, 1)  # [B S, V]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(dtype), targets.flatten())
