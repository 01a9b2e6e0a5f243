"""Liger-Kernel's operations (Hsu et al. 2024, arXiv:2410.10989) with the signatures of ours, for
the benchmark of the kernels.

Each as Liger's patch of transformers' LLaMA calls it. It has no attention of its own. Importing
this file needs Liger-Kernel.
"""

from liger_kernel.transformers import functional
from torch import Tensor

rms_norm = functional.liger_rms_norm
swiglu = functional.liger_swiglu


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    normalized, total = functional.liger_fused_add_rms_norm(x, residual, weight, eps)
    return total, normalized


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """It turns what it is given in place where that is [B, S, heads, Dh] in memory."""
    return functional.liger_rope(q, k, cos[None, : q.shape[2]], sin[None, : q.shape[2]])


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.liger_fused_linear_cross_entropy(x.flatten(0, -2), weight, targets.flatten())
