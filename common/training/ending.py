"""The end of a run: what flags ask for after the last step, and the next command.

Training calls reports here and in `common.training.run`, and nowhere else.
"""

import math
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import ROOT, ranks
from common.data import Batches, Dataset
from common.options import RunOptions
from common.precision import Precision
from common.timing import Clock, phase_times, summarize
from common.training import preparation
from common.training.preparation import Prepared, Step
from common.training.profiler import Profiler
from tracepage.errors import RunError
from tracepage.records import run_record, step_profile
from tracepage.records.run_record import RunRecord, TimedRun

import torch


def evaluate(
    model: Any, batches: Batches, precision: Precision, options: RunOptions
) -> dict[str, float]:
    """The loss on the held-out batches, a mean over all processes. RunError: it is not finite."""
    losses = torch.empty(options.eval_steps, device=precision.device)
    for i in range(len(losses)):
        with torch.no_grad(), precision.autocast():
            losses[i] = model.loss(*batches[i])
    loss = ranks.mean(losses.double().mean())
    perplexity = loss.exp().item()
    if not math.isfinite(perplexity):
        raise RunError(f"the held-out loss is {loss:.3g}: lower --learning-rate", shared=True)
    sequences = ranks.here().world_size * options.batch_size * len(losses)
    return {"loss": loss.item(), "perplexity": perplexity, "sequences": sequences}


def fp8_saturation(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """In how many steps a tensor in FP8 was clipped: any, an x, a W, a gradient of a product. The
    optimizer's state counts them.
    """
    state = next(iter(preparation.states(optimizer).values()))
    inputs, matrices, gradients, steps = map(int, state["fp8_saturated"].tolist())
    return {"saturated_steps": steps, "x": inputs, "weight": matrices, "gradient": gradients}


def save_model(folder: Path, prepared: Prepared, options: RunOptions, dataset: Dataset) -> None:
    """Writes the checkpoint of --save-model."""
    from common.training import checkpoint

    state = checkpoint.whole_model(prepared)
    if ranks.here().main_process:
        checkpoint.save(folder, state, options.model, dataset)
    print(f"  checkpoint   {folder}")


def time_phases(step: Step, batches: Batches, options: RunOptions, device: torch.device) -> dict:
    """Summaries of the milliseconds of each phase."""
    times = phase_times(lambda i: step(batches[i]), device, options.phase_clock or Clock)
    return {phase: summarize(values) for phase, values in times.items()}


def write_flops(
    folder: Path, counted: dict[str, dict[str, int]], record: RunRecord | TimedRun
) -> list[Path]:
    """The files of --enable-deepspeed-flops, flops_profile.json first; nothing without a step."""
    from common.training import flop_counters

    if not run_record.finished(record):
        return []
    paths = flop_counters.write(folder, counted, record)
    for path in paths:
        print(f"  flops        {path}")
    return paths


def write_profile(
    profiler: Profiler, record: RunRecord | TimedRun, options: RunOptions, flops: Sequence[Path]
) -> list[Path]:
    """The files of the profiler, the profile first; `flops` are those of `write_flops`.

    pandas and matplotlib take a second and 60 MiB, which belong to no run that is not profiled.
    """
    from common.training import flop_counters, profile_files
    from tracepage.views import profile_summary

    content: dict[str, Any] = {
        "run": record,
        "trace": profiler.trace_path.name,
        "attention_only": options.profile_attention_only,
    }
    if options.profile_with_flops:
        content["operator_flops"] = profiler.operator_flops()
    profiler.export()
    if not ranks.here().main_process:
        return []
    paths = profile_files.write(profiler.profile_path, content)
    if options.profile_operators:
        profile = step_profile.read(profiler.profile_path)
        print(profile_summary.operator_report(profile, options.sort_by).terminal())
    if flops:
        flop_counters.add_work(flops[0], profiler.profile_path)
    for path in paths:
        kind = "page" if path.suffix == ".html" else "profile"
        print(f"  {kind:<12} {path}")
    return paths


def check_files(metrics: Path, profiles: Sequence[Path]) -> None:
    """Reads back what the run wrote, and prints a line."""
    line = f"setup ok: {run_record.read(metrics)['parameters']:,} parameters get gradients, "
    line += f"{metrics} can be read"
    if profiles:
        operators = step_profile.read(profiles[0])["operators"]
        line += f", {profiles[0]} holds {len(operators):,} operators"
    print(line)


def print_next_command(options: RunOptions, profiles: Sequence[Path]) -> None:
    """Prints a command for this folder, after a run of a version's script that the same command
    would repeat, and that keeps no model: the same run profiled; then its page beside the newest
    other profile, if there is one.
    """
    versions = ROOT.glob("version*_*/tiny_llama_v*.py")
    repeated = Path(sys.argv[0]).resolve() in versions and not ranks.here().launched
    if not repeated or options.checkpoint_dir or options.save_model:
        return
    command = [*sys.argv, "--enable-pytorch-profiler"]
    if profiles:
        paths = ROOT.glob(f"version*_*/{options.profile_dir.name}/profile_*.json")
        others = [path for path in paths if path.name != profiles[0].name]
        if not others:
            return
        newest = max(others, key=lambda path: path.name)
        command = [os.path.relpath(path) for path in (ROOT / "page.py", newest, profiles[0])]
    print(f"next: python {shlex.join(command)}")
