"""PyTorch's fused attention, and activation and loss as separate operations: Versions 1 and 2, and the kernels' oracle."""

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
        targets: [B, S], the tokens that follow; -100 for a token that does not count.
    """
    logits = F.linear(x, weight).flatten(0, 1)  # [B S, V]
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten())


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by PyTorch's fused kernel; q [B, H, S, Dh], k and v [B, K, S, Dh] -> [B, H, S, Dh]."""
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda and q.dtype == torch.float32:  # the fp32 kernel takes no groups: PyTorch would use the plain path
        groups, grouped = q.shape[1] // k.shape[1], False
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)  # [B, H, S, Dh]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
