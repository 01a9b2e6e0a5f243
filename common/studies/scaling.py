"""Measures how training scales over processes, each with a GPU of its own, or on a CPU with gloo.

A cell is a version in a form of `--parallel` on n processes, and each repeat of it is a torchrun job of the version's own script.
Scaling is weak: each process keeps its batch. One process runs without any form.

The last steps of the first repeat of a cell of several processes are profiled. They do not count in the step time. The traces of
all ranks show the time of communication: overlapped or exposed, and moving bytes or waiting for a slow rank
(`analysis.profiles.communication`).
"""

import os
import re
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from common import cli, ranks
from common import device as devices
from common.analysis.output import run_facts, tables
from common.analysis.output.report import Report
from common.analysis.output.tables import Table
from common.analysis.profiles import communication
from common.errors import UsageError
from common.files import schema_of
from common.options import Options
from common.precision import SHORT, amp_dtype
from common.records import run_record, study_files
from common.records.study_files import Scaling, ScalingCell, Split
from common.studies import job_runner
from common.studies.job_runner import Job, Outcome
from common.studies.known_models import Model
from common.training import record, version_files

import pandas
import torch

PROFILED = 3  # steps, after the timed ones
SPLIT = list(Split.__annotations__)
COLUMNS = (
    "model", "parallel", "processes", "batch_size", "status", "ms", "p20", "p80", "repeats", "tokens_per_second",
    "efficiency", "peak_mib", *SPLIT,
)  # fmt: skip
Row = dict[str, Any]  # by the names in COLUMNS


def default_processes(device: torch.device) -> list[int]:
    """1, 2, 4, ... up to the GPUs of this host; 1 and 2 on a CPU."""
    most = torch.cuda.device_count() if devices.is_gpu(device) else 2
    return [2**i for i in range(most.bit_length())]


def plan(arguments: Namespace, known: dict[str, Model]) -> tuple[Options, list[ScalingCell], list[str]]:
    """The options, the cells, one process first, and a line for each left out. UsageError: a value is wrong."""
    cli.check_list("--models", arguments.models, [name for name, model in known.items() if model.path])
    cli.check_list("--parallel", arguments.forms, ranks.FORMS)
    cli.check_list("--processes", arguments.processes)
    options, most = version_files.resolve(arguments), max(arguments.processes)
    if devices.is_gpu(devices.select(options.device)) and most > torch.cuda.device_count():
        raise UsageError(f"--processes {most}: GPUs here: {torch.cuda.device_count()}")
    left_out: list[str] = []
    found: list[ScalingCell] = []
    for name in arguments.models:
        supported = getattr(known[name].load(), "PARALLEL", ranks.FORMS)
        altered = known[name].captured or known[name].flags or options.capture_step  # fully_shard takes no such step
        refused = [form for form in arguments.forms if form not in supported or (altered and form == "fsdp")]
        left_out += [f"{name}, {form}: {name} does not support it" for form in refused]
        places: list[tuple[ranks.Form | None, int]] = [(None, 1)]
        for form in (form for form in arguments.forms if form not in refused):
            places += [(form, n) for n in sorted({*arguments.processes} - {1})]
        found += [
            {"model": name, "parallel": form, "processes": n, "batch_size": options.batch_size, "status": "not run",
             "reason": None, "runs": []}
            for form, n in places
        ]  # fmt: skip
    return options, sorted(found, key=lambda cell: cell["processes"]), left_out


def measure(
    arguments: Namespace, options: Options, cells: list[ScalingCell], left_out: list[str], known: dict[str, Model]
) -> int:
    """Measures what `plan` returned, and writes scaling.json after each job; the exit code is `run_all`'s."""
    precision = SHORT[amp_dtype(options) or torch.float32]
    measured = record.header(schema_of(Scaling), None, precision, model=options.model) | {
        "status": "interrupted",  # until the end is reached
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "RCCL_"))},
        "seed": options.seed, "batch_size": options.batch_size, "sequence_length": options.seq_len,
        "steps": arguments.num_steps, "repeats": arguments.repeats, "left_out": left_out, "cells": cells,
    }  # fmt: skip
    jobs = []
    for n in sorted({1, *arguments.processes}):
        for repeat in range(arguments.repeats):
            for cell in (cell for cell in cells if cell["processes"] == n):
                run = partial(run_job, cell, known[cell["model"]], options, arguments, profiled=n > 1 and repeat == 0)
                jobs.append(Job(cell, place(cell), run, partial(_store, cell)))
    return job_runner.run_all(jobs, measured, arguments.output_dir / "scaling.json", _line)


