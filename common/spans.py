"""Named spans of a training step, the same names in every version, seen by every profiler.

While a torch profile is being taken a span is a `record_function`; on a GPU it is also an nvtx
range, which ROCm builds of PyTorch emit as roctx (`rocprofv3 --marker-trace`, `nsys`, `ncu
--nvtx`). Otherwise it costs a function call.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

recording = False  # set while a torch profile is being taken
# It is called with (name, entering); the phase clock sets it.
observer: Callable[[str, bool], None] | None = None


class span:
    """`with span("attention"):` or `@span("attention")` on a function; `tracepage.span_names` has
    the names.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        if torch.compiler.is_compiling():
            return
        if observer:
            observer(self.name, True)
        if torch.cuda.is_initialized():
            torch.cuda.nvtx.range_push(self.name)
        self.record = torch.profiler.record_function(self.name) if recording else None
        if self.record:
            self.record.__enter__()

    def __exit__(self, *exception: object) -> None:
        if torch.compiler.is_compiling():
            return
        if self.record:
            self.record.__exit__(*exception)
        if torch.cuda.is_initialized():
            torch.cuda.nvtx.range_pop()
        if observer:
            observer(self.name, False)

    def __call__(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            with span(self.name):
                return function(*args, **kwargs)

        return wrapper


def step_range(number: int) -> AbstractContextManager:
    """On a GPU an nvtx range `step 3`, by which a page of nsys knows the steps of the loop."""
    if torch.cuda.is_initialized():
        return torch.cuda.nvtx.range(f"step {number}")
    return nullcontext()
