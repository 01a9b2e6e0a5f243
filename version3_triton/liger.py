"""Liger-Kernel's operations (Hsu et al. 2024, arXiv:2410.10989) with the signatures of ours, for the benchmark of the kernels.

Each as Liger's patch of transformers' LLaMA calls it. It has no attention of its own.
"""

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from liger_kernel.transformers.functional import liger_rms_norm

    return liger_rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    normalized, total = liger_fused_add_rms_norm(x, residual, weight, eps)
    return total, normalized


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """It turns what it is given in place where that is [B, S, heads, Dh] in memory."""
    from liger_kernel.transformers.functional import liger_rope

    length = q.shape[2]
    return liger_rope(q, k, cos[None, :length], sin[None, :length])


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_swiglu

    return liger_swiglu(gate, up)


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(x.flatten(0, -2), weight, targets.flatten())