def _store(cell: ScalingCell, outcome: Outcome) -> None:
    cell |= outcome["traced"]
    cell["runs"].append(outcome["run"])


def place(cell: Mapping[str, Any]) -> str:
    """A cell by name, such as "v1, ddp, 2 x 8"."""
    return f"{cell['model']}, {cell['parallel'] or 'one process'}, {cell['processes']} x {cell['batch_size']}"


def _line(cell: ScalingCell) -> str:
    return f"{place(cell):<28} {job_runner.last_run(cell)}"


def run_job(cell: ScalingCell, model: Model, options: Options, arguments: Namespace, profiled: bool) -> Outcome:
    """The outcome of one torchrun job of a cell: its status and reason, and if that is "ok" what the job measured."""
    steps = arguments.num_steps + (PROFILED + 1) * profiled
    command = [
        str(model.path), *model.flags, "--preset", options.preset, "--batch-size", str(cell["batch_size"]),
        "--seq-len", str(options.seq_len), "--seed", str(options.seed), "--device", options.device, "--data", "synthetic",
        "--num-steps", str(steps), "--metrics-out", "metrics.json",
    ]  # fmt: skip
    command += ["--config", str(options.config.resolve())] if options.config else []
    command += ["--use-amp"] if options.use_amp else []
    command += ["--amp-dtype", options.amp_dtype] if options.amp_dtype else []
    command += ["--parallel", cell["parallel"]] if cell["parallel"] else []
    capture = True if model.captured else options.capture_step
    command += [] if capture is None else ["--capture-step" if capture else "--no-capture-step"]
    command += ["--profile-dir", "profiles", "--profile-steps", str(PROFILED)] if profiled else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code, said = torchrun(cell["processes"], command, max(arguments.processes), arguments.timeout, folder)
        if code != 0 or not (folder / "metrics.json").exists():
            return job_runner.timed_out(arguments.timeout) if code is None else ending(code, said)
        run = run_record.read_timed(folder / "metrics.json")
        traced = communicated(folder / "profiles", cell["processes"]) if profiled else {}
    times = {key: run["step_ms"][key] for key in ("median", "p20", "p80", "count")}
    peaks = run["ranks"]["peak_mib"] if "ranks" in run else [run["memory"]["peak_mib"]]
    measured = {"kind": run["memory"]["kind"], "peak_mib": max(peaks), "step_ms": times}
    machine = {"device": run["device"], "environment": run["environment"]}
    return {"status": "ok", "reason": None, "run": measured, "traced": traced} | machine


