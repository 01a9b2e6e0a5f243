"""Each kernel's operation in PyTorch, with the same signature: what runs where Triton cannot, or a kernel is switched off."""

from common.rmsnorm import rms_norm

import torch
import torch.nn.functional as F
from torch import Tensor


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + residual and the norm of that sum; all [..., D]."""
    total = x + residual
    return total, rms_norm(total, weight, eps)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by PyTorch's fused kernel; q [B, H, S, Dh], k and v [B, K, S, Dh] -> [B, H, S, Dh]."""
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda and q.dtype == torch.float32:  # the fp32 kernel knows no groups: PyTorch would take the plain path
        groups, grouped = q.shape[1] // k.shape[1], False
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)  # [B, H, S, Dh]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up; all [..., F]."""
    return F.silu(gate) * up


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log softmax(x @ weight.T)[target] in nats; x [B, S, D], weight [V, D], targets [B, S]."""
    logits = F.linear(x, weight).flatten(0, 1)  # [B S, V]
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten())
