"""Benchmarks models at equal shapes: versions and external baselines, each in a new process, in turn.

A cell is a model at a batch size and a sequence length. Its process builds the model from the seed's weights, checks that every
parameter gets a gradient, takes a few training steps that do not count (they compile), and then times steps on one batch. The
repeats of a shape take turns (a, b, a, b), so that a slow spell of the machine affects all models. On a machine with several GPUs
`--gpus N` keeps N processes running, each on a GPU of its own. Peak memory is the maximum
over the timed steps: of PyTorch's allocator on a GPU, without its reserve and the CUDA context, and of the whole process on a
CPU.

Versions ask PyTorch for deterministic algorithms. External baselines run without them, as their users run them, because PyTorch
then picks faster kernels, such as cuDNN's backward pass of attention.

Accuracy is measured at the smallest shape only: the loss after N steps from the same weights on the same batches of the synthetic
source, and the errors of logits and gradients against the baseline in float64 (`studies.accuracy`), in the benchmark's precision.

A time or a peak of a cell is the median over its repeats. Ratios are against the baseline, which is the first version by its
folder, or against the first model where the baseline was not measured. Above 1 a model is faster, or needs less memory. The range
of a speed-up is that of the repeats, each against the same repeat of the other model.
"""

import importlib.metadata
import itertools
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from operator import itemgetter
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from common import ROOT, cli, data, files, signals
from common import device as devices
from common.analysis.output import plots, tables
from common.analysis.output.report import Report
from common.analysis.profiles import run_record
from common.errors import RunError, UsageError
from common.precision import SHORT, Precision
from common.progress import progress
from common.studies import accuracy, external_baselines
from common.timing import benchmark, summarize
from common.training import capture, record, version_files
from common.training import step as steps

import torch
from pydantic import Field, PositiveInt
from typing_extensions import NotRequired, TypedDict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA = "tiny-llama-benchmark/1"
METRICS = ("throughput", "memory", "accuracy")
COMPILED, CAPTURED = "-compile", "-captured"  # ends of a model's name: with torch.compile, and with its step captured
WARMUP = 3  # training steps before the timed ones
COLUMNS = ("model", "batch_size", "sequence_length", "status", "ms", "p20", "p80", "repeats", "tokens_per_second", "speedup",
           "peak_mib", "memory_ratio")  # fmt: skip
COLOURS = (plots.BLACK, plots.BLUE, plots.SKY, plots.VERMILION, plots.GREEN, plots.ORANGE, plots.PURPLE)
MARKERS = "osD^v<>"
MEMORY = {
    "GPU allocator": "Peak of PyTorch's allocator over the timed steps: weights, gradients, optimizer state, activations and "
    "temporary tensors, without the CUDA context.",
    "process RSS": "Peak resident memory of the whole process over the timed steps, with the interpreter, PyTorch and what the "
    "model imports.",
}


class Run(run_record.PeakMemory):
    """One process of a cell."""

    step_ms: run_record.Summary
    reserved_mib: NotRequired[files.Amount]  # on a GPU: what the pools of the allocator held


class Entry(TypedDict):
    model: str
    batch_size: PositiveInt
    sequence_length: PositiveInt
    status: Literal["ok", "out of memory", "timed out", "failed", "not run"]
    reason: str | None  # one line


class Cell(Entry):
    runs: list[Run]


class Accuracy(Entry):
    """The other keys are there if the status is "ok"; an error can be infinite."""

    loss: NotRequired[float]  # nats
    floor: NotRequired[float]  # the entropy of the source
    logits_error: NotRequired[float]
    gradient_error: NotRequired[float]  # the largest of all gradients
    gradient: NotRequired[str]  # the parameter that it belongs to


class Benchmark(run_record.Header):
    """The content of benchmark.json."""

    schema: Literal[SCHEMA]
    status: Literal["completed", "interrupted"]
    device: run_record.Device | None  # None, as the environment, if no process came far enough to describe it
    environment: run_record.Environment | None
    packages: dict[str, str]  # versions of the packages that the external baselines need
    model: run_record.ModelOfAnyLength
    precision: run_record.Compute
    seed: int
    models: Annotated[list[str], Field(min_length=1)]
    metrics: Annotated[list[Literal[METRICS]], Field(min_length=1)]
    batch_sizes: Annotated[list[PositiveInt], Field(min_length=1)]
    sequence_lengths: Annotated[list[PositiveInt], Field(min_length=1)]
    steps: PositiveInt
    repeats: PositiveInt
    accuracy_steps: PositiveInt
    cells: list[Cell]  # one for each model and shape, the smallest shape first
    accuracy: list[Accuracy]


