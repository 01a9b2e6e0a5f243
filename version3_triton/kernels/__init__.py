"""The model's operations outside the matrix products, as plain functions: a Triton kernel each, or
the same in PyTorch.

A kernel runs on a GPU. With TRITON_INTERPRET=1 Triton's interpreter executes it on a CPU, in NumPy:
slow, and for testing.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from common import device as devices
from common import ranks
from common.options import Options
from common.precision import amp_dtype
from version3_triton.kernels import reference
from version3_triton.kernels.checks import INTERPRETED, refuse_other, refuse_wrong

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
LOADED = HAS_TRITON and (INTERPRETED or torch.cuda.is_available())  # elsewhere no kernel could run
SWITCHES = {  # switch: the operations that it gives back to PyTorch
    "triton-norm": ("rms_norm", "add_rms_norm"),
    "triton-rope": ("apply_rope",),
    "triton-attention": ("attention",),
    "triton-swiglu": ("swiglu",),
    "triton-loss": ("linear_cross_entropy",),
}
KERNELS: dict[str, Callable] = {}
# of operations, by name, inside `replaced`
_instead: ContextVar[Mapping[str, Callable]] = ContextVar("instead")

if LOADED:
    from version3_triton.kernels import flash_attention, rope
    from version3_triton.kernels import linear_cross_entropy as loss
    from version3_triton.kernels import rms_norm as norm
    from version3_triton.kernels import swiglu as activation

    KERNELS = {
        "rms_norm": norm.rms_norm,
        "add_rms_norm": norm.add_rms_norm,
        "apply_rope": rope.apply_rope,
        "attention": flash_attention.attention,
        "swiglu": activation.swiglu,
        "linear_cross_entropy": loss.linear_cross_entropy,
    }


def missing(device: torch.device) -> str | None:
    """Why kernels cannot run on this device, in a few words; None if they can."""
    if not HAS_TRITON:
        return "triton is not installed"
    if device.type != "cuda" and not INTERPRETED:
        return "they need a GPU (or TRITON_INTERPRET=1)"
    return None


def available(options: Options) -> dict[str, bool | str]:
    """The options' switches as they can be here: all off, with the reason under "no-kernels", where
    no kernel can run.

    Raises:
        UsageError: the kernels would compute wrong numbers.
    """
    device = devices.select(options.device)
    reason = missing(device)
    if reason:
        # a stage has a name, and its page says this
        if ranks.here().main_process and not getattr(options, "name", None):
            print(
                f"no Triton kernels: {reason}; PyTorch's operations run in their place",
                file=sys.stderr,
            )
        return dict.fromkeys(options.switches, False) | {"no-kernels": reason}
    if options.use_amp:
        refuse_wrong(amp_dtype(options))
    return dict(options.switches)


@contextmanager
def replaced(instead: Mapping[str, Callable]) -> Iterator[None]:
    """Inside it these functions run in place of the operations of their names."""
    before = _instead.set(instead)
    try:
        yield
    finally:
        _instead.reset(before)


def switchable(method: Callable) -> Callable:
    """A method of a model in which the operations follow the model's `switches` and, if it has any,
    its own `operations`.
    """

    @functools.wraps(method)
    def switched(self, *args):
        off = [
            name
            for switch, names in SWITCHES.items()
            if not self.switches[switch]
            for name in names
        ]
        with replaced(
            {name: getattr(reference, name) for name in off} | getattr(self, "operations", {})
        ):
            return method(self, *args)

    return switched


def operation(plain: Callable, kernels: Mapping[str, Callable]) -> Callable:
    """An operation of Version 3 or 4, whose first argument is a tensor: the kernel of its name, or
    PyTorch's form `plain`.

    PyTorch's form runs where no kernel can, and in float64. Inside `replaced` another function may
    run instead.
    """
    name = plain.__name__

    @functools.wraps(plain)
    def run(x: torch.Tensor, *args, **named):
        instead = _instead.get({})
        if name in instead:
            return instead[name](x, *args, **named)
        if missing(x.device) or x.dtype == torch.float64:
            return plain(x, *args, **named)
        refuse_other(x.device)
        return kernels[name](x, *args, **named)

    return run


rms_norm = operation(reference.rms_norm, KERNELS)
add_rms_norm = operation(reference.add_rms_norm, KERNELS)
apply_rope = operation(reference.apply_rope, KERNELS)
attention = operation(reference.attention, KERNELS)
swiglu = operation(reference.swiglu, KERNELS)
linear_cross_entropy = operation(reference.linear_cross_entropy, KERNELS)
