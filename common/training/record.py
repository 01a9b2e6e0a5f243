"""The record of a run: one JSON file and one printed summary, from the same numbers."""

import math
import shlex
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from common import device as devices
from common import ranks, schedule
from common.analysis.formulas import flops
from common.analysis.output import run_facts, tables
from common.config import ModelConfig
from common.data import Dataset
from common.options import Options, RunOptions
from common.precision import Precision
from common.records import run_record
from common.records.fields import Ceilings, Summary
from common.records.run_record import RunRecord, TimedRun
from common.terminal import wrapped
from common.timing import summarize

import torch
from torch import nn


def header(
    schema: str, device: torch.device | None, precision: str | None = None, tf32: bool | None = None,
    model: ModelConfig | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The keys with which the JSON file of every measurement begins; a precision, TF32 or model that is None has none.

    Where only another process knows the device, `device` and `environment` are None.
    """
    result: dict[str, Any] = {
        "schema": schema, "command": shlex.join(sys.argv), "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": device and devices.describe(device), "environment": device and devices.environment(),
    }  # fmt: skip
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
    outcome, profiler, ceilings: Ceilings | None, first_step: int = 1,
) -> RunRecord | TimedRun:  # fmt: skip
    """Everything that was measured, of an `Outcome` and maybe a `Profiler`, and everything that is needed to measure it again.

    Steps under the profiler do not count in the step time, unless there are no others. Tokens per second are those of all
    processes together; FLOPs, MFU, memory and step times are those of one GPU, the first process's. `first_step` follows those
    of a checkpoint, if the run goes on from one.
    """
    profiled = profiler.slow_steps(len(outcome.step_ms)) if profiler else 0
    counted = flops.training_step(options.model, options.batch_size, options.seq_len)
    world_size = ranks.here().world_size
    first = header(run_record.SCHEMA, device, precision.name, options.allow_tf32, options.model)
    run = cast(run_record.Run, first | {
        "status": outcome.status, "version": name,
        "training": {
            "preset": options.preset, "batch_size": options.batch_size, "sequence_length": options.seq_len,
            "num_steps": options.num_steps, "first_step": first_step, "warmup_steps": options.warmup_steps,
            "learning_rate": options.learning_rate, "lr_schedule": schedule.described(options), "seed": options.seed,
            "world_size": world_size, "parallel": options.parallel,
            "optimizer_communicates": getattr(model, "optimizer_communicates", False),
        },
        "settings": settings(model, options), "data": dataset.describe(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops_per_step": counted, "ceilings": ceilings,
    })  # fmt: skip
    step_ms = outcome.step_ms
    loss: run_record.Loss = {"uniform": math.log(options.model.vocab_size), "all": outcome.losses}
    if outcome.own_from is not None and (own := len(outcome.losses) - outcome.own_from):
        loss["own"] = own
    if not step_ms:
        none: run_record.Steps = {"all": [], "profiled": profiled}
        return {**run, "memory": outcome.memory, "loss": loss, "step_ms": none}
    times = cast(Summary, summarize(step_ms[: len(step_ms) - profiled] or step_ms))
    seconds = times["median"] / 1e3
    rate, peak = counted["total"] / seconds, run_facts.peak_flops(run)
    return {
        **run,
        "memory": outcome.memory,
        "loss": cast(run_record.TimedLoss, loss),
        "step_ms": {"all": step_ms, "profiled": profiled, **times},
        "tokens_per_second": world_size * options.batch_size * options.seq_len / seconds,
        "flops_per_second": rate,
        "mfu": {"utilization": rate / peak, "peak_flops_per_second": peak, "peak_source": "data sheet"} if peak else None,
    }


def summary(record: RunRecord | TimedRun) -> str:
    """The record as text for a terminal; one fact a line."""
    training, settings, before = record["training"], record.get("settings", {}), record["training"].get("first_step", 1) - 1
    lines = [
        f"{record['version']}: {record['status']}, {len(record['step_ms']['all'])} of {training['num_steps'] - before} steps"
        f"{f' after step {before}' if before else ''}, "
        f"{record['precision']['compute']}, {record['device']['name']}, torch {record['environment']['torch']}",
    ]
    on = [name.replace("_", "-") for name, value in settings.items() if value is True or name == "torch_compile" and value]
    lines += [f"  switches on  {', '.join(on) or 'none'}"] if settings else []
    if run_record.finished(record):
        step, loss, memory, floor = record["step_ms"], record["loss"], record["memory"], record["data"]["entropy_floor"]
        known = f", entropy of the source {floor:.3f}" if floor is not None else ""
        last = loss["all"][-20:]
        mfu, of_gemm = run_facts.mfu(record), run_facts.of_measured_gemm(record)
        share = "not given, as this device's peak is not listed"
        if mfu is not None and (peak := run_facts.peak_flops(record)):
            share = f"{mfu:.1f}% of {tables.format_rate(peak)} (data sheet)"
            if settings.get("fp8") and (fp8 := run_facts.peak_flops(record, "fp8")):
                share += f"; {mfu * peak / fp8:.1f}% of {tables.format_rate(fp8)} in FP8"
        if of_gemm is not None and (ceilings := record["ceilings"]):
            share += f"; {of_gemm:.1f}% of measured GEMM ({tables.format_rate(ceilings['flops_per_second'])})"
        elif mfu is None:
            share += "; --measure-peak compares with a GEMM"
        processes = run_record.processes(record)
        together = f" of {processes} processes ({training.get('parallel')}); what follows is of one" if processes > 1 else ""
        note = "" if len(step["all"]) > step["profiled"] else ", all under the profiler"
        own = f", {loss['own']} of them rank 0's own" if "own" in loss else ""
        noise, (load, cores) = run_facts.noise({"this run": step}), devices.load()
        noise += [f"In the last minute {load:.1f} processes, this run's included, shared {cores} cores."] * bool(noise)
        lines += [
            f"  loss         {loss['all'][0]:.3f} -> {sum(last) / len(last):.3f} (mean of the last {len(last)}{own}; "
            f"uniform guess {loss['uniform']:.3f}{known})",
            f"  step time    {tables.format_time(step['median'])} (p20 {tables.format_time(step['p20'])}, "
            f"p80 {tables.format_time(step['p80'])}, {step['count']} steps{note})",
            *(f"  note         {note}" for note in noise),
            f"  throughput   {record['tokens_per_second']:,.0f} tokens/s{together}",
            f"  peak memory  {memory['peak_mib']:,.0f} MiB ({memory['kind']}"
            + (f"; its pools held {memory['reserved_mib']:,.0f} MiB)" if "reserved_mib" in memory else ")"),
            f"  FLOPs        {record['flops_per_step']['total'] / 1e9:.2f} GFLOP a step, "
            f"{tables.format_rate(record['flops_per_second'])}",
            f"  MFU          {share}",
        ]
    return "\n".join(wrapped(line, 15) for line in lines)


def phases(record: run_record.Run) -> str:
    """Times of the phases as text for a terminal; one a line."""
    return "\n".join(
        f"  {phase:<12} {figures['median']:.2f} ms (p20 {figures['p20']:.2f}, p80 {figures['p80']:.2f})"
        for phase, figures in record.get("phases_ms", {}).items()
    )
