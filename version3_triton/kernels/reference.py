"""Each kernel's operation in PyTorch, with the same signature: what runs where Triton cannot, or a kernel is switched off."""

from common.operations import attention, linear_cross_entropy, swiglu  # noqa: F401
from common.rmsnorm import rms_norm
from common.rope import apply_rope  # noqa: F401

from torch import Tensor


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + residual and the norm of that sum; all [..., D]."""
    total = x + residual
    return total, rms_norm(total, weight, eps)
