"""Measures how training scales over processes, each with a GPU of its own, or on a CPU with gloo.

A cell is a version in a form of `--parallel` on n processes with a batch size, and each repeat of it is a torchrun job of the
version's own script. Weak scaling keeps the batch of a process, strong scaling that of the job. One process runs without any
form. Efficiency is a job's throughput over n times that of this one process, at the same batch of a process or of the job.

The last steps of the first repeat are profiled. They do not count in the step time. The traces of all ranks show the time of
communication: overlapped or exposed, and moving bytes or waiting for a slow rank (`analysis.profiles.communication`).

A model on paper (`analysis.formulas.data_parallel`) predicts each cell from the step on one GPU and a link. The link is measured
by all-reduces between the smallest number of processes above one, or given. Forward pass, backward pass and update share the step
on one GPU as they share its profile. Kinds and bytes of collectives are those of the traces, where these show them.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

from common import ROOT, cli, files, ranks, signals
from common import device as devices
from common.analysis.formulas import data_parallel
from common.analysis.output import plots, tables
from common.analysis.output.report import Report
from common.analysis.profiles import communication, run_record, step_profile
from common.errors import RunError, UsageError
from common.precision import SHORT
from common.progress import progress
from common.studies import benchmark
from common.timing import benchmark as timed
from common.timing import summarize
from common.training import distributed, record

import torch
from pydantic import Field, PositiveInt
from typing_extensions import NotRequired, TypedDict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA = "tiny-llama-scaling/1"
MULTICAST = "NCCL_NVLS_ENABLE"
EXTRAPOLATED = [2**i for i in range(13)]  # GPUs
LINK_BYTES = {"cpu": (2**12, 2**16, 2**20, 2**22), "cuda": (2**12, 2**16, 2**20, 2**24, 2**28)}
COLUMNS = (
    "scaling", "model", "parallel", "processes", "batch_size", "status", "ms", "p20", "p80", "repeats", "tokens_per_second",
    "efficiency", "peak_mib", *communication.Split.__annotations__, "model_ms", "model_efficiency", "model_error",
)  # fmt: skip
REPEATED = 10  # all-reduces that are timed together
PHASES = ("forward", "backward", "optimizer")


class Run(run_record.PeakMemory):
    """One job of a cell; the memory is that of the process which took most."""

    step_ms: run_record.Summary


class Collectives(TypedDict):
    """The collectives of one kind in a step: a `data_parallel.Transfer`. A trace may lack the bytes."""

    kind: str
    count: files.Amount
    bytes: files.Amount | None
    beside: data_parallel.Beside


class Cell(TypedDict):
    model: str
    parallel: Literal[ranks.FORMS] | None  # None on one process
    processes: PositiveInt
    batch_size: PositiveInt  # of a process
    status: Literal["ok", "out of memory", "timed out", "failed", "not run"]
    reason: str | None  # one line
    runs: list[Run]
    parameters: NotRequired[PositiveInt]
    shares: NotRequired[dict[Literal[PHASES], files.Amount]]  # of the step on one process
    ranks: NotRequired[list[communication.Split]]
    collectives: NotRequired[list[Collectives]]
    trace_problem: NotRequired[str]  # why there is nothing from the traces


class Message(TypedDict):
    bytes: PositiveInt
    ms: files.PositiveAmount  # of an all-reduce


class Link(TypedDict):
    gb_per_second: files.PositiveAmount
    microseconds: files.Amount
    source: str
    messages: list[Message]


class Scaling(run_record.Header):
    """The content of scaling.json."""

    schema: Literal[SCHEMA]
    status: Literal["completed", "interrupted"]
    device: run_record.Device | None  # None, as the environment, if no job came far enough to describe it
    environment: run_record.Environment | None
    variables: dict[str, str]  # of the environment: those that NCCL and RCCL read
    model: run_record.Model
    precision: run_record.Compute
    seed: int
    models: Annotated[list[str], Field(min_length=1)]
    forms: list[Literal[ranks.FORMS]]
    processes: Annotated[list[PositiveInt], Field(min_length=1)]
    batch_size: PositiveInt  # of a process, in weak scaling
    global_batch_size: PositiveInt  # of the job, in strong scaling
    sequence_length: PositiveInt
    steps: PositiveInt
    repeats: PositiveInt
    filled: NotRequired[bool]  # jobs ran at the same time, each on GPUs of its own
    left_out: list[str]
    link: Link | None
    cells: list[Cell]


# ------------------------------------------------------------------------------------------------------------ measuring


def default_processes(device: torch.device) -> list[int]:
    """1, 2, 4, ... up to the GPUs of this host; 1 and 2 on a CPU."""
    most = torch.cuda.device_count() if devices.is_gpu(device) else 2
    return [2**i for i in range(most.bit_length())]


def plan(options: Namespace, known: dict[str, benchmark.Model]) -> tuple[list[Cell], list[str]]:
    """The cells, one process first, and a line for each form and number of processes that is left out.

    Raises:
        UsageError: a name or number is unknown or given twice, or there are too few GPUs.
    """
    scripts = {name: model for name, model in known.items() if model.path}
    for flag, values, valid in (
        ("--models", options.models, scripts), ("--parallel", options.forms, ranks.FORMS), ("--processes", options.processes, ()),
    ):  # fmt: skip
        for value in values:
            if valid and value not in valid:
                raise UsageError(f"{flag}: there is no {value!r}; there are {', '.join(valid)}")
            if values.count(value) > 1:
                raise UsageError(f"{flag}: {value} is given twice")
    most, device = max(options.processes), devices.select(options.device)
    if devices.is_gpu(device) and most > torch.cuda.device_count():
        raise UsageError(f"--processes {most}: there are {torch.cuda.device_count()} GPUs")
    several, total, left_out = sorted({*options.processes} - {1}), options.global_batch_size, []
    left_out += [f"strong scaling on {n}: {n} does not divide --global-batch-size {total}" for n in several if total % n]
    found: list[Cell] = []
    for name in options.models:
        supported = getattr(known[name].load(), "PARALLEL", ranks.FORMS)
        altered = known[name].captured or known[name].flags  # fully_shard takes neither a captured nor a compiled step
        refused = [form for form in options.forms if form not in supported or (altered and form == "fsdp")]
        left_out += [f"{name}, {form}: {name} does not support it" for form in refused] if several else []
        places = [(None, 1, options.batch_size), (None, 1, total)]
        for form in (form for form in options.forms if form not in refused):
            places += [(form, n, options.batch_size) for n in several]
            places += [(form, n, total // n) for n in several if total % n == 0]
        found += [
            {"model": name, "parallel": form, "processes": n, "batch_size": size, "status": "not run", "reason": None, "runs": []}
            for form, n, size in dict.fromkeys(places)
        ]
    return sorted(found, key=lambda cell: cell["processes"]), left_out


def measure(cells: list[Cell], left_out: list[str], options: Namespace, known: dict[str, benchmark.Model], path: Path) -> int:
    """Measures what `plan` returned; after each job it prints a line and writes scaling.json (`path`).

    Returns:
        The exit code: 0, 1 if a cell failed other than by memory, 128 + n if stopped by signal n.
    """
    precision = SHORT[cli.amp_dtype(options) or torch.float32]
    measured: dict[str, Any] = record.header(SCHEMA, None, precision, model=options.model) | {
        "status": "interrupted",  # until the end is reached
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "RCCL_"))},
        "seed": options.seed, "models": options.models, "forms": options.forms, "processes": sorted({1, *options.processes}),
        "batch_size": options.batch_size, "global_batch_size": options.global_batch_size, "sequence_length": options.seq_len,
        "steps": options.num_steps, "repeats": options.repeats, "filled": options.fill_gpus,
        "left_out": left_out, "link": None, "cells": cells,
    }  # fmt: skip
    count = len(cells) * options.repeats
    with signals.deferred() as received, ExitStack() as at_the_end:
        with progress("measuring the link"):
            measured["link"], problem = link(options, max(measured["processes"]) > 1)
        if problem:
            left_out.append(f"the model on paper: {problem}")
            print(f"leaves out {left_out[-1]}")
        for number, (cell, outcome) in enumerate(_outcomes(cells, known, options, received, at_the_end), 1):
            if received and outcome and outcome["status"] != "ok":
                break  # Ctrl-C reaches the job too
            if not outcome or cell["status"] not in ("ok", "not run"):
                continue
            cell |= {key: outcome[key] for key in ("status", "reason")} | outcome.get("traced", {})
            if cell["status"] == "ok":
                cell["runs"].append(outcome["run"])
                cell["parameters"] = outcome["parameters"]
            measured |= {key: outcome[key] for key in ("device", "environment") if key in outcome}
            files.write_measurement(path, measured, "--output-dir")
            print(f"{number:4d} of {count}  {_line(cell)}", flush=True)
    measured["status"] = "interrupted" if received else "completed"
    files.write_measurement(path, measured, "--output-dir")
    failed = any(cell["status"] in ("failed", "timed out") for cell in cells)
    return 128 + received[0] if received else int(failed)


def _outcomes(
    cells: list[Cell], known: dict[str, benchmark.Model], options: Namespace, received: list[int], at_the_end: ExitStack
) -> Iterator[tuple[Cell, dict[str, Any] | None]]:
    """Each job's cell and outcome, None if it was not run: the cells of a number of processes in turn, so that a slow spell of
    the machine affects all of them, and then their repeats."""
    for n in dict.fromkeys(cell["processes"] for cell in cells):
        jobs = [(cell, repeat) for repeat in range(options.repeats) for cell in cells if cell["processes"] == n]

        def run(job: tuple[Cell, int], gpus: str | None) -> dict[str, Any] | None:
            cell, repeat = job
            if received or cell["status"] not in ("ok", "not run"):
                return None  # what has failed is not repeated
            return run_job(cell, known[cell["model"]], options, repeat == 0, gpus)

        outcomes = benchmark.side_by_side(jobs, run, gpu_sets(n, options), at_the_end)
        for cell, _ in jobs:
            with progress(_place(cell)):
                outcome = next(outcomes)
            yield cell, outcome


def gpu_sets(processes: int, options: Namespace) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of the jobs that run at the same time: as many as there are GPUs for with --fill-gpus, else one."""
    most = torch.cuda.device_count() // processes if options.fill_gpus else 1
    if most < 2:
        return [None]
    gpus = benchmark.visible_gpus(most * processes)
    return [",".join(gpus[i : i + processes]) for i in range(0, len(gpus), processes)]


