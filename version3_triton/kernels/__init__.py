"""The model's operations outside the matrix products, as plain functions: a Triton kernel each, or the same in PyTorch.

A kernel runs on a GPU. With TRITON_INTERPRET=1 Triton's interpreter executes it on a CPU, in NumPy: slow, and for testing.
"""

import functools
import importlib.util
import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from common import cli, ranks
from common import device as devices
from version3_triton.kernels import reference
from version3_triton.kernels.checks import INTERPRETED, refuse_other, refuse_wrong

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
SWITCHES = {  # switch: the operations that it gives back to PyTorch
    "triton-norm": ("rms_norm", "add_rms_norm"),
    "triton-rope": ("apply_rope",),
    "triton-attention": ("attention",),
    "triton-swiglu": ("swiglu",),
    "triton-loss": ("linear_cross_entropy",),
}
_off: Collection[str] = ()  # operations that are PyTorch's, inside `switched_off`

if HAS_TRITON:
    from version3_triton.kernels import flash_attention, linear_cross_entropy, rms_norm, rope, swiglu

    KERNELS = {
        "rms_norm": rms_norm.rms_norm, "add_rms_norm": rms_norm.add_rms_norm, "apply_rope": rope.apply_rope,
        "attention": flash_attention.attention, "swiglu": swiglu.swiglu,
        "linear_cross_entropy": linear_cross_entropy.linear_cross_entropy,
    }  # fmt: skip


def missing(device: torch.device) -> str | None:
    """Why kernels cannot run on this device, in a few words; None if they can."""
    if not HAS_TRITON:
        return "triton is not installed"
    if device.type != "cuda" and not INTERPRETED:
        return "they need a GPU (or TRITON_INTERPRET=1, which interprets them on a CPU)"
    return None


def available(options: Namespace, switches: dict[str, bool]) -> dict[str, bool | str]:
    """The switches as they can be here: all off, with the reason under "no-kernels", where no kernel can run.

    Raises:
        UsageError: the kernels would compute wrong numbers.
    """
    device = devices.select(options.device)
    reason = missing(device)
    if reason:
        if ranks.here().main_process:
            print(f"no Triton kernels: {reason}; PyTorch's operations run in their place", file=sys.stderr)
        return dict.fromkeys(switches, False) | {"no-kernels": reason}
    if vars(options).get("use_amp"):
        refuse_wrong(cli.amp_dtype(options))
    return switches


@contextmanager
def switched_off(operations: Collection[str]) -> Iterator[None]:
    """Inside it these operations are PyTorch's."""
    global _off
    before, _off = _off, operations
    try:
        yield
    finally:
        _off = before


def switchable(method: Callable) -> Callable:
    """A method of a model in which the operations follow the model's `switches`."""

    @functools.wraps(method)
    def switched(self, *args):
        with switched_off([name for switch, names in SWITCHES.items() if not self.switches[switch] for name in names]):
            return method(self, *args)

    return switched


def _operation(name: str) -> Callable:
    """The kernel where it can run and is switched on, otherwise PyTorch's operation."""
    eager = getattr(reference, name)

    @functools.wraps(eager)
    def operation(x: torch.Tensor, *args):
        if name in _off or missing(x.device):
            return eager(x, *args)
        refuse_other(x.device)
        return KERNELS[name](x, *args)

    return operation


rms_norm, add_rms_norm, apply_rope, attention, swiglu, linear_cross_entropy = map(
    _operation, ("rms_norm", "add_rms_norm", "apply_rope", "attention", "swiglu", "linear_cross_entropy")
)