# ------------------------------------------------------------------------------------------------------------ measuring


Job = tuple[dict[str, Any], Callable[[], dict[str, Any]]]  # an entry, and what finds it in a process of its own


class Model(NamedTuple):
    """A version by its file and flags, or an external baseline, which has no file."""

    name: str
    path: Path | None = None
    flags: tuple[str, ...] = ()
    captured: bool = False

    def load(self) -> ModuleType | external_baselines.Peer:
        return version_files.load(self.path) if self.path else external_baselines.PEERS[self.name.removesuffix(CAPTURED)]


def version_scripts(root: Path = ROOT) -> dict[str, Path]:
    """The file of each version by name, in the order of the folders; the first one is the baseline."""
    return {path.stem.removeprefix("tiny_llama_"): path for path in sorted(root.glob("version*_*/tiny_llama_v*.py"))}


def known_models(root: Path = ROOT) -> dict[str, Model]:
    """The models by name: the versions in the folders of `root`, their variants, and the external baselines."""
    found, eager = [], []  # eager: those that are captured only when asked to be
    for name, path in version_scripts(root).items():
        version, own = version_files.load(path), [Model(name, path)]
        if "torch-compile" in getattr(version, "SWITCHES", {}):
            own.append(Model(name + COMPILED, path, ("--enable-torch-compile",)))
        found += own
        eager += [] if getattr(version, "CAPTURED", False) else own
    peers = external_baselines.PEERS
    found += map(Model, peers)
    eager += [Model(name) for name, peer in peers.items() if not peer.CAPTURED]
    found += [model._replace(name=model.name + CAPTURED, captured=True) for model in eager]
    return {model.name: model for model in found}


def available(options: Namespace, known: dict[str, Model]) -> list[str]:
    """The names of the models that can run here, without `-captured` ones; a line says why each other model cannot."""
    device, names = devices.select(options.device), []
    for name, model in known.items():
        if model.captured:
            continue
        problem = devices.compile_problem(device) if name.endswith(COMPILED) else None
        try:
            if not model.path:
                model.load().check(device, cli.amp_dtype(options))
        except UsageError as error:
            problem = str(error)
        if problem:
            print(f"leaves out {name}: {problem}")
        else:
            names.append(name)
    return names


def plan(options: Namespace, known: dict[str, Model]) -> tuple[list[Model], list[Namespace]]:
    """The models, and the resolved options of each shape, smallest first.

    Raises:
        UsageError: a name is unknown, a value is wrong or given twice, or a model cannot run here.
    """
    for name, valid in {"models": known, "metrics": METRICS, "batch_sizes": (), "seq_lengths": ()}.items():
        flag, values = "--" + name.replace("_", "-"), getattr(options, name)
        for value in values:
            if valid and value not in valid:
                raise UsageError(f"{flag}: there is no {value!r}; there are {', '.join(valid)}")
            if values.count(value) > 1:
                raise UsageError(f"{flag}: {value} is given twice")
    models, device = [known[name] for name in options.models], devices.select(options.device)
    for model in models:
        if model.captured:
            capture.check_supported(device)
        if not model.path:
            model.load().check(device, cli.amp_dtype(options))
    shapes = [dict(batch_size=b, seq_len=s) for s in sorted(options.seq_lengths) for b in sorted(options.batch_sizes)]
    return models, [version_files.resolve(Namespace(**vars(options) | shape)) for shape in shapes]