def _place(cell: Cell) -> str:
    return f"{cell['model']}, {cell['parallel'] or 'one process'}, {cell['processes']} x {cell['batch_size']}"


def _line(cell: Cell) -> str:
    if cell["status"] != "ok":
        return f"{_place(cell):<28} {benchmark.reason(cell)}"
    run = cell["runs"][-1]
    return f"{_place(cell):<28} {tables.format_time(run['step_ms']['median']):>9} a step {run['peak_mib']:10,.0f} MiB"


def torchrun(
    processes: int, command: list[str], options: Namespace, folder: Path, gpus: str | None = None
) -> tuple[int | None, str]:
    """The exit code of a torchrun job, None if it took too long, and what it printed. Whatever ends this, the job ends too."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    threads = str(max(1, (os.cpu_count() or 1) // max(options.processes)))  # alike in all cells
    environment = {"OMP_NUM_THREADS": threads} | os.environ | {"PYTHONPATH": paths}
    environment |= {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    with subprocess.Popen(
        launcher + command, cwd=folder, env=environment, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as job:  # fmt: skip
        try:
            said, _ = job.communicate(timeout=options.timeout)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            job.terminate()  # torchrun then ends its processes; it has ended but for a time-out or a second signal
    return job.returncode, said


def ending(code: int | None, said: str, options: Namespace) -> dict[str, Any]:
    """The status of a job that did not succeed, and the reason in one line."""
    if code is None:
        return {"status": "timed out", "reason": f"not done after {options.timeout} s"}
    lines = said.strip().splitlines() or [f"exit code {code}"]
    reason = next((line.partition("error: ")[2] for line in lines if line.startswith("error: ")), lines[-1])[:500]
    killed = re.search(r"exitcode *: *-9\b|Signal 9 \(SIGKILL\)", said)
    if killed and not reason.startswith("out of memory"):
        reason = "killed by the system (SIGKILL), as it does when memory runs out"
    full = killed or "out of memory" in reason or "of memory, and" in reason  # the last: refused before it began
    return {"status": "out of memory" if full else "failed", "reason": reason}


def run_job(cell: Cell, model: benchmark.Model, options: Namespace, profiled: bool, gpus: str | None = None) -> dict[str, Any]:
    """The outcome of one job of a cell: its status and reason, and if that is "ok" what the job measured."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profiles = folder / "profiles"
        steps = options.num_steps + (options.profile_steps + 1) * profiled
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
        command += ["--profile-dir", str(profiles), "--profile-steps", str(options.profile_steps)] if profiled else []
        code, said = torchrun(cell["processes"], command, options, folder, gpus)
        if code != 0 or not (folder / "metrics.json").exists():
            return ending(code, said, options)
        run = run_record.read(folder / "metrics.json")
        memory = {
            "kind": run["memory"]["kind"],
            "peak_mib": max(run.get("ranks", {}).get("peak_mib", [run["memory"]["peak_mib"]])),
        }
        outcome = {key: run[key] for key in ("device", "environment", "parameters")} | {"status": "ok", "reason": None}
        outcome["run"] = memory | {"step_ms": {key: run["step_ms"][key] for key in ("median", "p20", "p80", "count")}}
        if profiled:
            outcome["traced"] = traced(profiles, cell, model)
            if options.keep_traces:
                kept = re.sub(r"\W+", "_", _place(cell))
                shutil.copytree(profiles, options.output_dir / "traces" / kept, dirs_exist_ok=True)
        return outcome


