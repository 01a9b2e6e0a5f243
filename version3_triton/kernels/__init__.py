"""The model's operations outside the matrix products, in one table: a Triton kernel each, or the
same in PyTorch.

A model is made with a table and calls `self.operations.rms_norm(...)`. A kernel runs on a GPU, in
at most 32 bits. With TRITON_INTERPRET=1 Triton's interpreter executes it on a CPU, in NumPy: slow,
and for testing.
"""

import importlib.util
import sys
from collections.abc import Callable
from typing import NamedTuple

from common import device as devices
from common import ranks
from common.options import Options, Switches
from common.precision import amp_dtype
from version3_triton.kernels import reference
from version3_triton.kernels.checks import INTERPRETED, refuse_wrong

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
LOADED = HAS_TRITON and (INTERPRETED or torch.cuda.is_available())  # Elsewhere no kernel could run.
SWITCHES = {  # switch: the operations that it gives back to PyTorch
    "triton-norm": ("rms_norm", "add_rms_norm"),
    "triton-rope": ("apply_rope",),
    "triton-attention": ("attention",),
    "triton-swiglu": ("swiglu",),
    "triton-loss": ("linear_cross_entropy",),
}


class Operations(NamedTuple):
    """The functions that a model calls; `reference` says what each computes."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    apply_rope: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    linear_cross_entropy: Callable[[Tensor, Tensor, Tensor], Tensor]


REFERENCE = Operations._make(getattr(reference, name) for name in Operations._fields)
KERNELS = REFERENCE
if LOADED:
    from version3_triton.kernels import (
        flash_attention,
        linear_cross_entropy,
        rms_norm,
        rope,
        swiglu,
    )

    KERNELS = Operations(
        rms_norm=rms_norm.rms_norm,
        add_rms_norm=rms_norm.add_rms_norm,
        apply_rope=rope.apply_rope,
        attention=flash_attention.attention,
        swiglu=swiglu.swiglu,
        linear_cross_entropy=linear_cross_entropy.linear_cross_entropy,
    )


def missing(device: torch.device) -> str | None:
    """Why kernels cannot run on this device, in a few words; None if they can."""
    if not HAS_TRITON:
        return "triton is not installed"
    if device.type != "cuda" and not INTERPRETED:
        return "they need a GPU (or TRITON_INTERPRET=1)"
    return None


def choose(switches: Switches, device: str = "auto") -> Operations:
    """The table of a model on this device: kernels, but PyTorch's form where the switch is off.

    It is REFERENCE where no kernel can run. A model in float64 is made with that one.
    """
    if missing(devices.select(device)):
        return REFERENCE
    off = [name for switch in SWITCHES if not switches[switch] for name in SWITCHES[switch]]
    return KERNELS._replace(**{name: getattr(REFERENCE, name) for name in off})


def available(options: Options) -> dict[str, bool | str]:
    """The options' switches as they can be on its device: where no kernel can run, all off but
    fused-adamw, which is PyTorch's, with the reason under "no-kernels".

    Raises:
        UsageError: the kernels would compute wrong numbers.
    """
    reason = missing(devices.select(options.device))
    if reason:
        # A stage of the debugging exercise has a name, and its page says this.
        if ranks.here().main_process and not getattr(options, "name", None):
            print(
                f"no Triton kernels: {reason}; PyTorch's operations run in their place",
                file=sys.stderr,
            )
        switches = {name: on and name == "fused-adamw" for name, on in options.switches.items()}
        return switches | {"no-kernels": reason}
    if options.use_amp:
        refuse_wrong(amp_dtype(options))
    return dict(options.switches)
