"""Each kernel's operation in PyTorch, with the same signature: what runs where Triton cannot, or a kernel is switched off."""

from common.operations import linear_cross_entropy, swiglu  # noqa: F401
from common.rmsnorm import rms_norm
from common.rope import apply_rope  # noqa: F401

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