def traced(profiles: Path, cell: Cell, model: benchmark.Model) -> dict[str, Any]:
    """The keys of a cell that come from the traces of its job, or the reason why the traces give none."""
    try:
        if cell["processes"] == 1:
            return {"shares": shares(step_profile.read(step_profile.find(profiles)))}
        paths = communication.find(profiles)
        if len(paths) != cell["processes"]:
            raise UsageError(f"{len(paths)} processes of {cell['processes']} wrote a trace")
        loaded = [communication.load(path, cell["processes"]) for path in paths]
        counts = communication.counted(loaded[0])
        if eager := sorted(profiles.glob("eager_trace_2*.json")):  # a captured step's trace has no sizes: those of the eager one
            counts = communication.counted(communication.load(eager[0], cell["processes"])) or counts
        beside_backward = getattr(model.load().TinyLlama, "optimizer_communicates", False)
        return {"ranks": communication.split(loaded), "collectives": placed(counts, cell["parallel"], beside_backward)}
    except UsageError as error:
        return {"trace_problem": str(error)}


def shares(profile: dict[str, Any]) -> dict[str, float]:
    """Shares of forward pass, backward pass and optimizer in a profiled step, by kernels or on a CPU by operators."""
    spans = step_profile.span_milliseconds(profile).values()
    times = {phase: max(0.0, sum(phases.get(phase, 0.0) for phases in spans)) for phase in PHASES}
    total = sum(times.values())
    if not total:
        raise UsageError("the profile of one process holds no time of any phase")
    return {phase: time / total for phase, time in times.items()}