def measure(models: list[Model], shapes: list[Namespace], baseline: Model, path: Path) -> int:
    """Measures what `plan` returned; after each process it prints a line and writes benchmark.json (`path`).

    Returns:
        The exit code: 0, 1 if a cell failed other than by memory, 128 + n if stopped by signal n.
    """
    options, packages = shapes[0], {package for model in models if not model.path for package in model.load().packages}
    measured = record.header(SCHEMA, None, SHORT[cli.amp_dtype(options) or torch.float32]) | {
        "status": "interrupted",  # until the end is reached
        "packages": {package: importlib.metadata.version(package) for package in sorted(packages)},
        "model": options.model.model_dump(exclude={"max_sequence_length"}),  # which grows with the shape
        "seed": options.seed, "models": [model.name for model in models], "metrics": options.metrics,
        "batch_sizes": sorted(options.batch_sizes), "sequence_lengths": sorted(options.seq_lengths),
        "steps": options.num_steps, "repeats": options.repeats, "accuracy_steps": options.accuracy_steps,
        "cells": [], "accuracy": [],
    }  # fmt: skip
    jobs = []
    if "accuracy" in options.metrics:
        jobs = [(_blank(model, options), partial(errors, model, baseline, options)) for model in models]
        measured["accuracy"] = [entry for entry, _ in jobs]
    for shape in shapes if options.metrics != ["accuracy"] else []:
        row = [(_blank(model, shape) | {"runs": []}, partial(speed, model, shape)) for model in models]
        measured["cells"] += [cell for cell, _ in row]
        jobs += row * options.repeats

    with signals.deferred() as received, ExitStack() as at_the_end:

        def run(job: Job, gpu: str | None) -> dict[str, Any] | None:
            entry, work = job
            if received or entry["status"] not in ("ok", "not run"):
                return None  # what has failed is not repeated
            return run_process(work, options, gpu)

        outcomes = side_by_side(jobs, run, visible_gpus(options.gpus), at_the_end)
        for number, (entry, _) in enumerate(jobs, 1):
            with progress(f"{entry['model']}, B {entry['batch_size']}, S {entry['sequence_length']}"):
                outcome = next(outcomes)
            if received and outcome and outcome["status"] != "ok":
                break  # Ctrl-C reaches the process too
            if not outcome or entry["status"] not in ("ok", "not run"):
                continue
            entry |= {key: outcome[key] for key in ("status", "reason")}
            measured |= {key: outcome[key] for key in ("device", "environment") if key in outcome}
            if entry["status"] == "ok":
                store = entry["runs"].append if "runs" in entry else entry.update
                store(outcome["found"])
            files.write_measurement(path, measured, "--output-dir")
            print(f"{number:4d} of {len(jobs)}  {_line(entry)}", flush=True)
    measured["status"] = "interrupted" if received else "completed"
    files.write_measurement(path, measured, "--output-dir")
    failed = any(entry["status"] in ("failed", "timed out") for entry, _ in jobs)
    return 128 + received[0] if received else int(failed)


def _blank(model: Model, shape: Namespace) -> dict[str, Any]:
    where = {"model": model.name, "batch_size": shape.batch_size, "sequence_length": shape.seq_len}
    return where | {"status": "not run", "reason": None}


def _line(entry: dict[str, Any]) -> str:
    """The outcome of a process, for the terminal."""
    if entry["status"] != "ok":
        found = reason(entry)
    elif "runs" in entry:
        run = entry["runs"][-1]
        found = f"{tables.format_time(run['step_ms']['median']):>9} a step {run['peak_mib']:10,.0f} MiB"
    else:
        found = f"loss {entry['loss']:.5f}, largest gradient error {entry['gradient_error']:.2g}"
    return f"{entry['model']:<12} B {entry['batch_size']:<4} S {entry['sequence_length']:<5} {found}"


def side_by_side(
    jobs: list[Any], run: Callable[[Any, str | None], Any], places: list[str | None], at_the_end: ExitStack
) -> Iterator[Any]:
    """The results of run(job, place) in the order of the jobs, of which as many run at once as there are places.

    Args:
        places: CUDA_VISIBLE_DEVICES of each of them. With one place, jobs run in this thread, where signals arrive.
        at_the_end: when it closes, for whatever reason, no further job starts.
    """
    free: SimpleQueue[str | None] = SimpleQueue()
    for place in places:
        free.put(place)

    def run_in_a_free_place(job: Any) -> Any:
        place = free.get()
        try:
            return run(job, place)
        finally:
            free.put(place)

    pool = at_the_end.enter_context(ThreadPoolExecutor(len(places)))
    at_the_end.callback(pool.shutdown, wait=False, cancel_futures=True)
    return iter((pool.map if len(places) > 1 else map)(run_in_a_free_place, jobs))


