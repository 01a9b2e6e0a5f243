"""Causal attention by PyTorch's fused kernel: Version 2's, and the reference of the kernels after
it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(Dh)) v in tiles, without an [S, S] matrix in memory (Dao et al. 2022,
    arXiv:2205.14135).

    Args:
        q: [B, H, S, Dh].
        k, v: [B, K, S, Dh]; query head h reads head h // (H / K).

    Returns:
        [B, H, S, Dh].
    """
    grouped = q.shape[1] != k.shape[1]
    # The fp32 kernel takes no groups: PyTorch would use the plain path.
    if grouped and q.is_cuda and q.dtype == torch.float32:
        groups = q.shape[1] // k.shape[1]
        grouped = False
        # [B, H, S, Dh]
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