def placed(counts: dict[str, tuple[float, float | None]], form: str, beside_backward: bool) -> list[Collectives]:
    """The collectives of a step by kind, and what they can overlap with.

    Gradients are sent beside the backward pass. Weights are sent after the update, or in fsdp beside both passes.

    Args:
        beside_backward: whether the update is, too, and so the weights that it sends.
    """
    found: list[Collectives] = []
    for kind, (count, size) in counts.items():
        weights = kind in ("all_gather", "broadcast")
        places = ["forward", "backward"] if weights and form == "fsdp" else ["backward"]
        places = ["nothing"] if weights and form != "fsdp" and not beside_backward else places
        part = {"count": count / len(places), "bytes": None if size is None else size / len(places)}
        found += [{"kind": kind, **part, "beside": place} for place in places]
    return found


# ------------------------------------------------------------------------------------------------------------- the link


def link(options: Namespace, needed: bool) -> tuple[Link | None, str | None]:
    """The link of the model on paper: what was given, and for the rest times of all-reduces.

    Returns:
        None if nothing needs it, or if it could not be measured, and then why.
    """
    given = {"gb_per_second": options.link_gbs, "microseconds": options.link_us}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) == 2:
        return {**given, "source": "given", "messages": []}, None
    if not needed:
        return None, None
    processes = min({*options.processes} - {1})
    with tempfile.TemporaryDirectory() as name:
        result = Path(name, "link.json")
        command = ["-m", __name__, str(result), options.device, str(options.timeout)]
        code, said = torchrun(processes, command, options, Path(name))
        if code != 0:
            return None, f"the link was not measured: {ending(code, said, options)['reason']}"
        messages = files.read_json(result)
    found = data_parallel.link_of([(each["bytes"], each["ms"]) for each in messages], processes)
    source = f"all-reduces between {processes} processes" + "".join(f"; {name} given" for name in given)
    return {**found._asdict(), **given, "source": source, "messages": messages}, None