def visible_gpus(count: int) -> list[str | None]:
    """The value of CUDA_VISIBLE_DEVICES for each of `count` GPUs; None for one GPU, which keeps the variable as it is.

    Raises:
        UsageError: there are fewer.
    """
    if count == 1:
        return [None]
    present = torch.cuda.device_count()
    if count > present:
        raise UsageError(f"--gpus {count}: there are {present} GPUs")
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (named.split(",") if named else [str(number) for number in range(present)])[:count]


def run_process(work: Callable[[], dict[str, Any]], options: Namespace, gpu: str | None = None) -> dict[str, Any]:
    """The outcome of the work in a new process: its status, the reason if it is not "ok", and what `work` returned (`found`)."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths} | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        try:
            done = subprocess.run(
                [sys.executable, "-m", __name__], input=pickle.dumps((work, options.device, result)), timeout=options.timeout,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"status": "timed out", "reason": f"not done after {options.timeout} s"}
        if result.exists():
            return files.read_json(result)
    if done.returncode == -signal.SIGKILL:
        return {"status": "out of memory", "reason": "killed by the system (SIGKILL), as it does when memory runs out"}
    last = done.stdout.decode(errors="replace").strip().rpartition("\n")[2]
    return {"status": "failed", "reason": last[:500] or f"exit code {done.returncode}"}


def main() -> None:
    """Does, in a process of its own, the job that standard input holds, and writes the outcome."""
    work, device, result = pickle.loads(sys.stdin.buffer.read())
    outcome = {"device": devices.describe(devices.select(device)), "environment": devices.environment()}
    try:
        outcome |= {"status": "ok", "reason": None, "found": work()}
    except Exception as error:  # a cell that fails is a result; the others go on
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        outcome |= {"status": "out of memory" if devices.is_out_of_memory(error) else "failed", "reason": said[:500]}
    files.write_json(result, outcome)


def built(model: Model, options: Namespace) -> tuple[steps.Prepared, Precision]:
    """A new model's training step, checked, and its precision. An external baseline runs without deterministic algorithms."""
    version, device = model.load(), devices.select(options.device)
    settings = version_files.switched(version, options, *model.flags)
    settings.capture_step = model.captured or None  # as the model has it
    precision = Precision(device, cli.amp_dtype(options))
    devices.prepare(device, options.seed)
    if not model.path:
        torch.use_deterministic_algorithms(False)  # which would make PyTorch pick slower kernels than its users get
    return steps.prepare(version, settings, precision, version_files.random_batch(options, device)), precision


def speed(model: Model, options: Namespace) -> dict[str, Any]:
    """Step times and peak memory, as a `Run`."""
    prepared, precision = built(model, options)
    batch = version_files.random_batch(options, precision.device)
    for _ in range(WARMUP):
        prepared.step(batch)
    devices.synchronize(precision.device)
    devices.reset_peak_memory(precision.device)
    times = benchmark(lambda: prepared.step(batch), precision.device, warmup=1, iterations=options.num_steps)
    return {"step_ms": summarize(times)} | devices.peak_memory(precision.device, prepared.graph_peak_bytes)


