"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), rotating the two halves of a head
as transformers does.

Position s turns the pair (x_i, x_{i + Dh/2}) by the angle s * theta^(-2i / Dh):

    out = x * cos + rotate_half(x) * sin        rotate_half([a, b]) = [-b, a]
"""

import torch
from torch import Tensor


def rope_tables(head_dim: int, max_sequence_length: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, each [max_sequence_length, Dh] in float32, the halves of Dh alike."""
    cpu = torch.device("cpu")  # for the same bits on every device
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float32, device=cpu)
    positions = torch.arange(max_sequence_length, dtype=torch.float32, device=cpu)
    frequencies = 1.0 / theta ** (pairs / head_dim)  # [Dh/2]
    angles = torch.outer(positions, frequencies)  # [S, Dh/2]
    angles = torch.cat((angles, angles), dim=-1)  # [S, Dh]
    return angles.cos(), angles.sin()


def rotate_half(x: Tensor) -> Tensor:
    """[..., Dh] -> [..., Dh]: (first half, second half) becomes (-second half, first half)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys by their positions.

    Args:
        q: [B, H, S, Dh].
        k: [B, K, S, Dh].
        cos, sin: [S_max, Dh] with S_max >= S, from `rope_tables`.

    Returns:
        Rotated q and k, shapes and dtype unchanged.
    """
    length = q.shape[-2]
    cos = cos[:length].to(q.dtype)  # [S, Dh], broadcast over B and heads
    sin = sin[:length].to(q.dtype)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
