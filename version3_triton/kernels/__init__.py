"""The model's operations outside the matrix products: a Triton kernel each, or the same in PyTorch.

A kernel runs on a GPU. With TRITON_INTERPRET=1 Triton's interpreter executes it on a CPU, in NumPy: slow, and for testing.
"""

import importlib.util
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import common.rmsnorm
import common.rope
from common.errors import UsageError
from version3_triton.kernels import reference

import torch

if importlib.util.find_spec(
    "triton"
):  # here and not in `choose`: common.training.version_files hides this package once a version is loaded
    from version3_triton.kernels import flash_attention, linear_cross_entropy, rms_norm, rope, swiglu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SWITCHES = {  # what can be switched off: its operations
    "norm": ("rms_norm", "add_rms_norm"),
    "rope": ("apply_rope",),
    "attention": ("attention",),
    "swiglu": ("swiglu",),
    "loss": ("linear_cross_entropy",),
}


@dataclass(frozen=True)
class Operations:
    rms_norm: Callable
    add_rms_norm: Callable
    apply_rope: Callable
    attention: Callable
    swiglu: Callable
    linear_cross_entropy: Callable


REFERENCE = Operations(
    common.rmsnorm.rms_norm, reference.add_rms_norm, common.rope.apply_rope,
    reference.attention, reference.swiglu, reference.linear_cross_entropy,
)  # fmt: skip


def missing(device: torch.device) -> str | None:
    """Why kernels cannot run on this device, in a few words; None if they can."""
    if not importlib.util.find_spec("triton"):
        return "triton is not installed"
    if device.type != "cuda" and not INTERPRETED:
        return "they need a GPU (or TRITON_INTERPRET=1, which interprets them on a CPU)"
    return None


def refuse_wrong(device: torch.device, dtype: torch.dtype) -> None:
    """Raises UsageError where the kernels would compute wrong numbers."""
    if INTERPRETED and device.type == "cpu" and dtype == torch.bfloat16:
        raise UsageError("Triton's interpreter computes bfloat16 wrong: take --amp-dtype float16, or float32")


def choose(device: torch.device, without: Collection[str] = ()) -> Operations:
    """Kernels but for those of the switches in `without`; PyTorch's operations where kernels cannot run."""
    if missing(device):
        return REFERENCE
    kernels = Operations(
        rms_norm.rms_norm, rms_norm.add_rms_norm, rope.apply_rope,
        flash_attention.attention, swiglu.swiglu, linear_cross_entropy.linear_cross_entropy,
    )  # fmt: skip
    return replace(kernels, **{name: getattr(REFERENCE, name) for switch in without for name in SWITCHES[switch]})