def errors(model: Model, baseline: Model, options: Namespace) -> dict[str, Any]:
    """The loss after `accuracy_steps` training steps, and the errors against float64, as in `Accuracy`."""
    count, (prepared, precision) = options.accuracy_steps, built(model, options)
    source = data.markov(options.model.vocab_size, options.seed)
    batches = data.Batches(source, options.batch_size, options.seq_len, count + 1, options.seed, precision.device)
    loss = [prepared.step(batches[i]) for i in range(count + 1)][-1].item()  # a step returns the loss from before its update
    if not math.isfinite(loss):
        raise RunError(f"the loss after {count} steps is {loss}")
    found = accuracy.errors_against_float64(baseline.load(), model.load(), options, model.flags)
    worst = max((name for name in found if name.startswith("gradient of ")), key=found.__getitem__)
    return {
        "loss": loss, "floor": source.entropy_floor, "logits_error": found["logits"], "gradient_error": found[worst],
        "gradient": worst.removeprefix("gradient of "),
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- tabulating

Measured = dict[str, Any]  # see Benchmark
Table = tuple[list[str], list[list[object]]]


def read(path: Path) -> Benchmark:
    """A benchmark.json with a cell for each model and shape, and with numbers wherever the status is "ok".

    Raises:
        UsageError: the file is missing, damaged or of another schema.
    """
    measured = files.read(path, Benchmark)
    cells = {(cell["model"], cell["batch_size"], cell["sequence_length"]) for cell in measured["cells"]}
    wanted = itertools.product(measured["models"], measured["batch_sizes"], measured["sequence_lengths"])
    if missing := [place for place in wanted if place not in cells and measured["metrics"] != ["accuracy"]]:
        raise UsageError(f"{path}: cells: there is none of {', '.join(map(str, missing[0]))}")
    for part in ("cells", "accuracy"):
        for number, entry in enumerate(measured[part]):
            wanted = {"cells": ["runs"], "accuracy": ["loss", "logits_error", "gradient_error", "gradient"]}[part]
            wrong = [key for key in wanted if entry["status"] == "ok" and (key not in entry or entry[key] == [])]
            if wrong:
                raise UsageError(f"{path}: {part}.{number}.{wrong[0]}: nothing was measured, but the status is ok")
            if entry["status"] == "ok" and not (measured["device"] and measured["environment"]):
                raise UsageError(f"{path}: device and environment: they are null, but something was measured")
    return measured


def analyze(path: Path) -> Report:
    """The report on a benchmark.json; it writes benchmark.csv, .html, .json, .md and .png.

    Raises:
        UsageError: the file is missing, damaged or of another schema.
        RunError: nothing in it was measured.
    """
    measured = read(path)
    entries, against, found = measured["cells"] + measured["accuracy"], reference(measured), results(measured).values()
    if all(entry["status"] != "ok" for entry in entries):
        raise RunError(f"nothing was measured; the first: {entries[0]['model']}, {reason(entries[0])}")
    where = run_record.describe(measured | {"training": {}}, "batch_size", "sequence_length")
    packages = ", ".join(f"{name} {version}" for name, version in measured["packages"].items())
    conditions = "; ".join(filter(None, [where, packages]))
    timed = {_place(cell).replace(",", ""): cell | {"median": cell["ms"]} for cell in found if cell["ms"]}
    report = Report("Benchmark")
    report.json("benchmark", measured)
    report.text(
        f"{conditions}. Numbers are medians. Processes of each cell: {measured['repeats']}; timed steps in each: "
        f"{measured['steps']}.",
        f"Made by `{measured['command']}` on {measured['date']}.",
    )
    if timed:
        report.figure(lambda: figure(measured, conditions), "benchmark", "Throughput and peak memory over the batch size")
        report.csv("benchmark", COLUMNS, [[cell[name] for name in COLUMNS] for cell in found])
    if "throughput" in measured["metrics"]:
        report.section(f"Tokens/s (and speed-up against {against})")
        report.table(*throughput_table(measured))
        report.section("Step time")
        report.table(*step_table(measured))
        report.text(*run_record.noise(timed))
    if "memory" in measured["metrics"]:
        kind = next((run["kind"] for cell in measured["cells"] for run in cell["runs"]), "")
        report.section(f"Peak MiB, {kind} (and {against} / model)")
        report.table(*memory_table(measured))
        report.text(MEMORY.get(kind, ""))
    if timed and scaling_table(measured)[1]:
        report.section("Growth from the smallest to the largest")
        report.table(*scaling_table(measured))
    if "accuracy" in measured["metrics"]:
        baseline = next(iter(version_scripts()))
        report.section("Accuracy")
        report.table(*accuracy_table(measured))
        report.text(
            f"At B {measured['batch_sizes'][0]}, S {measured['sequence_lengths'][0]} only. Loss: after "
            f"{measured['accuracy_steps']} steps from the same weights on the same batches of the synthetic source. Errors: the "
            f"largest difference over the largest element, against {baseline} in float64; {baseline}'s own errors are rounding."
        )
    missing = [entry for entry in entries if entry["status"] != "ok"]
    facts = [(_place(entry) + ", accuracy" * ("runs" not in entry), reason(entry)) for entry in missing]
    if measured["status"] == "interrupted":
        facts.insert(0, ("The run was interrupted", "cells are missing, or lack repeats"))
    if facts:
        report.section("Not measured")
        report.facts(facts)
    return report


def _place(entry: dict[str, Any]) -> str:
    return f"{entry['model']}, B {entry['batch_size']}, S {entry['sequence_length']}"


def reason(entry: dict[str, Any]) -> str:
    """Why a cell was not measured, in one line."""
    return f"{entry['status']}: {entry['reason']}" if entry["reason"] else entry["status"]


def reference(measured: Measured) -> str:
    """The model that ratios are against."""
    baseline = next(iter(version_scripts()))
    return baseline if baseline in measured["models"] else measured["models"][0]


def results(measured: Measured) -> dict[tuple[str, int, int], dict[str, Any]]:
    """COLUMNS (None if not measured) and the ms of each repeat (`times`) of each cell, by model, batch size, sequence length."""
    found, against = {}, reference(measured)
    for cell in measured["cells"]:
        row = dict.fromkeys(COLUMNS) | {name: cell[name] for name in COLUMNS[:4]}
        if cell["status"] == "ok":
            ms, p20, p80 = (median(run["step_ms"][name] for run in cell["runs"]) for name in ("median", "p20", "p80"))
            rate, peak = row["batch_size"] * row["sequence_length"] / ms * 1e3, median(run["peak_mib"] for run in cell["runs"])
            row |= {"ms": ms, "p20": p20, "p80": p80, "repeats": len(cell["runs"]), "tokens_per_second": rate, "peak_mib": peak}
            row["times"] = [run["step_ms"]["median"] for run in cell["runs"]]
        found[row["model"], row["batch_size"], row["sequence_length"]] = row
    for (_, *shape), row in found.items():
        base = found.get((against, *shape))
        if base and base["ms"] and row["ms"]:
            row |= {"speedup": base["ms"] / row["ms"], "memory_ratio": base["peak_mib"] / row["peak_mib"]}
    return found


def ahead(measured: Measured, name: str) -> list[str]:
    """A phrase for each shape at which another model has a smaller median step time than `name`, or `name` has none."""
    found, phrases = results(measured), []
    for ours in (cell for cell in found.values() if cell["model"] == name):
        shape = ours["batch_size"], ours["sequence_length"]
        measured_cells = (cell for key, cell in found.items() if key[1:] == shape and cell["ms"])
        fastest = min(measured_cells, key=itemgetter("ms"), default=ours)
        if not ours["ms"]:
            phrases.append(f"{_place(ours)}: {ours['status']}")
        elif fastest["ms"] < ours["ms"]:
            theirs, own = tables.format_time(fastest["ms"]), tables.format_time(ours["ms"])
            phrases.append(f"{_place(fastest)} takes {theirs}, {name} {own}")
    return phrases


def _by_shape(measured: Measured, value: str, ratio: str) -> Table:
    """A row for each shape, a column for each model: the value, and its ratio against the reference."""
    found, against, rows = results(measured), reference(measured), []

    def shown(cell: dict[str, Any]) -> str:
        beside = f" ({cell[ratio]:.2f}x)" if cell[ratio] and cell["model"] != against else ""
        return f"{cell[value]:,.0f}{beside}" if cell[value] else cell["status"]

    for length in measured["sequence_lengths"]:
        for size in measured["batch_sizes"]:
            rows.append([size, length, *(shown(found[model, size, length]) for model in measured["models"])])
    return ["B", "S", *measured["models"]], rows


throughput_table = partial(_by_shape, value="tokens_per_second", ratio="speedup")
memory_table = partial(_by_shape, value="peak_mib", ratio="memory_ratio")


def step_table(measured: Measured) -> Table:
    """A row for each measured cell: the time of a step, and the range of its speed-up."""
    against, rows = reference(measured), []
    found = {key: cell for key, cell in results(measured).items() if cell["ms"]}
    unit, factor = tables.time_unit(max((cell["ms"] for cell in found.values()), default=1))
    for (model, *shape), cell in found.items():
        speedup = [None, ""]
        if cell["speedup"] and model != against:
            ratios = [theirs / ours for theirs, ours in zip(found[(against, *shape)]["times"], cell["times"], strict=False)]
            speedup = [cell["speedup"], f"{min(ratios):.3g} to {max(ratios):.3g}" if len(ratios) > 1 else ""]
        spread = " to ".join(tables.format_number(factor * cell[name]) for name in ("p20", "p80"))
        rows.append([model, *shape, factor * cell["ms"], spread, *speedup])
    return ["model", "B", "S", f"{unit}/step", "p20 to p80", "speed-up", "over the repeats"], rows


def scaling_table(measured: Measured) -> Table:
    """The growth of time, throughput and memory from the smallest to the largest batch size, and sequence length."""
    found, rows = results(measured), []
    sizes, lengths = measured["batch_sizes"], measured["sequence_lengths"]
    (least, most), (short, long) = (sizes[0], sizes[-1]), (lengths[0], lengths[-1])
    paths = [(f"B {least} to {most}", f"S {s}", (least, s), (most, s)) for s in lengths if least < most]
    paths += [(f"S {short} to {long}", f"B {b}", (b, short), (b, long)) for b in sizes if short < long]
    for model in measured["models"]:
        for growing, fixed, small, large in paths:
            before, after = found[(model, *small)], found[(model, *large)]
            if before["ms"] and after["ms"]:
                growth = [after[name] / before[name] for name in ("ms", "tokens_per_second", "peak_mib")]
                rows.append([model, growing, fixed, math.prod(large) / math.prod(small), *growth])
    return ["model", "growing", "at", "tokens x", "time x", "tokens/s x", "peak memory x"], rows


def accuracy_table(measured: Measured) -> Table:
    """The loss, its difference to the reference's, and the errors against float64."""
    good = {entry["model"]: entry for entry in measured["accuracy"] if entry["status"] == "ok"}
    against, rows = reference(measured), []
    for model, entry in good.items():
        difference = f"{entry['loss'] - good[against]['loss']:+.1e}" if against in good else ""
        values = [entry[key] for key in ("logits_error", "gradient_error", "gradient")]
        rows.append([model, f"{entry['loss']:.5f}", difference, *values])
    return ["model", "loss", f"minus {against}'s", "error of the logits", "largest of a gradient", "which is of"], rows


def figure(measured: Measured, title: str) -> "Figure":
    """Throughput above peak memory, over the batch size; a column for each sequence length."""
    found, lengths, sizes = results(measured), measured["sequence_lengths"], measured["batch_sizes"]
    fields = {"throughput": ("tokens/s", "tokens_per_second"), "memory": ("peak MiB", "peak_mib")}
    wanted = [labels for metric, labels in fields.items() if metric in measured["metrics"]]
    result = plots.new(1.5 + 4 * len(lengths), 1.2 + 3.6 * len(wanted))
    result.suptitle(f"Benchmark: {title}".replace("; ", "\n"), fontsize=10)
    grid = result.subplots(len(wanted), len(lengths), squeeze=False, sharex=True, sharey="row")
    for row, (unit, field) in zip(grid, wanted, strict=True):
        for axes, length in zip(row, lengths, strict=True):
            for i, model in enumerate(measured["models"]):
                values = [found[model, size, length][field] or math.nan for size in sizes]
                axes.plot(sizes, values, color=COLOURS[i % 7], marker=MARKERS[(i + i // 7) % 7], label=model)
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, map(str, sizes))
            axes.minorticks_off()
            axes.set(title=f"sequence length {length}", xlabel="batch size", ylabel=unit)
            axes.yaxis.set_major_formatter("{x:,.0f}")
            axes.label_outer()
            axes.grid(True, color="0.9")
        row[0].set_ylim(0, 1.1 * max(cell[field] or 0 for cell in found.values()))  # of the whole row
    result.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=min(len(measured["models"]), 4))
    return result


if __name__ == "__main__":
    main()
