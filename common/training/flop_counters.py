"""Three counts of the same FLOPs: by formula, by PyTorch's FlopCounterMode, by DeepSpeed's
profiler.

The formula is the reference (`tracepage.cost.flops`). FlopCounterMode watches the operators that
run, forward and backward: the matrix products, and fused attention by a formula that takes all S x
S pairs, as an eager model computes them, and in the backward pass the scores a second time, as such
a kernel computes them. DeepSpeed patches `torch` functions by name and watches one forward pass,
attention with all S x S pairs too. Its count adds functions such as silu (not methods such as
`x.softmax()`), and its backward is twice its forward by rule. None of the three counts norms or
rotary embedding.

Neither counter sees into a Triton kernel. A model gives the FLOPs of its kernels itself, by
formula, in `kernel_flops(input_ids) -> {"forward": ..., "backward": ...}`, and both counts include
them. A loss that computes its gradients in the forward pass counts there for FlopCounterMode; the
pass that DeepSpeed watches needs no gradients.
"""

import contextlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.config import ModelConfig
from common.training import distributed
from tracepage import files
from tracepage.cost import flops
from tracepage.records import step_profile
from tracepage.records.run_record import TimedRun
from tracepage.records.study_files import FlopCounts
from tracepage.views import flop_counts, roofline

import torch
from torch import Tensor, nn

MODEL_PROFILE = "model_profile.txt"


def count(
    model: nn.Module, batch: tuple[Tensor, Tensor], folder: Path
) -> dict[str, dict[str, int]]:
    """FLOPs of forward and backward by counter, for one batch; DeepSpeed writes its report into
    `folder`, module by module.

    A counter that is not installed is left out.
    """
    counted = {"FlopCounterMode": counted_by_torch(model, batch)}
    deepspeed = counted_by_deepspeed(model, batch, folder / MODEL_PROFILE)
    if deepspeed:
        counted["DeepSpeed"] = deepspeed
    return counted


def counted_by_torch(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, int]:
    """FLOPs of forward and backward for one batch by FlopCounterMode, and those of kernels."""
    from torch.utils.flop_counter import FlopCounterMode  # it imports triton

    unseen = _kernel_flops(model, batch)
    with FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter:
        loss = distributed.Loss(model)(*batch)
        forward = counter.get_total_flops()
        loss.backward()
    model.zero_grad()
    backward = counter.get_total_flops() - forward
    return {"forward": forward + unseen["forward"], "backward": backward + unseen["backward"]}


def counted_by_deepspeed(
    model: nn.Module, batch: tuple[Tensor, Tensor], profile_file: Path
) -> dict[str, int] | None:
    """DeepSpeed's forward count and that of kernels, and its per-module report in `profile_file`;
    None where it is not installed.

    Everything that DeepSpeed prints goes to stderr: its log would otherwise stand in the middle of
    stdout.
    """
    if next(model.parameters()).device.type == "cpu":
        # Otherwise a long warning says that no GPU was found.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if not importlib.util.find_spec("deepspeed"):
        return None
    with contextlib.redirect_stdout(sys.stderr):
        from deepspeed.profiling.flops_profiler import FlopsProfiler

        profiler = FlopsProfiler(distributed.Loss(model))
        profiler.start_profile()
        model.requires_grad_(False)
        try:
            profiler.model(*batch)
            counted = int(profiler.get_total_flops()) + _kernel_flops(model, batch)["forward"]
            profiler.print_model_profile(
                module_depth=-1, top_modules=3, detailed=True, output_file=str(profile_file)
            )
        finally:
            profiler.end_profile()
            model.requires_grad_(True)
    return {"forward": counted, "backward": 2 * counted}


def _kernel_flops(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, int]:
    count: Callable[[Tensor], dict[str, int]] | None = getattr(model, "kernel_flops", None)
    return count(batch[0]) if count else {"forward": 0, "backward": 0}


def _attention(query: torch.Size, key: torch.Size, *rest, **options) -> int:
    """Scores and weighted sum: two products of [S, Dh] with [Dh, S] for each of the B H heads;
    query [B, H, S, Dh].
    """
    return 2 * 2 * math.prod(query) * key[-2]


def _attention_backward(
    gradient: torch.Size, query: torch.Size, key: torch.Size, *rest, **options
) -> int:
    """The scores again, and gradients of weights, values, queries and keys: five such products."""
    return 5 * 2 * math.prod(query) * key[-2]


# The same formulas as FlopCounterMode's own, given to it so that all devices and releases count
# alike: before 2.15 PyTorch has none for the CPU's kernel, and counts nothing for it.
_ATTENTION = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}{suffix}"): formula
    for kernel in (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
    )
    for suffix, formula in (("", _attention), ("_backward", _attention_backward))
}


def write(folder: Path, counted: dict[str, dict[str, int]], run: TimedRun) -> list[Path]:
    """Writes both files into `folder`; `counted` are the FLOPs by counter (`count`)."""
    config = ModelConfig(**run["model"])
    training = run["training"]
    shape = (config, training["batch_size"], training["sequence_length"])
    formulas = {
        flop_counts.REFERENCE: flops.training_step(*shape),
        flop_counts.EXECUTED: flops.training_step(*shape, causal=False),
    }
    counts = []
    for counter, phases in (formulas | counted).items():
        forward = phases["forward"]
        backward = phases["backward"]
        row = {"counter": counter, "forward": forward, "backward": backward}
        counts.append(row | {"step": forward + backward})
    parts = {"causal": flops.forward(*shape), "full": flops.forward(*shape, causal=False)}
    schema = files.schema_of(FlopCounts)
    profile: Any = {"schema": schema, "counts": counts, "parts": parts, "run": run}
    result = flop_counts.render_flop_counts(profile)
    result.json("flops_profile", profile)
    return result.write(folder, "flops", ("json", "csv"), "--flops-dir")


def add_work(path: Path, profile: Path) -> None:
    """Adds FLOPs and bytes of a mean step to flops_profile.json, from a profile of the run, unless
    it kept attention only.
    """
    content = step_profile.read(profile)
    if not content["attention_only"]:
        work = [point._asdict() for point in roofline.from_profile(content)]
        files.write_json(path, {**flop_counts.read_counts(path), "work": work})
