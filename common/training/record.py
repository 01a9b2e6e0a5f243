"""The record of a run: one JSON file and one printed summary, from the same figures."""

import math
import shlex
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from common import device as devices
from common import ranks
from common.analysis.formulas import flops
from common.analysis.output import tables
from common.analysis.profiles import run_record
from common.config import ModelConfig
from common.data import Dataset
from common.options import Options, RunOptions
from common.precision import Precision
from common.timing import summarize

import torch
from torch import nn


def header(
    schema: str, device: torch.device | None, precision: str | None = None, tf32: bool | None = None,
    model: ModelConfig | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The keys with which the JSON file of every measurement begins.

    Args:
        device: None if only another process knows it: `device` and `environment` are then None.
        precision: such as "fp32"; it and the model have no key if they are None.
        tf32: has no key if it is None.
    """
    result = {
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
    return result


def name(version: ModuleType) -> str:
    """ "v1" of tiny_llama_v1.py."""
    return Path(str(version.__file__)).stem.removeprefix("tiny_llama_")


def settings(model: nn.Module, options: Options) -> dict[str, bool | str]:
    """How the switches of a version stand, by the model that was made, and whether its step was captured."""
    switches = {name.replace("-", "_"): value for name, value in getattr(model, "switches", {}).items()}
    return switches | ({"capture_step": True} if options.capture_step else {})


def build(
    name: str, options: RunOptions, model: nn.Module, device: torch.device, precision: Precision, dataset: Dataset,
    outcome, profiler, ceilings: dict[str, Any] | None, first_step: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Everything that was measured, and everything that is needed to measure it again.

    Steps under the profiler do not count in the step time, unless there are no others. Tokens per second are those of all
    processes together; FLOPs, MFU, memory and step times are those of one GPU, the first process's.

    Args:
        outcome: the loop's `Outcome`.
        profiler: the run's `Profiler`, or None.
        ceilings: from `common.training.ceilings.measure`, or None.
        first_step: after those of a checkpoint, if the run goes on from one.
    """
    profiled = profiler.slow_steps(len(outcome.step_ms)) if profiler else 0
    step_ms, clean = outcome.step_ms, outcome.step_ms[: len(outcome.step_ms) - profiled] or outcome.step_ms
    counted = flops.training_step(options.model, options.batch_size, options.seq_len)
    world_size = ranks.here().world_size
    tokens = world_size * options.batch_size * options.seq_len
    record = header(run_record.SCHEMA, device, precision.name, options.allow_tf32, options.model) | {
        "status": outcome.status,
        "version": name,
        "training": {
            "preset": options.preset, "batch_size": options.batch_size, "sequence_length": options.seq_len,
            "num_steps": options.num_steps, "first_step": first_step, "warmup_steps": options.warmup_steps,
            "learning_rate": options.learning_rate, "seed": options.seed,
            "world_size": world_size, "parallel": options.parallel,
        },
        "settings": settings(model, options),
        "data": dataset.describe(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops_per_step": counted,
        "memory": outcome.memory,
        "ceilings": ceilings,
        "loss": {"uniform": math.log(options.model.vocab_size), "all": outcome.losses},
        "step_ms": {"all": step_ms, "profiled": profiled},
    }  # fmt: skip
    if step_ms:
        record["step_ms"] |= summarize(clean)
        seconds = record["step_ms"]["median"] / 1e3
        record["tokens_per_second"] = tokens / seconds
        record["flops_per_second"] = counted["total"] / seconds
        peak = run_record.peak_flops(record)
        share = peak and {"utilization": record["flops_per_second"] / peak, "peak_flops_per_second": peak}
        record["mfu"] = share and share | {"peak_source": "data sheet"}
    return record


def summary(record: dict[str, Any]) -> str:
    """The record as text for a terminal; one fact a line."""
    training, step, loss = record["training"], record["step_ms"], record["loss"]
    before = training["first_step"] - 1
    lines = [
        f"{record['version']}: {record['status']}, {len(step['all'])} of {training['num_steps'] - before} steps"
        f"{f' after step {before}' if before else ''}, "
        f"{record['precision']['compute']}, {record['device']['name']}, torch {record['environment']['torch']}",
    ]
    on = [
        name.replace("_", "-") for name, value in record["settings"].items() if value is True or name == "torch_compile" and value
    ]
    lines += [f"  switches on  {', '.join(on) or 'none'}"] if record["settings"] else []
    if step["all"]:
        floor = record["data"]["entropy_floor"]
        known = f", entropy of the source {floor:.3f}" if floor is not None else ""
        last = loss["all"][-20:]
        mfu, of_gemm = run_record.mfu(record), run_record.of_measured_gemm(record)
        share = "MFU not given: this device's peak is not listed"
        if mfu is not None:
            share = f"MFU {mfu:.1f}% of {run_record.peak_flops(record) / 1e12:.3g} TFLOP/s (data sheet)"
        if of_gemm is not None:
            share += f"; {of_gemm:.1f}% of measured GEMM ({record['ceilings']['flops_per_second'] / 1e12:.3g} TFLOP/s)"
        elif mfu is None:
            share += " (--measure-peak compares with a measured GEMM)"
        processes = training["world_size"]
        together = f" of {processes} processes ({training['parallel']}); what follows is of one" if processes > 1 else ""
        note = "" if len(step["all"]) > step["profiled"] else ", all under the profiler"
        lines += [
            f"  loss         {loss['all'][0]:.3f} -> {sum(last) / len(last):.3f} (mean of the last {len(last)}; "
            f"uniform guess {loss['uniform']:.3f}{known})",
            f"  step time    {tables.format_time(step['median'])} (p20 {tables.format_time(step['p20'])}, "
            f"p80 {tables.format_time(step['p80'])}, {step['count']} steps{note})",
            *(f"  note         {note}" for note in run_record.noise({"this run": step})),
            f"  throughput   {record['tokens_per_second']:,.0f} tokens/s{together}",
            f"  peak memory  {record['memory']['peak_mib']:,.0f} MiB ({record['memory']['kind']}"
            + (f"; its pools held {record['memory']['reserved_mib']:,.0f} MiB)" if "reserved_mib" in record["memory"] else ")"),
            f"  FLOPs        {record['flops_per_step']['total'] / 1e9:.2f} GFLOP a step, "
            f"{record['flops_per_second'] / 1e12:.3f} TFLOP/s; {share}",
        ]
    return "\n".join(lines)


def phases(record: dict[str, Any]) -> str:
    """Times of the phases as text for a terminal; one a line."""
    return "\n".join(
        f"  {phase:<12} {figures['median']:.2f} ms (p20 {figures['p20']:.2f}, p80 {figures['p80']:.2f})"
        for phase, figures in record["phases_ms"].items()
    )
