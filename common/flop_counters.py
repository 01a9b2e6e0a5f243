"""Three counts of the same FLOPs: by formula, by PyTorch's FlopCounterMode, by DeepSpeed's profiler.

The formula is the reference (`common.analysis.flops`). FlopCounterMode watches the matrix products that run, so it sees
the full S x S attention of an eager model, forward and backward. DeepSpeed patches `torch` functions by name and watches
one forward pass: its count adds functions such as silu (not methods such as `x.softmax()`), and its backward is twice its forward
by rule. None of the three counts norms or rotary embedding.
"""

import contextlib
import sys
from pathlib import Path

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


def count(model: nn.Module, batch: tuple[Tensor, Tensor], report: Path) -> dict[str, dict[str, int]]:
    """FLOPs of forward and backward by counter, for one batch; DeepSpeed's per-module report goes to the file `report`.

    A counter that is not installed is left out.
    """
    counted = {"FlopCounterMode": counted_by_torch(model, batch)}
    deepspeed = counted_by_deepspeed(model, batch, report)
    return counted | ({"DeepSpeed": deepspeed} if deepspeed else {})


def counted_by_torch(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, int]:
    """FLOPs of forward and backward as FlopCounterMode sees them, for one batch."""
    with FlopCounterMode(display=False) as counter:
        loss = _uncompiled_loss(model, *batch)
        forward = counter.get_total_flops()
        loss.backward()
    model.zero_grad()
    return {"forward": forward, "backward": counter.get_total_flops() - forward}


def counted_by_deepspeed(model: nn.Module, batch: tuple[Tensor, Tensor], profile_file: Path) -> dict[str, int] | None:
    """DeepSpeed's forward count, and its per-module report in `profile_file`; None where DeepSpeed is not installed.

    Everything that DeepSpeed prints goes to stderr: its log would otherwise stand in the middle of stdout.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            from deepspeed.profiling.flops_profiler import FlopsProfiler
    except ModuleNotFoundError:
        return None
    with contextlib.redirect_stdout(sys.stderr):
        profiler = FlopsProfiler(_Loss(model))
        profiler.start_profile()
        try:
            profiler.model(*batch)
            counted = profiler.get_total_flops()
            profiler.print_model_profile(module_depth=-1, top_modules=3, detailed=True, output_file=str(profile_file))
        finally:
            profiler.end_profile()
    return {"forward": int(counted), "backward": 2 * int(counted)}


def _uncompiled_loss(model: nn.Module, input_ids: Tensor, targets: Tensor) -> Tensor:
    """The class's own `loss`: a compiled one on the instance hides its operations from both counters."""
    return type(model).loss(model, input_ids, targets)


class _Loss(nn.Module):
    """Makes `model.loss` a forward pass, which is what DeepSpeed watches."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        return _uncompiled_loss(self.model, input_ids, targets)
