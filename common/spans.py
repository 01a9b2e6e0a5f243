"""Named spans of a training step, the same names in every version, seen by every profiler.

While a torch profile is being taken a span is a `record_function`; on a GPU it is also an nvtx
range, which ROCm builds of PyTorch emit as roctx (`rocprofv3 --marker-trace`, `nsys`, `ncu
--nvtx`). Otherwise it costs a function call.
"""

import functools
from collections.abc import Callable

from tracepage.span_names import INNER_SPANS, SPANS

import torch

recording = False  # set while a torch profile is being taken
# called with (name, entering), not of inner spans; the phase clock sets it
observer: Callable[[str, bool], None] | None = None


class span:
    """`with span("attention"):` or `@span("attention")` on a function; the name is one of SPANS or
    INNER_SPANS.
    """

    def __init__(self, name: str) -> None:
        assert name in SPANS or name in INNER_SPANS, name
        self.name = name
        self.observed = name in SPANS

    def __enter__(self) -> None:
        if torch.compiler.is_compiling():
            return
        if observer and self.observed:
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
        if observer and self.observed:
            observer(self.name, False)

    def __call__(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            with span(self.name):
                return function(*args, **kwargs)

        return wrapper