def torchrun(processes: int, command: list[str], most: int, timeout: float, folder: Path) -> tuple[int | None, str]:
    """The exit code of a torchrun job, None if it took too long, and what it printed. Whatever ends this, the job ends too.

    The cores are shared among `most` processes, alike in all cells.
    """
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // most))} | os.environ
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    with subprocess.Popen(
        launcher + command, cwd=folder, env=environment, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as job:  # fmt: skip
        try:
            said, _ = job.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            job.terminate()  # torchrun then ends its processes; it has ended but for a time-out or a second signal
    return job.returncode, said


def ending(code: int, said: str) -> Outcome:
    """The status of a job that did not succeed, and the reason in one line."""
    lines = said.strip().splitlines() or [f"exit code {code}"]
    reason = next((line.partition("error: ")[2] for line in lines if line.startswith("error: ")), lines[-1])[:500]
    killed = re.search(r"exitcode *: *-9\b|Signal 9 \(SIGKILL\)", said)
    if killed and not reason.startswith("out of memory"):
        reason = job_runner.KILLED
    full = killed or "out of memory" in reason
    return {"status": "out of memory" if full else "failed", "reason": reason}


def communicated(profiles: Path, processes: int) -> dict[str, Any]:
    """The communication of each rank by the traces of a job, or the reason why they give none: keys of a cell."""
    try:
        paths = communication.find(profiles)
        if len(paths) != processes:
            raise UsageError(f"{len(paths)} processes of {processes} wrote a trace")
        return {"ranks": communication.split(paths)}
    except UsageError as error:
        return {"trace_problem": str(error)}


def analyze(path: Path) -> Report:
    """The report on a scaling.json, as .csv, .html, .json and .md. Errors of `read`; RunError: nothing was measured."""
    measured = study_files.read(path, Scaling)
    cells, rows = measured["cells"], results(measured)
    job_runner.require_measured(cells, place)
    conditions = run_facts.describe(measured | {"training": measured})
    report = Report("Scaling over processes")
    report.json("scaling", measured)
    report.text(
        f"{conditions} of each process. Step times are medians. Jobs of each cell: {measured['repeats']}; timed steps in each: "
        f"{measured['steps']}. Tokens/s are those of the job, memory is that of the process that took most. Efficiency is the "
        "throughput of a job over n times that of one process.",
        f"Made by `{measured['command']}` on {measured['date']}.",
        *(f"{name} was {value}." for name, value in measured["variables"].items()),
    )
    report.csv("scaling", COLUMNS, [[row[name] for name in COLUMNS] for row in rows])
    timed = [row for row in rows if row["ms"]]
    report.section("Step time")
    report.table(*step_table(timed))
    report.text(*run_facts.noise({place(row).replace(",", ""): row | {"median": row["ms"]} for row in timed}))
    report.text(
        "Communication is from the traces of a few profiled steps, which the profiler slows, in ms of a step: means over ranks "
        "and steps. It is overlapped + exposed, and also waiting + moving. Waiting is what a collective takes on a rank beyond "
        "the shortest time of the same collective among the ranks."
    )
    missing = [(place(cell), job_runner.reason(cell)) for cell in cells if cell["status"] != "ok"]
    missing += [(place(cell), f"no communication: {cell['trace_problem']}") for cell in cells if "trace_problem" in cell]
    missing += [line.partition(": ")[::2] for line in measured["left_out"]]
    job_runner.not_measured(report, measured, missing)
    return report


def results(measured: Scaling) -> list[Row]:
    """COLUMNS of each cell (None if not measured); communication is the mean of the ranks."""
    rows, one_process = [], {}  # model: milliseconds of its step on one process
    for cell in measured["cells"]:  # fewest processes first
        if cell["batch_size"] != measured["batch_size"]:  # of an older file
            continue
        row: Row = dict.fromkeys(COLUMNS) | {name: value for name, value in cell.items() if name in COLUMNS}
        if cell["status"] == "ok":
            row |= job_runner.medians(cell)
            row["tokens_per_second"] = cell["processes"] * cell["batch_size"] * measured["sequence_length"] / row["ms"] * 1e3
            if cell["processes"] == 1:
                one_process[cell["model"]] = row["ms"]
            if one := one_process.get(cell["model"]):
                row["efficiency"] = one / row["ms"]
            if splits := cell.get("ranks"):
                row |= {str(name): value for name, value in pandas.DataFrame(splits).mean().items()}
        rows.append(row)
    return rows


def step_table(rows: list[Row]) -> Table:
    """A row for each measured cell: step time, throughput, efficiency, memory, and the communication of a step."""
    body = []
    for row in rows:
        place = [row["model"], row["parallel"] or "one process", row["processes"], row["batch_size"]]
        efficiency = row["efficiency"] and f"{100 * row['efficiency']:.1f}%"
        times = [row["ms"], tables.spread(row), row["tokens_per_second"], efficiency, row["peak_mib"]]
        body.append([*place, *times, *(row[name] for name in SPLIT)])
    columns = ["version", "form", "processes", "B of each", "ms/step", "p20 to p80", "tokens/s", "efficiency", "peak MiB"]
    return tables.filled([*columns, *(name.removesuffix("_ms").replace("_", " ") for name in SPLIT)], body)
