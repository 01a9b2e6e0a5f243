"""The record of a run, and the keys with which the file of every measurement begins."""

import importlib.util
import math
import shlex
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from common import device as devices
from common import ranks, schedule
from common.config import ModelConfig
from common.data import Dataset
from common.options import Options, RunOptions
from common.precision import Precision
from common.timing import summarize
from tracepage.cost import flops
from tracepage.records import run_record
from tracepage.records.fields import Ceilings
from tracepage.records.run_record import RunRecord, TimedRun
from tracepage.show import run_facts

import torch
from torch import nn

OPTIONAL = {"triton": "needed from Version 3 on", "deepspeed": "its FLOP count is left out"}


def header(
    schema: str,
    device: torch.device | None,
    precision: str | None = None,
    tf32: bool | None = None,
    model: ModelConfig | None = None,
    deterministic: bool | None = None,
) -> dict[str, Any]:
    """The keys with which the JSON file of every measurement begins; a precision, TF32, model or
    `deterministic` that is None has none.

    Where only another process knows the device, `device` and `environment` are None.
    """
    result: dict[str, Any] = {
        "schema": schema,
        "command": shlex.join(sys.argv),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": device and devices.describe(device),
        "environment": device and devices.environment(),
    }
    if model:
        result["model"] = model.model_dump()
    if precision:
        result["precision"] = {"compute": precision} | ({} if tf32 is None else {"tf32": tf32})
    if deterministic is not None:
        result["deterministic"] = deterministic
    return result


def name(version: ModuleType) -> str:
    """ "v1" of tiny_llama_v1.py."""
    return Path(str(version.__file__)).stem.removeprefix("tiny_llama_")


def settings(model: nn.Module, options: Options) -> dict[str, bool | str]:
    """How the switches stand, by the model, and whether its step was captured."""
    switches = getattr(model, "switches", {})
    result = {name.replace("-", "_"): value for name, value in switches.items()}
    if options.capture_step:
        result["capture_step"] = True
    if options.checkpoint_activations != "none":
        result["checkpoint_activations"] = options.checkpoint_activations
    return result


def build(
    options: RunOptions,
    precision: Precision,
    dataset: Dataset,
    model: nn.Module,
    *,
    status: str,
    losses: list[float],
    own_losses: int,
    step_ms: list[float],
    profiled: int,
    first_step: int,
    memory: dict[str, Any],
    ceilings: Ceilings | None,
) -> RunRecord | TimedRun:
    """Everything that was measured of a run, and everything that is needed to measure it again.

    Steps under the profiler do not count in the step time, unless there are no others. Tokens per
    second are those of all processes together; FLOPs, MFU, memory and step times are those of one
    GPU, the first process's.

    Args:
        status: completed, interrupted, or failed with the reason.
        losses: nats per token, from before each finished step.
        own_losses: how many of the last ones are this process's alone.
        step_ms: milliseconds of each finished step.
        profiled: how many of the last ones ran under the profiler.
        first_step: its number, from 1.
        memory: of `device.peak_memory`.
        ceilings: measured ones.
    """
    counted = flops.training_step(options.model, options.batch_size, options.seq_len)
    world_size = ranks.here().world_size
    first = header(
        run_record.SCHEMA,
        precision.device,
        precision.name,
        options.allow_tf32,
        options.model,
        options.deterministic,
    )
    run: Any = first | {
        "status": status,
        "version": options.name,
        "training": {
            "preset": options.preset,
            "batch_size": options.batch_size,
            "sequence_length": options.seq_len,
            "num_steps": options.num_steps,
            "first_step": first_step,
            "warmup_steps": options.warmup_steps,
            "learning_rate": options.learning_rate,
            "lr_schedule": schedule.described(options),
            "seed": options.seed,
            "world_size": world_size,
            "parallel": options.parallel,
        },
        "settings": settings(model, options),
        "data": dataset.describe(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops_per_step": counted,
        "ceilings": ceilings,
        "memory": memory,
        "loss": {"uniform": math.log(options.model.vocab_size), "all": losses},
        "step_ms": {"all": step_ms, "profiled": profiled},
    }
    if own_losses:
        run["loss"]["own"] = own_losses
    if not step_ms:
        return run
    times = summarize(step_ms[: len(step_ms) - profiled] or step_ms)
    run["step_ms"] |= times
    seconds = times["median"] / 1e3
    peak = run_facts.peak_flops(run)
    rate = counted["total"] / seconds
    samples = world_size * options.batch_size / seconds
    run |= {
        "tokens_per_second": samples * options.seq_len,
        "samples_per_second": samples,
        "flops_per_second": rate,
        "mfu": None,
    }
    if peak:
        run["mfu"] = {
            "utilization": rate / peak,
            "peak_flops_per_second": peak,
            "peak_source": "data sheet",
        }
    return run


def print_setup(device: torch.device, dataset: Dataset) -> None:
    """Prints one line a fact."""
    versions = devices.environment()
    described = devices.describe(device)
    runtime = next(
        (f"{name} {versions[name]}" for name in ("cuda", "hip") if versions[name]), "CPU build"
    )
    facts = {
        "python": f"{versions['python']}, {versions['platform']}",
        "torch": f"{versions['torch']} ({runtime})",
        **{
            name: "yes" if importlib.util.find_spec(name) else f"not installed: {lost}"
            for name, lost in OPTIONAL.items()
        },
        "device": f"{described['name']} ({described['kind']})",
        "data": f"{dataset.name}, {len(dataset.tokens):,} tokens, sha256 {dataset.sha256[:12]}",
    }
    print("setup", *(f"  {name:<12} {fact}" for name, fact in facts.items()), sep="\n")
