"""What kernels refuse, because they would compute wrong numbers."""

import functools
import os
from collections.abc import Callable

from tracepage.errors import UsageError

import torch
from torch import Tensor

# what Triton takes for it
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "on", "true", "y", "yes")


def refuse_wrong(dtype: torch.dtype | None) -> None:
    """Raises UsageError where the kernels would compute wrong numbers; the interpreter does so for
    tensors on any device.
    """
    if INTERPRETED and dtype == torch.bfloat16:
        raise UsageError(
            "Triton's interpreter computes bfloat16 wrong: leave out --use-amp, or take float16 in Version 3"
        )


def refuse_other(device: torch.device) -> None:
    """Raises UsageError for a GPU that is not the current one: Triton launches on the current GPU,
    wherever the tensors are.
    """
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise UsageError(
            f"kernels run on the current GPU, not on {device}: call torch.cuda.set_device({device.index}) before"
        )


def refuse_odd(head_dim: int) -> None:
    """Raises UsageError for a head dimension that RoPE's kernels would not turn to its end."""
    if head_dim < 2 or head_dim % 2:
        raise UsageError(
            f"RoPE turns pairs of numbers: the head dimension must be even and at least 2, not {head_dim}"
        )


def interpretable(launch: Callable) -> Callable:
    """A function that launches kernels; in the interpreter it refuses what `refuse_wrong` does. On
    a GPU it stays as it is.

    The dtypes are those of the arguments and, of the tensors' devices, autocast's.
    """
    if not INTERPRETED:
        return launch

    @functools.wraps(launch)
    def checked(*arguments, **named):
        for each in (*arguments, *named.values()):
            refuse_wrong(each if isinstance(each, torch.dtype) else getattr(each, "dtype", None))
            if isinstance(each, Tensor) and torch.is_autocast_enabled(each.device.type):
                refuse_wrong(torch.get_autocast_dtype(each.device.type))
        return launch(*arguments, **named)

    return checked
