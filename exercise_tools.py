"""What the adapters of exercises share: choosing a file, and outputs that show where a kernel wrote
too little or too far.
"""

import importlib
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from tracepage.errors import UsageError

import torch
from torch import Tensor

GUARD = 4096  # elements after an output: more than any block of the exercises


def load(folder: Path, exercise: str, unset: str = "starter") -> ModuleType:
    """The exercise's file in the folder that KERNEL_EXERCISES names, starter/ or solution/, or in
    `unset` if it is not set.
    """
    which = os.environ.get("KERNEL_EXERCISES", unset)
    if which not in ("starter", "solution"):
        raise UsageError(
            f"KERNEL_EXERCISES is {which!r}: set it to solution, or leave it unset for starter/"
        )
    if str(folder / which) not in sys.path:
        sys.path.insert(0, str(folder / which))
    return importlib.import_module(exercise)


@contextmanager
def unsolved() -> Iterator[None]:
    """Inside it a starter's NotImplementedError is a UsageError: one line that names the function
    and its problem.
    """
    try:
        yield
    except NotImplementedError as error:
        raise UsageError(f"not implemented: {error}") from error


def new_output(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous tensor of NaN, with GUARD more of them behind it."""
    size = math.prod(shape)
    memory = torch.full((size + GUARD,), math.nan, dtype=dtype or like.dtype, device=like.device)
    return memory[:size].view(shape)


def launch(
    kernel: Any,
    grid: Sequence[int],
    outputs: Sequence[Tensor],
    *arguments: object,
    **constants: int,
) -> None:
    """Launches a Triton kernel and asserts that it wrote nothing after the end of its outputs,
    which `new_output` made.
    """
    kernel[grid](*arguments, **constants)
    for output in outputs:
        after = output.as_strided((GUARD,), (1,), output.numel())
        assert after.isnan().all(), (
            f"{kernel.__name__} wrote after the end of an output: its store needs a mask"
        )
