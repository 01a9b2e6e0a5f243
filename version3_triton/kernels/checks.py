"""What kernels refuse, because they would compute wrong numbers."""

import functools
import os
from collections.abc import Callable

from tracepage.errors import UsageError

import torch
from torch import Tensor

# These are the values that Triton takes for it.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "on", "true", "y", "yes")


def refuse_wrong(dtype: torch.dtype | None) -> None:
    """Raises UsageError for bfloat16 in the interpreter, for tensors on any device."""
    if INTERPRETED and dtype == torch.bfloat16:
        raise UsageError(
            "Triton's interpreter computes bfloat16 wrong: leave out --use-amp, "
            "or take float16 in Version 3"
        )


def refuse_other(x: Tensor) -> None:
    """Raises UsageError for float64, in which no kernel computes, and for a GPU that is not the
    current one: Triton launches on the current GPU, wherever the tensors are.
    """
    if x.dtype == torch.float64:
        raise UsageError("kernels compute in float32: make a model in float64 with REFERENCE")
    device = x.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise UsageError(
            f"kernels run on the current GPU, not on {device}: "
            f"call torch.cuda.set_device({device.index}) before"
        )


def refuse_odd(head_dim: int) -> None:
    """Raises UsageError for a head dimension that RoPE's kernels would not turn to its end."""
    if head_dim < 2 or head_dim % 2:
        raise UsageError(
            "RoPE turns pairs of numbers: the head dimension must be even and at least 2, "
            f"not {head_dim}"
        )


def checked(launch: Callable) -> Callable:
    """A function that launches kernels, with what `refuse_other` refuses of its first argument.

    In the interpreter it also refuses what `refuse_wrong` does: the dtypes are those of the
    arguments and, of the tensors' devices, autocast's.
    """

    @functools.wraps(launch)
    def on_this_gpu(first: Tensor, *arguments, **named):
        refuse_other(first)
        return launch(first, *arguments, **named)

    @functools.wraps(launch)
    def interpreted(first: Tensor, *arguments, **named):
        refuse_other(first)
        for argument in (first, *arguments, *named.values()):
            dtype = argument if isinstance(argument, torch.dtype) else None
            refuse_wrong(getattr(argument, "dtype", dtype))
            if isinstance(argument, Tensor) and torch.is_autocast_enabled(argument.device.type):
                refuse_wrong(torch.get_autocast_dtype(argument.device.type))
        return launch(first, *arguments, **named)

    return interpreted if INTERPRETED else on_this_gpu
