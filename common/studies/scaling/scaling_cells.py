"""Measures how training scales over processes, each with a GPU of its own, or on a CPU with gloo.

A cell is a version in a form of `--parallel` on n processes with a batch size, and each repeat of it is a torchrun job of the
version's own script. Weak scaling keeps the batch of a process, strong scaling that of the job. One process runs without any
form.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

from common import cli, ranks, signals
from common import device as devices
from common.errors import UsageError
from common.files import schema_of
from common.precision import SHORT
from common.progress import progress
from common.records.study_files import Scaling, ScalingCell
from common.studies import job_runner
from common.studies.job_runner import Job
from common.studies.known_models import Model
from common.studies.scaling import link, scaling_job
from common.studies.scaling.scaling_results import place
from common.studies.scaling.torchrun import ScalingOptions
from common.training import record

import torch


def default_processes(device: torch.device) -> list[int]:
    """1, 2, 4, ... up to the GPUs of this host; 1 and 2 on a CPU."""
    most = torch.cuda.device_count() if devices.is_gpu(device) else 2
    return [2**i for i in range(most.bit_length())]


def plan(options: ScalingOptions, known: dict[str, Model]) -> tuple[list[ScalingCell], list[str]]:
    """The cells, one process first, and a line for each left out. UsageError: a value is wrong, or there are too few GPUs."""
    cli.check_list("--models", options.models, [name for name, model in known.items() if model.path])
    cli.check_list("--parallel", options.forms, ranks.FORMS)
    cli.check_list("--processes", options.processes)
    most, device = max(options.processes), devices.select(options.device)
    if devices.is_gpu(device) and most > torch.cuda.device_count():
        raise UsageError(f"--processes {most}: GPUs here: {torch.cuda.device_count()}")
    several, total, left_out = sorted({*options.processes} - {1}), options.global_batch_size, []
    left_out += [f"strong scaling on {n}: {n} does not divide --global-batch-size {total}" for n in several if total % n]
    found: list[ScalingCell] = []
    for name in options.models:
        supported = getattr(known[name].load(), "PARALLEL", ranks.FORMS)
        altered = known[name].captured or known[name].flags or options.capture_step  # fully_shard takes no such step
        refused = [form for form in options.forms if form not in supported or (altered and form == "fsdp")]
        left_out += [f"{name}, {form}: {name} does not support it" for form in refused] if several else []
        places: list[tuple[ranks.Form | None, int, int]] = [(None, 1, options.batch_size), (None, 1, total)]
        for form in (form for form in options.forms if form not in refused):
            places += [(form, n, options.batch_size) for n in several]
            places += [(form, n, total // n) for n in several if total % n == 0]
        found += [
            {"model": name, "parallel": form, "processes": n, "batch_size": size, "status": "not run", "reason": None, "runs": []}
            for form, n, size in dict.fromkeys(places)
        ]
    return sorted(found, key=lambda cell: cell["processes"]), left_out


def gpu_sets(processes: int, options: ScalingOptions) -> list[str | None]:
    """The GPUs of the jobs that run at the same time: as many as there are GPUs for with --fill-gpus, else one."""
    most = torch.cuda.device_count() // processes if options.fill_gpus else 1
    if most < 2:
        return [None]
    gpus = list(filter(None, job_runner.visible_gpus(most * processes)))
    return [",".join(gpus[i : i + processes]) for i in range(0, len(gpus), processes)]


def measure(cells: list[ScalingCell], left_out: list[str], options: ScalingOptions, known: dict[str, Model], path: Path) -> int:
    """Measures what `plan` returned, and writes scaling.json (`path`) after each job; the exit code is `run_all`'s."""
    precision = SHORT[cli.amp_dtype(options) or torch.float32]
    measured: dict[str, Any] = record.header(schema_of(Scaling), None, precision, model=options.model) | {
        "status": "interrupted",  # until the end is reached
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "RCCL_"))},
        "seed": options.seed, "models": options.models, "forms": options.forms, "processes": sorted({1, *options.processes}),
        "batch_size": options.batch_size, "global_batch_size": options.global_batch_size, "sequence_length": options.seq_len,
        "steps": options.num_steps, "repeats": options.repeats, "filled": options.fill_gpus,
        "left_out": left_out, "link": None, "cells": cells,
    }  # fmt: skip
    batches = []
    for n in measured["processes"]:
        own = [cell for cell in cells if cell["processes"] == n]
        jobs = [
            Job(cell, place(cell), partial(scaling_job.run, cell, known[cell["model"]], options, repeat == 0))
            for repeat in range(options.repeats)
            for cell in own
        ]
        batches.append((jobs, gpu_sets(n, options)))
    with signals.deferred() as received:
        with progress("measuring the link"):
            measured["link"], problem = link.find(options, max(measured["processes"]) > 1)
        if problem:
            left_out.append(f"the model on paper: {problem}")
            print(f"leaves out {left_out[-1]}")
        return job_runner.run_all(batches, measured, path, received, _store, _line)


def _store(cell: ScalingCell, outcome: job_runner.Outcome) -> None:
    cell |= outcome.get("traced", {}) | {"parameters": outcome["parameters"]}
    cell["runs"].append(outcome["run"])


def _line(cell: ScalingCell) -> str:
    return f"{place(cell):<28} {job_runner.last_run(cell)}"