def main() -> None:
    """Times all-reduces in each process of a torchrun job; the first writes them."""
    path, device, timeout = Path(sys.argv[1]), devices.select(sys.argv[2]), float(sys.argv[3])
    distributed.start(Namespace(parallel="ddp", capture_step=True, distributed_timeout=timeout, batch_size=1), device)
    messages = []
    for nbytes in LINK_BYTES[device.type]:
        message = torch.zeros(nbytes // 4, device=device)
        times = timed(_repeated(lambda message=message: torch.distributed.all_reduce(message), device), device)
        messages.append({"bytes": nbytes, "ms": summarize(times)["median"] / REPEATED})
    if ranks.here().main_process:
        files.write_json(path, messages)
    torch.distributed.destroy_process_group()


def _repeated(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Does it REPEATED times; on a GPU as one graph, because the host launches slower than a small message passes a link."""
    if devices.is_gpu(device):
        return devices.capture_graph(work, REPEATED, collectives=True)
    return lambda: [work() for _ in range(REPEATED)]


# ----------------------------------------------------------------------------------------------------------- tabulating

Table = tuple[list[str], list[list[object]]]


def read(path: Path) -> Scaling:
    """A scaling.json, with runs wherever the status is "ok".

    Raises:
        UsageError: the file is missing, damaged or of another schema.
    """
    measured = files.read(path, Scaling)
    for number, cell in enumerate(measured["cells"]):
        if cell["status"] == "ok" and not (cell["runs"] and measured["device"] and measured["environment"]):
            raise UsageError(f"{path}: cells.{number}: nothing was measured, but the status is ok")
        if (cell["parallel"] is None) != (cell["processes"] == 1):
            raise UsageError(f"{path}: cells.{number}.parallel: one process has no form, and several have one")
    return measured


def step_of(cell: Cell) -> float:
    return median(run["step_ms"]["median"] for run in cell["runs"])


def _baseline(measured: Scaling, model: str, batch_size: int) -> Cell | None:
    """The cell of one process, if it was measured."""
    cells = (cell for cell in measured["cells"] if cell["processes"] == 1 and cell["status"] == "ok")
    return next((cell for cell in cells if (cell["model"], cell["batch_size"]) == (model, batch_size)), None)


def transfers(measured: Scaling, model: str, form: str, parameters: int) -> list[data_parallel.Transfer]:
    """The collectives of a step: as the traces of the fewest processes show them, or as the form has them on paper."""
    for cell in measured["cells"]:  # fewest processes first
        found = cell.get("collectives", [])
        known = all(each["bytes"] is not None and each["kind"] in data_parallel.KINDS for each in found)
        if (cell["model"], cell["parallel"]) == (model, form) and found and known:
            return [data_parallel.Transfer(each["kind"], each["bytes"], each["count"], each["beside"]) for each in found]
    return data_parallel.transfers(form, parameters, measured["model"]["num_layers"])


def predicted(measured: Scaling, scaling: str, model: str, form: str, processes: int) -> tuple[float, float] | None:
    """Milliseconds of a step and efficiency by the model on paper, if the step on one process and a link are known."""
    one = _baseline(measured, model, measured["batch_size" if scaling == "weak" else "global_batch_size"])
    if not one or "shares" not in one or not measured["link"]:
        return None
    whole, share = step_of(one), 1.0 if scaling == "weak" else 1 / processes
    step = data_parallel.Step(*(whole * one["shares"].get(phase, 0.0) for phase in PHASES))
    path = data_parallel.Link(measured["link"]["gb_per_second"], measured["link"]["microseconds"])
    moved = transfers(measured, model, form, one.get("parameters", 1))
    ms = data_parallel.step_ms(form, moved, step, processes, path, share)
    return (ms, data_parallel.efficiency(whole, ms, share)) if ms else None


def results(measured: Scaling) -> list[dict[str, Any]]:
    """COLUMNS of each cell in weak scaling, then in strong scaling (None if not measured); communication is the ranks' mean."""
    rows = []
    for scaling in ("weak", "strong"):
        size = measured["batch_size"] if scaling == "weak" else measured["global_batch_size"]
        for cell in measured["cells"]:
            n = cell["processes"]
            if cell["batch_size"] * (1 if scaling == "weak" else n) != size:
                continue
            row = dict.fromkeys(COLUMNS) | {name: cell[name] for name in COLUMNS[1:6]} | {"scaling": scaling}
            paper = predicted(measured, scaling, cell["model"], cell["parallel"], n) if cell["parallel"] else None
            row |= dict(zip(("model_ms", "model_efficiency"), paper or (None, None), strict=True))
            if cell["status"] == "ok":
                row |= {name: median(run["step_ms"][name] for run in cell["runs"]) for name in ("p20", "p80")}
                row |= {"ms": step_of(cell), "repeats": len(cell["runs"])}
                row["peak_mib"] = median(run["peak_mib"] for run in cell["runs"])
                row["tokens_per_second"] = n * cell["batch_size"] * measured["sequence_length"] / row["ms"] * 1e3
                one = _baseline(measured, cell["model"], size)
                row["efficiency"] = one and data_parallel.efficiency(step_of(one), row["ms"], 1 if scaling == "weak" else 1 / n)
                row["model_error"] = paper and paper[0] / row["ms"] - 1
                for name in communication.Split.__annotations__ if cell.get("ranks") else ():
                    row[name] = sum(rank[name] for rank in cell["ranks"]) / len(cell["ranks"])
            rows.append(row)
    return rows


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"


def _named(row: dict[str, Any]) -> list[object]:
    return [row["model"], row["parallel"] or "one process", row["processes"], row["batch_size"]]


NAMED = ["version", "form", "processes", "B of each"]


def step_table(rows: list[dict[str, Any]]) -> Table:
    """A row for each measured cell: step time, throughput, efficiency, memory, and the model's step time with its error."""
    rows = [row for row in rows if row["ms"]]
    unit, factor = tables.time_unit(max((row["ms"] for row in rows), default=1.0))
    body = []
    for row in rows:
        spread = " to ".join(tables.format_number(factor * row[name]) for name in ("p20", "p80"))
        end = [row["model_ms"] and factor * row["model_ms"], _percent(row["model_error"])]
        values = [factor * row["ms"], spread, row["repeats"], row["tokens_per_second"], _percent(row["efficiency"])]
        body.append([*_named(row), *values, row["peak_mib"], *end])
    columns = [f"{unit}/step", "p20 to p80", "repeats", "tokens/s", "efficiency", "peak MiB", f"on paper, {unit}", "its error"]
    return [*NAMED, *columns], body


def communication_table(rows: list[dict[str, Any]]) -> Table:
    """A row for each profiled cell: milliseconds of communication in a step, the mean of the ranks."""
    names = list(communication.Split.__annotations__)
    body = [[*_named(row), *(row[name] for name in names)] for row in rows if row["communication_ms"] is not None]
    columns = ["communication", "overlapped", "exposed", "waiting", "moving", "exposed waiting"]
    return [*NAMED, *(f"{name}, ms" for name in columns)], body


def model_table(measured: Scaling, scaling: str) -> Table:
    """A row for each number of GPUs, a column for each model and form: the efficiency that the model on paper predicts."""
    pairs = list(dict.fromkeys((cell["model"], cell["parallel"]) for cell in measured["cells"] if cell["parallel"]))
    counts = [n for n in EXTRAPOLATED if scaling == "weak" or measured["global_batch_size"] % n == 0]
    found = {pair: [predicted(measured, scaling, *pair, n) for n in counts] for pair in pairs}
    found = {pair: values for pair, values in found.items() if all(values)}
    body = [[n, *(_percent(values[i][1]) for values in found.values())] for i, n in enumerate(counts)] if found else []
    return ["GPUs", *(f"{model}, {form}: model" for model, form in found)], body


def multicast(measured: Scaling) -> str:
    """Whether NVLink multicast was off, in one sentence."""
    value = measured["variables"].get(MULTICAST)
    if value is None:
        return f"{MULTICAST} was not set: NCCL decides about NVLink multicast."
    return f"NVLink multicast was {'off' if value == '0' else 'left to NCCL'} ({MULTICAST}={value})."


def error_of_model(rows: list[dict[str, Any]]) -> str | None:
    """How far the model was from what was measured, in one sentence."""
    errors = [(abs(row["model_error"]), row) for row in rows if row["model_error"] is not None]
    if not errors:
        return None
    worst, row = max(errors, key=lambda error: error[0])
    middle = median(error for error, _ in errors)
    return (
        f"The step time of the model on paper is off by {_percent(middle)} at the median and by {_percent(worst)} at most "
        f"({row['scaling']}, {_place(row)})."
    )


def analyze(path: Path) -> Report:
    """The report on a scaling.json; it writes scaling.csv, .html, .json, .md and .png.

    Raises:
        UsageError: the file is missing, damaged or of another schema.
        RunError: nothing in it was measured.
    """
    measured = read(path)
    if all(cell["status"] != "ok" for cell in measured["cells"]):
        first = next(iter(measured["cells"]), None)
        raise RunError(
            f"nothing was measured; the first: {_place(first)}, {benchmark.reason(first)}" if first else "nothing was measured"
        )
    rows = results(measured)
    training = {"sequence_length": measured["sequence_length"]}
    conditions = run_record.describe(measured | {"training": training}, "batch_size")
    report = Report("Scaling over processes")
    report.json("scaling", measured)
    report.text(
        f"{conditions}. Step times are medians. Jobs of each cell: {measured['repeats']}; timed steps in each: "
        f"{measured['steps']}. Tokens/s are those of the job, memory is that of the process that took most.",
        *(
            ["Jobs ran at the same time where there were GPUs left for them, and shared the host."]
            * measured.get("filled", False)
        ),
        multicast(measured),
        f"Made by `{measured['command']}` on {measured['date']}.",
    )
    report.figure(lambda: figure(measured, rows, conditions), "scaling", "Efficiency over the number of processes")
    report.csv("scaling", COLUMNS, [[row[name] for name in COLUMNS] for row in rows])
    titles = {
        "weak": f"batch {measured['batch_size']} of each process",
        "strong": f"batch {measured['global_batch_size']} of the job",
    }
    for scaling, fixed in titles.items():
        shown = [row for row in rows if row["scaling"] == scaling]
        report.section(f"{scaling.capitalize()} scaling: {fixed}")
        report.table(*step_table(shown), least=["repeats", "peak MiB"])
        report.text(*run_record.noise({_place(row).replace(",", ""): row | {"median": row["ms"]} for row in shown if row["ms"]}))
    if communication_table(rows)[1]:
        report.section("Communication in a step")
        for scaling in titles:
            header, body = communication_table([row for row in rows if row["scaling"] == scaling])
            if body:
                report.table(header, body, title=f"{scaling} scaling", least=["exposed waiting, ms"])
        report.text(
            "From the traces of a few profiled steps, which the profiler slows; means over ranks and steps. Communication is "
            "overlapped + exposed, and also waiting + moving. Waiting is what a collective takes on a rank beyond the shortest "
            "time of the same collective among the ranks."
        )
    _model(report, measured, rows)
    missing = [(_place(cell), benchmark.reason(cell)) for cell in measured["cells"] if cell["status"] != "ok"]
    missing += [
        (_place(cell), f"no communication: {cell['trace_problem']}") for cell in measured["cells"] if "trace_problem" in cell
    ]
    missing += [line.partition(": ")[::2] for line in measured["left_out"]]
    if measured["status"] == "interrupted":
        missing.insert(0, ("The run was interrupted", "cells are missing, or lack repeats"))
    if missing:
        report.section("Not measured")
        report.facts(missing)
    return report


def _model(report: Report, measured: Scaling, rows: list[dict[str, Any]]) -> None:
    found = {scaling: model_table(measured, scaling) for scaling in ("weak", "strong")}
    if not any(body for _, body in found.values()):
        return
    report.section("A model on paper")
    report.text(
        f"A model, not a measurement. Link: {tables.format_number(measured['link']['gb_per_second'])} GB/s in each direction, "
        f"{tables.format_number(measured['link']['microseconds'])} us ({measured['link']['source']}). All GPUs are taken to have "
        "this link, also those beyond one host.",
        *filter(None, [error_of_model(rows)]),
    )
    for scaling, (header, body) in found.items():
        if body:
            report.table(header, body, title=f"{scaling} scaling: efficiency by the model")


def figure(measured: Scaling, rows: list[dict[str, Any]], title: str) -> "Figure":
    """Efficiency in weak and in strong scaling: points were measured, dashed lines are the model."""
    result = plots.new(10, 4.6)
    result.suptitle(f"Scaling: {title}".replace("; ", "\n"), fontsize=10)
    pairs = list(dict.fromkeys((cell["model"], cell["parallel"]) for cell in measured["cells"] if cell["parallel"]))
    for axes, scaling in zip(result.subplots(1, 2, sharey=True), ("weak", "strong"), strict=True):
        header, body = model_table(measured, scaling)
        for i, (model, form) in enumerate(pairs):
            own = [row for row in rows if (row["scaling"], row["model"], row["parallel"]) == (scaling, model, form)]
            points = [(row["processes"], 100 * row["efficiency"]) for row in own if row["efficiency"]]
            colour, marker = benchmark.COLOURS[i % 7], benchmark.MARKERS[i % 7]
            axes.plot(
                *zip(*points, strict=True) if points else ([], []), marker, color=colour, label=f"{model}, {form}: measured"
            )
            if f"{model}, {form}: model" in header:
                counts = [row[0] for row in body]
                values = [100 * predicted(measured, scaling, model, form, n)[1] for n in counts]
                axes.plot(counts, values, "--", color=colour, label=f"{model}, {form}: model")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set(
            title=f"{scaling} scaling",
            xlabel="GPUs" if measured["device"]["kind"] != "cpu" else "processes",
            ylabel="efficiency, %",
        )
        axes.set_ylim(bottom=0)
        axes.label_outer()
        axes.grid(True, color="0.9")
    handles, labels = result.axes[0].get_legend_handles_labels()
    if labels:
        result.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4))
    return result


if __name__ == "__main__":
    cli.command(main)
