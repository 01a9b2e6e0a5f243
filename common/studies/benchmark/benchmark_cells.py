"""Benchmarks models at equal shapes: versions and external baselines, each in a new process, in turn.

A cell is a model at a batch size and a sequence length. Its process builds the model with random weights, checks that every
parameter gets a gradient, takes a few training steps that do not count (they compile), and then times steps on one batch. The
repeats of a shape take turns (a, b, a, b), so that a slow spell of the machine affects all models. On a machine with several GPUs
`--gpus N` keeps N processes running, each on a GPU of its own. Peak memory is the maximum over the timed steps: of PyTorch's
allocator on a GPU, without its reserve and the CUDA context, and of the whole process on a CPU.

Accuracy is measured at the smallest shape only: the loss after N steps from the same weights on the same batches of the synthetic
source, and the errors of logits and gradients against the baseline in float64 (`studies.accuracy`), in the benchmark's precision.
"""

import importlib.metadata
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import cli, signals
from common import device as devices
from common.errors import UsageError
from common.files import schema_of
from common.precision import SHORT
from common.records.study_files import METRICS, Benchmark, BenchmarkCell, Entry
from common.studies import job_runner, known_models
from common.studies.benchmark import benchmark_process
from common.studies.benchmark.benchmark_process import BenchmarkOptions
from common.studies.benchmark.benchmark_results import place
from common.studies.job_runner import Job
from common.studies.known_models import Model
from common.training import capture, record

import torch


def plan(options: Namespace, known: dict[str, Model]) -> tuple[list[Model], list[BenchmarkOptions]]:
    """The models, and the options of each shape, smallest first. UsageError: a value is wrong, or a model cannot run here."""
    for name, valid in {"models": known, "metrics": METRICS, "batch_sizes": (), "seq_lengths": ()}.items():
        cli.check_list("--" + name.replace("_", "-"), getattr(options, name), valid)
    models, device = [known[name] for name in options.models], devices.select(options.device)
    for model in models:
        if model.captured:
            capture.check_supported(device)
        if not model.path:
            model.load().check(device, cli.amp_dtype(options))
        elif model.name.endswith(known_models.FP8) and not devices.is_gpu(device):
            raise UsageError(f"{model.name}: products in FP8 need a GPU")
    shapes = [dict(batch_size=b, seq_len=s) for s in sorted(options.seq_lengths) for b in sorted(options.batch_sizes)]
    return models, [cli.resolve(BenchmarkOptions, Namespace(**vars(options) | shape)) for shape in shapes]


def measure(models: list[Model], shapes: list[BenchmarkOptions], baseline: Model, path: Path) -> int:
    """Measures what `plan` returned, and writes benchmark.json (`path`) after each process; the exit code is `run_all`'s."""
    options, packages = shapes[0], {package for model in models if not model.path for package in model.load().packages}
    measured = record.header(schema_of(Benchmark), None, SHORT[cli.amp_dtype(options) or torch.float32]) | {
        "status": "interrupted",  # until the end is reached
        "packages": {module: _version(module) for module in sorted(packages)},
        "model": options.model.model_dump(exclude={"max_sequence_length"}),  # which grows with the shape
        "seed": options.seed, "models": [model.name for model in models], "metrics": options.metrics,
        "batch_sizes": sorted(options.batch_sizes), "sequence_lengths": sorted(options.seq_lengths),
        "steps": options.num_steps, "repeats": options.repeats, "accuracy_steps": options.accuracy_steps,
        "cells": [], "accuracy": [],
    }  # fmt: skip
    jobs: list[Job] = []
    if "accuracy" in options.metrics:
        jobs = [_job(_blank(model, options), options, benchmark_process.errors, model, baseline, options) for model in models]
        measured["accuracy"] = [job.cell for job in jobs]
    for shape in shapes if options.metrics != ["accuracy"] else []:
        row = [
            _job(BenchmarkCell(**_blank(model, shape), runs=[]), options, benchmark_process.speed, model, shape)
            for model in models
        ]
        measured["cells"] += [job.cell for job in row]
        jobs += row * options.repeats
    batches = [(jobs, job_runner.visible_gpus(options.gpus))]
    with signals.deferred() as received:
        return job_runner.run_all(batches, measured, path, received, _store, _line)


def _version(module: str) -> str:
    """That of the package that owns a module: `triton` is of pytorch-triton-rocm on an AMD GPU."""
    return importlib.metadata.version(importlib.metadata.packages_distributions()[module][0])


def _job(entry: Entry, options: BenchmarkOptions, work: Callable[..., object], *arguments: object) -> Job:
    return Job(entry, place(entry), partial(benchmark_process.run, partial(work, *arguments), options.device, options.timeout))


def _store(entry: Any, outcome: job_runner.Outcome) -> None:
    store = entry["runs"].append if "runs" in entry else entry.update
    store(outcome["found"])


def _blank(model: Model, shape: BenchmarkOptions) -> Entry:
    return {
        "model": model.name, "batch_size": shape.batch_size, "sequence_length": shape.seq_len, "status": "not run", "reason": None
    }  # fmt: skip


def _line(entry: Any) -> str:
    """The outcome of a process, for the terminal."""
    if "loss" in entry:
        found = f"loss {entry['loss']:.5f}, largest gradient error {entry['gradient_error']:.2g}"
    else:
        found = job_runner.last_run(entry)
    return f"{entry['model']:<12} B {entry['batch_size']:<4} S {entry['sequence_length']:<5} {found}"
