"""Benchmarks models at equal shapes: versions and external baselines, each in a new process, in
turn.

A cell is a model at a batch size and a sequence length. Its process builds the model with random
weights, checks that every parameter gets a gradient, takes a few training steps that do not count
(they compile), and then times steps on one batch. The repeats of a shape take turns (a, b, a, b),
so that a slow spell of the machine affects all models. Peak memory is the maximum over the timed
steps: of PyTorch's allocator on a GPU, without its reserve and the CUDA context, of the whole
process on a CPU.

Accuracy is measured at the smallest shape only: the errors of logits and gradients against the
baseline in float64 (`studies.accuracy`), in the benchmark's precision.
"""

import importlib.metadata
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from common import cli, nvml, weights
from common import device as devices
from common.options import Options
from common.precision import SHORT, Precision, amp_dtype
from common.timing import benchmark, summarize
from common.training import capture, preparation, record, study_step
from studies import accuracy, job_runner, version_files
from studies.peers import known_models
from studies.peers.known_models import Model
from tracepage import files
from tracepage.errors import UsageError
from tracepage.records.fields import Timed
from tracepage.records.study_files import METRICS, Benchmark
from tracepage.terminal import format_time, progress

import torch

WARMUP = 3  # training steps before the timed ones
FAILED = ("failed", "timed out")  # otherwise than by memory
Job = tuple[dict[str, Any], Callable[[], Any]]  # a cell, and what a process measures of it
# the counter is updated every 20 to 100 ms, so they are at most 100 ms too many or too few: 0.5%
ENERGY_SECONDS = 20


def plan(arguments: Namespace, known: dict[str, Model]) -> tuple[list[Model], list[Options]]:
    """The models, and the options of each shape, smallest first. UsageError: a value is wrong, or a
    model cannot run here.
    """
    for flag, given, valid in (
        ("--models", arguments.models, known),
        ("--metrics", arguments.metrics, METRICS),
    ):
        if unknown := [name for name in given if name not in valid]:
            raise UsageError(f"{flag}: there is no {unknown[0]!r}; there are {', '.join(valid)}")
    models = [known[name] for name in dict.fromkeys(arguments.models)]
    device = devices.select(arguments.device)
    if "energy" in arguments.metrics and devices.describe(device)["kind"] != "cuda":
        raise UsageError("--metrics energy: only an NVIDIA GPU counts its energy")
    for model in models:
        if model.captured:
            capture.check_supported(device)
        if not model.path:
            model.load().check(device, amp_dtype(arguments))
        elif model.name.endswith(known_models.FP8) and not devices.is_gpu(device):
            raise UsageError(f"{model.name}: products in FP8 need a GPU")
    shapes = [
        dict(batch_size=b, seq_len=s)
        for s in sorted({*arguments.seq_lengths})
        for b in sorted({*arguments.batch_sizes})
    ]
    return models, [version_files.resolve(Namespace(**vars(arguments) | shape)) for shape in shapes]


def measure(
    arguments: Namespace, models: list[Model], shapes: list[Options], baseline: Model, path: Path
) -> int:
    """Measures what `plan` returned, and writes benchmark.json (`path`) after each process; the
    exit code is `_run`'s.
    """
    smallest = shapes[0]
    packages = {package for model in models if not model.path for package in model.load().packages}
    measured = record.header(
        files.schema_of(Benchmark), None, SHORT[amp_dtype(smallest) or torch.float32]
    ) | {
        "status": "interrupted",  # until the end is reached
        "packages": {module: _version(module) for module in sorted(packages)},
        # which grows with the shape
        "model": smallest.model.model_dump(exclude={"max_sequence_length"}),
        "seed": smallest.seed,
        "models": [model.name for model in models],
        "metrics": arguments.metrics,
        "batch_sizes": sorted({*arguments.batch_sizes}),
        "sequence_lengths": sorted({*arguments.seq_lengths}),
        "steps": arguments.num_steps,
        "repeats": arguments.repeats,
        "cells": [],
        "accuracy": [],
    }

    jobs: list[Job] = []
    energy = "energy" in arguments.metrics
    for model in models if "accuracy" in arguments.metrics else []:
        entry = _blank(model, smallest)
        measured["accuracy"].append(entry)
        jobs.append((entry, partial(errors, model, baseline, smallest)))
    for shape in shapes if arguments.metrics != ["accuracy"] else []:
        row = []
        for model in models:
            cell = _blank(model, shape) | {"runs": []}
            measured["cells"].append(cell)
            row.append((cell, partial(speed, model, shape, arguments.num_steps, energy)))
        jobs += row * arguments.repeats
    return _run(
        jobs,
        measured,
        path,
        lambda work: job_runner.in_a_process(work, smallest.device, arguments.timeout),
    )


