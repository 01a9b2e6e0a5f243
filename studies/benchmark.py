"""Benchmarks models at equal shapes: versions and external baselines, each in a new process, in
turn.

A cell is a model at a batch size and a sequence length. Its process builds the model with random
weights, checks that every parameter gets a gradient, takes training steps that do not count (they
compile, and load the GPU), and then times steps on one batch. The repeats of a shape take turns (a,
b, a, b), so that a slow spell of the machine affects all models. Peak memory is the maximum over
the timed steps: of PyTorch's allocator on a GPU, without its reserve and the CUDA context, of the
whole process on a CPU.

A GPU that reaches its power limit lowers its clock after some seconds. So large steps are timed for
seconds, after as many of load. Clock, power, temperature and energy are those of the timed steps.

Accuracy is measured at the smallest shape only: the errors of logits and gradients against the
baseline in float64 (`studies.accuracy`), in the benchmark's precision, with weights and a batch of
one seed for each repeat.
"""

import importlib.metadata
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from common import cli, nvml, weights
from common import device as devices
from common.options import Options
from common.precision import SHORT, Precision, amp_dtype
from common.timing import benchmark, summarize
from common.training import capture, ceilings, preparation, profiler, record, study_step
from studies import accuracy, job_runner, version_files
from studies.peers import known_models
from studies.peers.known_models import Model
from tracepage import files
from tracepage.errors import UsageError
from tracepage.records.fields import Timed
from tracepage.records.study_files import METRICS, Benchmark
from tracepage.terminal import format_time, progress
from tracepage.views.benchmark_suite import place, reason

import pandas
import torch

WARMUP = 4  # training steps before the timed ones, at least
TRACED = 2  # steps
FAILED = ("failed", "timed out")  # otherwise than by memory
Job = tuple[dict[str, Any], Callable[[], Any]]  # a cell, and what a process measures of it
# The counter is updated every 20 to 100 ms, so they are at most 100 ms too many or too few: 1%.
ENERGY_SECONDS = 10


class Timing(NamedTuple):
    """How long a process runs its steps, and what else it measures of them."""

    steps: int  # timed, at least
    load_seconds: float = 0.0  # of steps before them, at least
    timed_seconds: float = 0.0  # of timed steps, at least
    energy: bool = False
    trace_dir: Path | None = None  # for a trace of two further steps


def plan(arguments: Namespace, known: dict[str, Model]) -> tuple[list[Model], list[Options]]:
    """The models, and the options of each shape, smallest first. UsageError: a value is wrong, or a
    model cannot run here.
    """
    check_names("--models", arguments.models, known)
    check_names("--metrics", arguments.metrics, METRICS)
    models = [known[name] for name in dict.fromkeys(arguments.models)]
    device = devices.select(arguments.device)
    if "energy" in arguments.metrics:
        if devices.describe(device)["kind"] != "cuda":
            raise UsageError("--metrics energy: only an NVIDIA GPU counts its energy")
        nvml.joules()  # refuses before any work where the binding or the counter is missing
    for model in models:
        if model.captured:
            capture.check_supported(device)
        if not model.path:
            model.load().check(device, amp_dtype(arguments))
        elif known_models.FP8 in model.name and not devices.is_gpu(device):
            raise UsageError(f"{model.name}: products in FP8 need a GPU")
    shapes = []
    for length in sorted({*arguments.seq_lengths}):
        for batch_size in sorted({*arguments.batch_sizes}):
            shape = {"batch_size": batch_size, "seq_len": length}
            shapes.append(version_files.resolve(Namespace(**vars(arguments) | shape)))
    return models, shapes


