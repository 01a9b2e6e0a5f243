"""Root-mean-square layer normalization (Zhang and Sennrich 2019, arXiv:1910.07467), as separate
PyTorch operations.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps), the mean over the last dimension, computed in at least
    float32.

    Args:
        x: [..., D].
        weight: [D].
        eps: added to the mean square before the root.

    Returns:
        [..., D] in x's dtype (promoted with weight's, as transformers does).
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normalized.to(x.dtype)
