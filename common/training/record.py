"""The record of a run: one JSON file and one printed summary, from the same figures."""

import math
import shlex
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

from common import device as devices
from common.analysis.formulas import flops
from common.analysis.formulas import peaks as vendor
from common.analysis.profiles import run_record
from common.data import Dataset
from common.precision import Precision
from common.timing import summarize

import torch
from torch import nn


def mfu(flops_per_second: float, peaks: tuple[float, str] | None) -> dict[str, Any] | None:
    """Model FLOPs utilisation (Chowdhery et al. 2022, arXiv:2204.02311): achieved over peak, and whose peak that is."""
    if peaks is None:
        return None
    peak, source = peaks
    return {"utilization": flops_per_second / peak, "peak_flops_per_second": peak, "peak_source": source}


def peak_flops(device_name: str, precision: Precision, allow_tf32: bool, ceilings: dict | None) -> tuple[float, str] | None:
    """Peak FLOP/s for the run's precision and where it comes from: measured before listed, None if neither."""
    if ceilings:
        return ceilings["flops_per_second"], "measured GEMM"
    listed = vendor.datasheet(device_name)
    key = "tf32" if allow_tf32 and precision.name == "fp32" else precision.name
    return (listed[key], "data sheet") if listed else None


def name(version: ModuleType) -> str:
    """ "v1" of tiny_llama_v1.py."""
    return Path(version.__file__).stem.removeprefix("tiny_llama_")


def settings(version: ModuleType, options: Namespace) -> dict[str, Any]:
    """What a version says of the switches of its own, by its `describe(options)`; empty where it has none."""
    return version.describe(options) if hasattr(version, "describe") else {}


def build(
    version: ModuleType, options: Namespace, model: nn.Module, device: torch.device, precision: Precision, dataset: Dataset,
    outcome, profiler, ceilings: dict[str, Any] | None,
) -> dict[str, Any]:  # fmt: skip
    """Everything that was measured, and everything that is needed to measure it again.

    Steps under the profiler do not count in the step time, unless there are no others.

    Args:
        outcome: the loop's `Outcome`.
        profiler: the run's `Profiler`, or None.
        ceilings: from `common.training.ceilings.measure`, or None.
    """
    profiled = profiler.slow_steps(len(outcome.step_ms)) if profiler else 0
    step_ms, clean = outcome.step_ms, outcome.step_ms[: len(outcome.step_ms) - profiled] or outcome.step_ms
    described = devices.describe(device)
    counted = flops.training_step(options.model, options.batch_size, options.seq_len)
    tokens = options.batch_size * options.seq_len
    record = {
        "schema": run_record.SCHEMA,
        "status": outcome.status,
        "version": name(version),
        "command": shlex.join(sys.argv),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": options.model.model_dump(),
        "training": {
            "preset": options.preset, "batch_size": options.batch_size, "sequence_length": options.seq_len,
            "num_steps": options.num_steps, "warmup_steps": options.warmup_steps,
            "learning_rate": options.learning_rate, "seed": options.seed,
        },
        "settings": settings(version, options),
        "precision": {"compute": precision.name, "tf32": options.allow_tf32},
        "data": dataset.describe(),
        "device": described,
        "environment": devices.environment(),
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
        peaks = peak_flops(described["name"], precision, options.allow_tf32, ceilings)
        record["mfu"] = mfu(record["flops_per_second"], peaks)
    return record


def summary(record: dict[str, Any]) -> str:
    """The same, for a person; one fact a line."""
    training, step, loss = record["training"], record["step_ms"], record["loss"]
    lines = [
        f"{record['version']}: {record['status']}, {len(step['all'])} of {training['num_steps']} steps, "
        f"{record['precision']['compute']}, {record['device']['name']}",
    ]
    if step["all"]:
        floor = record["data"]["entropy_floor"]
        known = f", entropy of the source {floor:.3f}" if floor is not None else ""
        last = loss["all"][-20:]
        share = "MFU not given: this device's peak is not listed (--measure-peak measures it)"
        if record["mfu"]:
            peak, source = record["mfu"]["peak_flops_per_second"] / 1e12, record["mfu"]["peak_source"]
            share = f"MFU {record['mfu']['utilization']:.1%} of {peak:.3g} TFLOP/s ({source})"
        note = "" if len(step["all"]) > step["profiled"] else ", all under the profiler"
        lines += [
            f"  loss         {loss['all'][0]:.3f} -> {sum(last) / len(last):.3f} (mean of the last {len(last)}; "
            f"uniform guess {loss['uniform']:.3f}{known})",
            f"  step time    {step['median']:.2f} ms (p20 {step['p20']:.2f}, p80 {step['p80']:.2f}, {step['count']} steps{note})",
            f"  throughput   {record['tokens_per_second']:,.0f} tokens/s",
            f"  peak memory  {record['memory']['peak_mib']:,.0f} MiB ({record['memory']['kind']})",
            f"  FLOPs        {record['flops_per_step']['total'] / 1e9:.2f} GFLOP a step, "
            f"{record['flops_per_second'] / 1e12:.3f} TFLOP/s; {share}",
        ]
    return "\n".join(lines)


def phases(record: dict[str, Any]) -> str:
    """Times of the phases, for a person; one a line."""
    return "\n".join(
        f"  {phase:<12} {figures['median']:.2f} ms (p20 {figures['p20']:.2f}, p80 {figures['p80']:.2f})"
        for phase, figures in record["phases_ms"].items()
    )