def check_names(flag: str, names: list[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise UsageError(f"{flag}: there is no {name!r}; there are {', '.join(known)}")


def measure(
    arguments: Namespace, models: list[Model], shapes: list[Options], baseline: Model, path: Path
) -> int:
    """Measures what `plan` returned, and writes benchmark.json (`path`) after each process; the
    exit code is that of `run_jobs`.
    """
    smallest = shapes[0]
    timing = timing_of(arguments)
    precision = SHORT[amp_dtype(smallest) or torch.float32]
    packages: set[str] = set()
    for model in models:
        if not model.path:
            packages |= model.load().packages.keys()
    measured = record.header(
        files.schema_of(Benchmark), None, precision, deterministic=smallest.deterministic
    ) | {
        "status": "interrupted",  # until the end is reached
        "packages": {module: package_version(module) for module in sorted(packages)},
        # Without the maximum length, which grows with the shape.
        "model": smallest.model.model_dump(exclude={"max_sequence_length"}),
        "seed": smallest.seed,
        "models": [model.name for model in models],
        "metrics": arguments.metrics,
        "batch_sizes": sorted({*arguments.batch_sizes}),
        "sequence_lengths": sorted({*arguments.seq_lengths}),
        "steps": timing.steps,
        "load_seconds": timing.load_seconds,
        "timed_seconds": timing.timed_seconds,
        "repeats": arguments.repeats,
        "cells": [],
        "accuracy": [],
    }
    jobs: list[Job] = []
    if "accuracy" in arguments.metrics:
        for model in models:
            cell = new_cell(model, smallest)
            measured["accuracy"].append(cell)
            jobs.append((cell, partial(errors, model, baseline, smallest, arguments.repeats)))
    if arguments.metrics != ["accuracy"]:
        for shape in shapes:
            turn: list[Job] = []
            for model in models:
                cell = new_cell(model, shape) | {"runs": []}
                measured["cells"].append(cell)
                turn.append((cell, partial(speed, model, shape, timing)))
            jobs += turn * arguments.repeats

    def in_a_process(work: Callable[[], Any]) -> job_runner.Outcome:
        return job_runner.in_a_process(work, smallest.device, arguments.timeout)

    return run_jobs(jobs, measured, path, in_a_process)


def timing_of(arguments: Namespace) -> Timing:
    """The flags; energy is counted over ENERGY_SECONDS at least."""
    energy = "energy" in arguments.metrics
    timed = max(arguments.timed_seconds, ENERGY_SECONDS if energy else 0)
    return Timing(arguments.num_steps, arguments.load_seconds, timed, energy, arguments.trace_dir)


def run_jobs(
    jobs: list[Job],
    measured: dict[str, Any],
    path: Path,
    in_a_process: Callable[[Callable], job_runner.Outcome],
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
            cell |= {"status": outcome["status"], "reason": outcome["reason"]}
            if "device" in outcome:
                measured |= {key: outcome[key] for key in ("device", "environment")}
            if outcome["status"] == "ok" and "runs" in cell:
                cell["runs"].append(outcome["found"])
            elif outcome["status"] == "ok":
                cell |= outcome["found"]
            files.write_measurement(path, measured, "--output-dir")
            print(f"{number:4d} of {len(jobs)}  {place(cell):<28} {said_of(cell)}", flush=True)
        measured["status"] = "interrupted" if received else "completed"
        files.write_measurement(path, measured, "--output-dir")
    if received:
        return 128 + received[0]
    return int(any(cell["status"] in FAILED for cell, _ in jobs))


def package_version(module: str) -> str:
    """That of the package that owns a module: `triton` is of pytorch-triton-rocm on an AMD GPU."""
    return importlib.metadata.version(importlib.metadata.packages_distributions()[module][0])


def new_cell(model: Model, shape: Options) -> dict[str, Any]:
    return {
        "model": model.name,
        "batch_size": shape.batch_size,
        "sequence_length": shape.seq_len,
        "status": "not run",
        "reason": None,
    }


def said_of(cell: Mapping[str, Any]) -> str:
    """The outcome of a cell's last process, for the terminal."""
    if cell["status"] != "ok":
        return reason(cell)
    if "runs" not in cell:
        return f"largest gradient error {cell['gradient_error']:.2g}"
    run = cell["runs"][-1]
    return f"{format_time(run['step_ms']['median']):>9} a step {run['peak_mib']:10,.0f} MiB"


def built(model: Model, options: Options) -> tuple[preparation.Prepared, Precision]:
    """A new model's training step, checked, and its precision."""
    version = model.load()
    device = devices.select(options.device)
    settings = version_files.switched(version, options, *model.flags)
    # None: captured or not, as the model itself has it.
    settings = replace(settings, capture_step=model.captured or None)
    precision = Precision(device, amp_dtype(options))
    deterministic = options.deterministic or model.deterministic
    devices.configure(device, options.seed, deterministic=deterministic)
    # PyTorch draws weights of its own first, of which ours take the place: many seconds of a CPU at
    # large.
    with device:
        module = version.make_model(settings)
    batch = version_files.random_batch(options, device)
    prepared = study_step.prepare_for_study(version, settings, precision, batch, model=module)
    return prepared, precision


def speed(model: Model, options: Options, timing: Timing) -> Timed:
    """Times of steps, peak memory, the GPU's state meanwhile, and what a call costs the host; the
    weights are random, and not the seed's.
    """
    device = devices.select(options.device)
    with weights.drawn_on(device):
        prepared, _ = built(model, options)
    batch = version_files.random_batch(options, device)

    def step() -> None:
        prepared.step(batch)

    benchmark(step, device, warmup=0, iterations=WARMUP, seconds=timing.load_seconds)
    devices.reset_peak_memory(device)
    joules = nvml.joules() if timing.energy else 0.0
    with nvml.sampled(device) as state:
        times = benchmark(step, device, 0, timing.steps, timing.timed_seconds)
    result: Any = {"step_ms": summarize(times), **state}
    if timing.energy:
        result["joules"] = (nvml.joules() - joules) / len(times)
    result |= devices.peak_memory(device, prepared.graph_peak_bytes)
    no_kernels = getattr(prepared.model, "switches", {}).get("no-kernels")
    if no_kernels:
        result["no_kernels"] = no_kernels
    result["host_us"] = ceilings.host_cost(device) if devices.is_gpu(device) else None
    if timing.trace_dir:
        path = trace_path(timing.trace_dir, model, options)
        profiler.trace(step, path, TRACED, shapes=False)
    return result


def trace_path(folder: Path, model: Model, options: Options) -> Path:
    """That of a version at `small` is v2_compile_small.json.gz, and that of a peer peer_hf_..."""
    kind = "" if model.path else "peer_"
    return folder / f"{kind}{model.name.replace('-', '_')}_{options.preset}.json.gz"


def errors(model: Model, baseline: Model, options: Options, repeats: int) -> dict[str, Any]:
    """The errors against float64 with the seeds that begin with the options', as in
    `study_files.Accuracy`.
    """
    versions = (baseline.load(), model.load())
    by_seed = []
    for seed in range(options.seed, options.seed + repeats):
        seeded = replace(options, seed=seed)
        by_seed.append(accuracy.errors_against_float64(*versions, seeded, model.flags))
    table = pandas.DataFrame(by_seed)
    gradients = table.filter(regex=f"^{accuracy.GRADIENT}").max()
    return {
        "logits_error": table["logits"].max(),
        "gradient_error": gradients.max(),
        "gradient": str(gradients.idxmax()).removeprefix(accuracy.GRADIENT),
        "gradients_together": table[accuracy.TOGETHER].tolist(),
    }