def _run(
    jobs: list[Job],
    measured: dict[str, Any],
    path: Path,
    in_a_process: Callable[[Callable], dict[str, Any]],
) -> int:
    """Runs the jobs in turn; after each it prints a line and writes `measured`, which holds the
    cells.

    A cell that has failed keeps its status and its reason, and is not repeated. The others go on.
    After a signal no job starts. Returns the exit code: 0, 1 if a cell failed otherwise than by
    memory, 128 + n if stopped by signal n.
    """
    with cli.signals_deferred() as received:
        for number, (cell, work) in enumerate(jobs, 1):
            if received or cell["status"] not in ("ok", "not run"):
                continue
            with progress(place(cell)):
                outcome = in_a_process(work)
            if received and outcome["status"] != "ok":  # Ctrl-C reaches the job too
                continue
            cell |= {key: outcome[key] for key in ("status", "reason")}
            measured |= {key: outcome[key] for key in ("device", "environment") if key in outcome}
            if outcome["status"] == "ok" and "runs" in cell:
                cell["runs"].append(outcome["found"])
            elif outcome["status"] == "ok":
                cell |= outcome["found"]
            files.write_measurement(path, measured, "--output-dir")
            print(f"{number:4d} of {len(jobs)}  {place(cell):<28} {_said(cell)}", flush=True)
        measured["status"] = "interrupted" if received else "completed"
        files.write_measurement(path, measured, "--output-dir")
    return 128 + received[0] if received else int(any(cell["status"] in FAILED for cell, _ in jobs))


def _version(module: str) -> str:
    """That of the package that owns a module: `triton` is of pytorch-triton-rocm on an AMD GPU."""
    return importlib.metadata.version(importlib.metadata.packages_distributions()[module][0])


def _blank(model: Model, shape: Options) -> dict[str, Any]:
    return {
        "model": model.name,
        "batch_size": shape.batch_size,
        "sequence_length": shape.seq_len,
        "status": "not run",
        "reason": None,
    }


def place(entry: Mapping[str, Any]) -> str:
    """A cell by name, such as "v1, B 8, S 128"."""
    return f"{entry['model']}, B {entry['batch_size']}, S {entry['sequence_length']}"


def reason(cell: Mapping[str, Any]) -> str:
    """Why a cell was not measured, in one line."""
    return f"{cell['status']}: {cell['reason']}" if cell["reason"] else cell["status"]


def _said(cell: Mapping[str, Any]) -> str:
    """The outcome of a cell's last process, for the terminal."""
    if cell["status"] != "ok":
        return reason(cell)
    if "runs" not in cell:
        return f"largest gradient error {cell['gradient_error']:.2g}"
    run = cell["runs"][-1]
    return f"{format_time(run['step_ms']['median']):>9} a step {run['peak_mib']:10,.0f} MiB"


def built(model: Model, options: Options) -> tuple[preparation.Prepared, Precision]:
    """A new model's training step, checked, and its precision.

    Versions ask PyTorch for deterministic algorithms. External baselines run without them, as their
    users run them: PyTorch then picks faster kernels, such as cuDNN's backward pass of attention.
    """
    version = model.load()
    device = devices.select(options.device)
    capture_step = model.captured or None  # None: as the model has it
    settings = replace(
        version_files.switched(version, options, *model.flags), capture_step=capture_step
    )
    precision = Precision(device, amp_dtype(options))
    devices.configure(device, options.seed)
    if not model.path:
        torch.use_deterministic_algorithms(False)
    # PyTorch draws weights of its own first, of which ours take the place: many seconds of a CPU at
    # large
    with device:
        made = version.make_model(settings)
    batch = version_files.random_batch(options, device)
    return study_step.prepare_for_study(version, settings, precision, batch, model=made), precision


def speed(model: Model, options: Options, count: int, energy: bool = False) -> Timed:
    """Times of `count` steps, peak memory, and joules if asked for; the weights are random, and not
    the seed's.
    """
    with weights.drawn_on(devices.select(options.device)):
        prepared, precision = built(model, options)
    batch = version_files.random_batch(options, precision.device)
    for _ in range(WARMUP):
        prepared.step(batch)
    devices.synchronize(precision.device)
    devices.reset_peak_memory(precision.device)
    times = benchmark(lambda: prepared.step(batch), precision.device, warmup=1, iterations=count)
    found = {"step_ms": summarize(times)} | devices.peak_memory(
        precision.device, prepared.graph_peak_bytes
    )
    if reason := getattr(prepared.model, "switches", {}).get("no-kernels"):
        found["no_kernels"] = reason
    if energy:
        found["joules"] = joules_a_step(lambda: prepared.step(batch), precision.device)
    return cast(Timed, found)


def joules_a_step(step: Callable[[], object], device: torch.device) -> float:
    """What the GPU draws for a step, its idle power included, over ENERGY_SECONDS of steps."""
    steps = 0
    before = nvml.joules()
    end = time.perf_counter() + ENERGY_SECONDS
    while time.perf_counter() < end:
        for _ in range(10):
            step()
        devices.synchronize(device)
        steps += 10
    return (nvml.joules() - before) / steps


def errors(model: Model, baseline: Model, options: Options) -> dict[str, Any]:
    """The errors against float64, as in `study_files.Accuracy`."""
    found = accuracy.errors_against_float64(baseline.load(), model.load(), options, model.flags)
    worst = max((name for name in found if name.startswith("gradient of ")), key=found.__getitem__)
    gradient = worst.removeprefix("gradient of ")
    return {"logits_error": found["logits"], "gradient_error": found[worst], "gradient": gradient}
