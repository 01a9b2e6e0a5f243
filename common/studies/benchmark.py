"""Measures models at equal shapes: versions and peers, each in a process of its own, in turn.

A cell is a model at a batch size and a sequence length. Its process builds the model from the seed's weights, checks that every
parameter gets a gradient, takes a few training steps that do not count (compiling is done in them), and then times steps on one
batch with the clock of `common.timing`. The repeats of a shape are taken in turn (v1, v2, v1, v2): a slow spell meets all models.

Peak memory is the maximum over the timed steps, after a reset:

    GPU allocator   what PyTorch's allocator had handed out at once: weights, gradients, the optimizer's state, activations,
                    temporary tensors and the matrix library's workspace. Not the CUDA context, nor what the allocator
                    holds in reserve, nor, while a captured graph is replayed, what it uses of its own pool.
    process RSS     (CPU) all resident memory of the process: also the interpreter, PyTorch, and what the model imports.

Accuracy, at the smallest shape only: the loss after N steps from the same weights on the same batches of the synthetic source,
and the errors of logits and gradients against Version 1 in float64 (`common.studies.accuracy`), in the precision of the benchmark.

The result, benchmark.json (schema "tiny-llama-benchmark/1"):

    status, command, date   "completed" or "interrupted"
    device, environment     as in a run record; null if no process came far enough to say
    packages                {name: version} of what the peers are made of
    model, precision, seed  the configuration; precision is {"compute": "fp32"}
    models, metrics, batch_sizes, sequence_lengths, steps, repeats, accuracy_steps
    cells       a list of {"model", "batch_size", "sequence_length", "status", "reason", "runs"}, smallest shape first; a run is
                {"step_ms": {"median", "p20", "p80", "count"}, "peak_mib", "kind": which of the two above}
    accuracy    a list of {"model", "batch_size", "sequence_length", "status", "reason", "loss": nats, "floor": the least that
                is possible, "logits_error", "gradient_error": the largest of all gradients, "gradient": whose that is}

A status is "ok", "out of memory", "timed out", "failed" or "not run"; the reason is one line.

Tables and figures of a benchmark, from benchmark.json alone (written by `common.studies.benchmark`, which says what is in it).

A figure of a cell is the median over its repeats. Ratios are against v1, or against the first model where v1 was not measured:
above 1 a model is faster, or needs less memory. The range beside a speed-up is that of the repeats, each against the same
repeat of the other: how well it is known.
"""

import importlib.metadata
import json
import math
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, NamedTuple

from common import cli, data
from common import device as devices
from common.analysis.output import plots, tables
from common.errors import RunError, UsageError
from common.files import read_json, write_json, write_text
from common.precision import SHORT, Precision
from common.studies import accuracy, external_baselines
from common.timing import benchmark, summarize
from common.training import version_files
from common.training.run import signals_noted, warm_up

import torch
from torch import Tensor

VARIANTS = {"v2-compile": ("v2", "--enable-torch-compile")}  # name: version, and flags of its own
WARMUP = 3  # training steps before the timed ones
TOLD = ("preset", "config", "batch_size", "seq_len", "seed", "device", "use_amp", "amp_dtype")  # options that a process gets


class Model(NamedTuple):
    """A version by its file and flags, or a peer, which has no file."""

    name: str
    path: str | None = None
    flags: tuple[str, ...] = ()

    def load(self) -> ModuleType | external_baselines.Peer:
        return version_files.load(Path(self.path)) if self.path else external_baselines.PEERS[self.name]


def known_models(root: Path) -> dict[str, Model]:
    """What can be named: the versions in the folders of `root`, their variants, and the peers."""
    paths = {path.stem.removeprefix("tiny_llama_"): str(path) for path in sorted(root.glob("version*/tiny_llama_v[0-9].py"))}
    found = [Model(name, path) for name, path in paths.items()]
    found += [Model(name, paths[base], tuple(flags)) for name, (base, *flags) in VARIANTS.items() if base in paths]
    return {model.name: model for model in [*found, *map(Model, external_baselines.PEERS)]}


def plan(options: Namespace, known: dict[str, Model]) -> tuple[list[Model], list[Namespace]]:
    """The models, and the resolved options of each shape, smallest first.

    Raises:
        UsageError: a name is unknown, a value is wrong or given twice, or a peer cannot run here.
    """
    lists = {name: getattr(options, name) for name in ("models", "metrics", "batch_sizes", "seq_lengths")}
    for name, values in lists.items():
        for value in values:
            flag, valid = "--" + name.replace("_", "-"), {"models": known, "metrics": METRICS}.get(name)
            if valid and value not in valid:
                raise UsageError(f"{flag}: there is no {value!r}; there are {', '.join(valid)}")
            if values.count(value) > 1:
                raise UsageError(f"{flag}: {value} is given twice")
    device = devices.select(options.device)
    for name in options.models:
        if name in external_baselines.PEERS:
            external_baselines.PEERS[name].check(device)
    shapes = [dict(batch_size=b, seq_len=s) for s in sorted(options.seq_lengths) for b in sorted(options.batch_sizes)]
    return [known[name] for name in options.models], [version_files.resolve(Namespace(**vars(options) | s)) for s in shapes]


def measure(models: list[Model], shapes: list[Namespace], baseline: Model, path: Path) -> int:
    """Measures what `plan` returned, printing a line a process, and writes benchmark.json (`path`) after each of them.

    Returns:
        The exit code: 0, 1 if a cell failed other than by memory, 128 + n if stopped by signal n.
    """
    metrics = set(shapes[0].metrics)
    jobs = [(blank(model, shapes[0]), model, shapes[0]) for model in models if "accuracy" in metrics]
    measured = described(models, shapes) | {"cells": [], "accuracy": [entry for entry, _, _ in jobs]}
    for shape in shapes if metrics & {"throughput", "memory"} else []:
        row = [(blank(model, shape) | {"runs": []}, model, shape) for model in models]
        measured["cells"] += [cell for cell, _, _ in row]
        jobs += row * shape.repeats

    with signals_noted() as received:
        for i, (entry, model, shape) in enumerate(jobs):
            if received or entry["status"] not in ("ok", "not run"):
                continue  # what has failed is not repeated
            outcome = run_process("runs" if "runs" in entry else "accuracy", model, baseline, shape)
            if received and outcome["status"] != "ok":
                break  # Ctrl-C reaches the process too
            for key in ("device", "environment"):
                measured[key] = outcome.pop(key, None) or measured[key]
            entry |= {"status": outcome.pop("status"), "reason": outcome.pop("reason", None)}
            if "runs" not in entry:
                entry |= outcome
            elif outcome:
                entry["runs"].append(outcome)
            write_json(path, measured)
            print(f"{i + 1:4d} of {len(jobs)}  {line(entry)}", flush=True)
    measured["status"] = "interrupted" if received else "completed"
    write_json(path, measured)
    failed = any(entry["status"] in ("failed", "timed out") for entry, _, _ in jobs)
    return 128 + received[0] if received else int(failed)


def blank(model: Model, shape: Namespace) -> dict[str, Any]:
    where = {"model": model.name, "batch_size": shape.batch_size, "sequence_length": shape.seq_len}
    return where | {"status": "not run", "reason": None}


def described(models: list[Model], shapes: list[Namespace]) -> dict[str, Any]:
    """What all cells have in common."""
    options = shapes[0]
    packages = {package for model in models if not model.path for package in external_baselines.PEERS[model.name].packages}
    return {
        "schema": SCHEMA,
        "status": "interrupted",  # until the end is reached
        "command": shlex.join(sys.argv), "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": None, "environment": None,  # until a process has told
        "packages": {package: importlib.metadata.version(package) for package in sorted(packages)},
        "model": options.model.model_dump(exclude={"max_sequence_length"}),  # which grows with the shape
        "precision": {"compute": SHORT[cli.amp_dtype(options) or torch.float32]},
        "seed": options.seed, "models": [model.name for model in models], "metrics": options.metrics,
        "batch_sizes": sorted(options.batch_sizes), "sequence_lengths": sorted(options.seq_lengths),
        "steps": options.num_steps, "repeats": options.repeats, "accuracy_steps": options.accuracy_steps,
    }  # fmt: skip


def line(entry: dict[str, Any]) -> str:
    """What a process found, for the terminal."""
    start = f"{entry['model']:<12} B {entry['batch_size']:<4} S {entry['sequence_length']:<5}"
    if entry["status"] != "ok":
        return f"{start} {entry['status']}: {entry['reason']}"
    if "runs" in entry:
        run = entry["runs"][-1]
        return f"{start} {run['step_ms']['median']:10.2f} ms/step {run['peak_mib']:10,.0f} MiB"
    return f"{start} loss {entry['loss']:.5f}, largest gradient error {entry['gradient_error']:.2g}"


def run_process(what: str, model: Model, baseline: Model, options: Namespace) -> dict[str, Any]:
    """Does one job in a new process. Whatever becomes of it, the outcome has a status."""
    told = {name: getattr(options, name) for name in TOLD}
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        job = [what, model, baseline, told, options.num_steps, options.accuracy_steps, str(result)]
        try:
            with log.open("w") as output:
                command = [sys.executable, "-m", "common.studies.benchmark", json.dumps(job, default=str)]
                code = subprocess.run(command, stdout=output, stderr=output, timeout=options.timeout).returncode
        except subprocess.TimeoutExpired:
            return {"status": "timed out", "reason": f"not done after {options.timeout} s"}
        if result.exists():
            return read_json(result)
        if code == -signal.SIGKILL:
            return {"status": "out of memory", "reason": "killed by the system (SIGKILL), as it does when memory runs out"}
        said = log.read_text(errors="replace").strip()
        return {"status": "failed", "reason": said.rpartition("\n")[2][:500] or f"exit code {code}"}


# -------------------------------------------------------------------------------------------------- inside a process


def main() -> None:
    """Does the job that the command line holds as JSON, and writes its outcome."""
    what, model, baseline, told, steps, accuracy_steps, result = json.loads(sys.argv[1])
    model, options = Model(*model), version_files.resolve(Namespace(**told | {"config": told["config"] and Path(told["config"])}))
    device = devices.select(options.device)
    outcome: dict[str, Any] = {"device": devices.describe(device), "environment": devices.environment(), "status": "ok"}
    try:
        outcome |= speed(model, options, steps) if what == "runs" else accuracy(model, Model(*baseline), options, accuracy_steps)
    except Exception as error:  # a cell that fails is a result; the others go on
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        outcome |= {"status": "out of memory" if devices.is_out_of_memory(error) else "failed", "reason": reason[:500]}
    write_json(Path(result), outcome)


def built(model: Model, options: Namespace) -> tuple[Callable[[accuracy.Batch], Tensor], Precision]:
    """The training step of a fresh model, a function of the batch, and its precision."""
    version, device = model.load(), devices.select(options.device)
    settings = version_files.switched(version, options, *model.flags)
    precision = Precision(device, cli.amp_dtype(options))
    devices.prepare(device, options.seed)
    module = version.make_model(settings).to(device)
    warm_up(module, version_files.random_batch(options, device), precision, passes=1)  # checks that it trains
    optimizer = version.make_optimizer(module, settings)
    return lambda batch: version.train_step(module, optimizer, batch, precision), precision


def speed(model: Model, options: Namespace, steps: int) -> dict[str, Any]:
    """Step times and peak memory."""
    step, precision = built(model, options)
    batch = version_files.random_batch(options, precision.device)
    for _ in range(WARMUP):
        step(batch)
    devices.synchronize(precision.device)
    devices.reset_peak_memory(precision.device)
    times = benchmark(lambda: step(batch), precision.device, warmup=1, iterations=steps)
    return {"step_ms": summarize(times)} | devices.peak_memory(precision.device)


def accuracy(model: Model, baseline: Model, options: Namespace, steps: int) -> dict[str, Any]:
    """The loss after `steps` steps, and the errors against float64."""
    step, precision = built(model, options)
    source = data.markov(options.model.vocab_size, options.seed)
    batches = data.Batches(source, options.batch_size, options.seq_len, steps + 1, options.seed, precision.device)
    loss = [step(batches[i]) for i in range(steps + 1)][-1].item()  # of the last step: from after the `steps` before it
    if not math.isfinite(loss):
        raise RunError(f"the loss after {steps} steps is {loss}")
    errors = accuracy.errors_against_float64(baseline.load(), model.load(), options, model.flags)
    worst = max((name for name in errors if name.startswith("gradient of ")), key=errors.__getitem__)
    found = {"loss": loss, "floor": source.entropy_floor, "logits_error": errors["logits"], "gradient_error": errors[worst]}
    return found | {"gradient": worst.removeprefix("gradient of ")}


if __name__ == "__main__":
    main()


SCHEMA = "tiny-llama-benchmark/1"
METRICS = ("throughput", "memory", "accuracy")
COLOURS = (plots.BLACK, plots.BLUE, plots.SKY, plots.VERMILION, plots.GREEN, plots.ORANGE, plots.PURPLE)
MARKERS = "osD^v<>"

Measured = dict[str, Any]
Table = tuple[list[str], list[list[object]]]
Key = tuple[str, int, int]  # model, B, S


class Figures(NamedTuple):
    """Of one cell: medians over the repeats, in ms, tokens/s and MiB, and the median of each repeat."""

    ms: float
    p20: float
    p80: float
    tokens_per_second: float
    peak_mib: float
    repeats: list[float]


def analyze(path: Path, folder: Path) -> str:
    """Reads benchmark.json and writes benchmark.csv, .md and .png into `folder`.

    Returns:
        The tables for the terminal.

    Raises:
        UsageError: the file is not of schema tiny-llama-benchmark/1.
        RunError: nothing in it was measured.
    """
    measured = read_json(path, SCHEMA)
    entries = measured["cells"] + measured["accuracy"]
    if all(entry["status"] != "ok" for entry in entries):
        raise RunError(f"nothing was measured; the first: {entries[0]['model']}, {reason(entries[0])}")
    kinds = ["csv", "md", "png"] if figures(measured) else ["md"]
    write_text(folder / "benchmark.md", "\n\n".join(report(measured, "png" in kinds)) + "\n")
    if figures(measured):
        write_text(folder / "benchmark.csv", _csv(measured))
        plot(measured, folder / "benchmark.png")
    parts = [conditions(measured)]
    for title, table, note in sections(measured):
        parts.append(f"{title}:\n{tables.text(*table)}" + (f"\n{note}" if note else ""))
    written = ", ".join(str(folder / f"benchmark.{kind}") for kind in ("json", *kinds))
    return "\n\n".join([*parts, *filter(None, ["\n".join(problems(measured))]), f"written: {written}"])


def figures(measured: Measured) -> dict[Key, Figures]:
    """Those of every cell that was measured to the end."""
    found = {}
    for cell in measured["cells"]:
        if cell["status"] != "ok":
            continue
        ms, p20, p80 = (median(run["step_ms"][name] for run in cell["runs"]) for name in ("median", "p20", "p80"))
        tokens = cell["batch_size"] * cell["sequence_length"]
        peak = median(run["peak_mib"] for run in cell["runs"])
        repeats = [run["step_ms"]["median"] for run in cell["runs"]]
        found[_key(cell)] = Figures(ms, p20, p80, tokens / ms * 1e3, peak, repeats)
    return found


def _key(entry: dict[str, Any]) -> Key:
    return entry["model"], entry["batch_size"], entry["sequence_length"]


def reference(measured: Measured) -> str:
    """The model that ratios are against."""
    return "v1" if "v1" in measured["models"] else measured["models"][0]


def reason(entry: dict[str, Any]) -> str:
    return f"{entry['status']}: {entry['reason']}" if entry["reason"] else entry["status"]


def problems(measured: Measured) -> list[str]:
    """A line for each cell that was not measured, and one if the run did not come to its end."""
    entries = [("", cell) for cell in measured["cells"]] + [(", accuracy", entry) for entry in measured["accuracy"]]
    interrupted = ["The run was interrupted: cells are missing, or lack repeats."] if measured["status"] == "interrupted" else []
    return interrupted + [
        f"{entry['model']}, B {entry['batch_size']}, S {entry['sequence_length']}{what}: {reason(entry)}"
        for what, entry in entries
        if entry["status"] != "ok"
    ]


# -------------------------------------------------------------------------------------------------------------- tables


def sections(measured: Measured) -> list[tuple[str, Table, str]]:
    """Title, table and a note for each metric that was asked for."""
    against, found = reference(measured), []
    if "throughput" in measured["metrics"]:
        found.append((f"Tokens/s (and speed-up against {against})", throughput_table(measured), ""))
        found.append(("Step time", step_table(measured), ""))
    if "memory" in measured["metrics"]:
        kind = next((run["kind"] for cell in measured["cells"] for run in cell["runs"]), "")
        note = {
            "GPU allocator": "Peak of PyTorch's allocator over the timed steps: weights, gradients, optimizer state, activations "
            "and temporary tensors, without the CUDA context.",
            "process RSS": "Peak resident memory of the whole process over the timed steps, with the interpreter, PyTorch and "
            "what the model imports.",
        }.get(kind, "")
        found.append((f"Peak MiB, {kind} (and {against} / model)", memory_table(measured), note))
    if scaling_table(measured)[1]:
        found.append(("Growth from the smallest to the largest", scaling_table(measured), ""))
    if "accuracy" in measured["metrics"]:
        note = (
            f"At B {measured['batch_sizes'][0]}, S {measured['sequence_lengths'][0]} only. Loss: after "
            f"{measured['accuracy_steps']} steps from the same weights on the same batches of the synthetic source. Errors: "
            "largest difference over largest element, against Version 1 in float64; v1's own are those of the number format."
        )
        found.append(("Accuracy", accuracy_table(measured), note))
    return found


def _by_shape(measured: Measured, value: Any, better: Any) -> Table:
    """A row a shape, a column a model: the value, and its ratio against the reference."""
    found, against = figures(measured), reference(measured)
    status = {_key(cell): cell["status"] for cell in measured["cells"]}
    rows: list[list[object]] = []
    for length in measured["sequence_lengths"]:
        for size in measured["batch_sizes"]:
            row, base = [size, length], found.get((against, size, length))
            for model in measured["models"]:
                own = found.get((model, size, length))
                if own is None:
                    row.append(status[model, size, length])
                else:
                    ratio = f" ({better(base, own):.2f}x)" if base and model != against else ""
                    row.append(f"{value(own):,.0f}{ratio}")
            rows.append(row)
    return ["B", "S", *measured["models"]], rows


def throughput_table(measured: Measured) -> Table:
    """Tokens/s, and the speed-up."""
    return _by_shape(measured, lambda own: own.tokens_per_second, lambda base, own: base.ms / own.ms)


def memory_table(measured: Measured) -> Table:
    """Peak MiB, and how many times less than the reference."""
    return _by_shape(measured, lambda own: own.peak_mib, lambda base, own: base.peak_mib / own.peak_mib)


def step_table(measured: Measured) -> Table:
    """A row a cell: ms per step, and how well the speed-up is known."""
    found, against = figures(measured), reference(measured)
    rows: list[list[object]] = []
    for (model, size, length), own in found.items():
        base, speedup = found.get((against, size, length)), [None, ""]
        if base and model != against:
            ratios = [theirs / ours for theirs, ours in zip(base.repeats, own.repeats, strict=False)]
            speedup = [base.ms / own.ms, f"{min(ratios):.3g} to {max(ratios):.3g}" if len(ratios) > 1 else ""]
        rows.append([model, size, length, own.ms, f"{tables.figure(own.p20)} to {tables.figure(own.p80)}", *speedup])
    return ["model", "B", "S", "ms/step", "p20 to p80", "speed-up", "over the repeats"], rows


def scaling_table(measured: Measured) -> Table:
    """How time, throughput and memory grow from the smallest batch size to the largest, and the same for the sequence length."""
    found = figures(measured)
    sizes, lengths = measured["batch_sizes"], measured["sequence_lengths"]
    paths = [(f"B {sizes[0]} to {sizes[-1]}", f"S {s}", (sizes[0], s), (sizes[-1], s)) for s in lengths if len(sizes) > 1]
    paths += [
        (f"S {lengths[0]} to {lengths[-1]}", f"B {b}", (b, lengths[0]), (b, lengths[-1])) for b in sizes if len(lengths) > 1
    ]
    rows: list[list[object]] = []
    for model in measured["models"]:
        for growing, fixed, small, large in paths:
            before, after = found.get((model, *small)), found.get((model, *large))
            if before and after:
                tokens = large[0] * large[1] / (small[0] * small[1])
                rows.append([
                    model, growing, fixed, tokens, after.ms / before.ms, after.tokens_per_second / before.tokens_per_second,
                    after.peak_mib / before.peak_mib,
                ])  # fmt: skip
    return ["model", "growing", "at", "tokens x", "time x", "tokens/s x", "peak memory x"], rows


def accuracy_table(measured: Measured) -> Table:
    """Loss, its difference to the reference's, and errors against float64."""
    good = {entry["model"]: entry for entry in measured["accuracy"] if entry["status"] == "ok"}
    base, rows = good.get(reference(measured)), []
    for model, entry in good.items():
        difference = f"{entry['loss'] - base['loss']:+.1e}" if base else ""
        errors = [f"{entry['logits_error']:.1e}", f"{entry['gradient_error']:.1e}", entry["gradient"]]
        rows.append([model, f"{entry['loss']:.5f}", difference, *errors])
    header = ["model", "loss", f"minus {reference(measured)}'s", "error of the logits", "largest of a gradient", "which is of"]
    return header, rows


# --------------------------------------------------------------------------------------------------------------- files


def conditions(measured: Measured) -> str:
    device = measured["device"]
    packages = "".join(f", {name} {version}" for name, version in measured["packages"].items())
    threads = f", {device['threads']} threads" if device.get("threads") else ""
    return (
        f"{device['name']}{threads}, {measured['precision']['compute']}, torch {measured['environment']['torch']}{packages}; "
        f"{tables.letters(measured['model'])}. Figures are medians; processes a cell: {measured['repeats']}, "
        f"timed steps in each: {measured['steps']}."
    )


def report(measured: Measured, with_plot: bool) -> list[str]:
    """The paragraphs of the Markdown report."""
    parts = ["# Benchmark", conditions(measured), f"Made by `{measured['command']}` on {measured['date']}."]
    parts += ["![Throughput and peak memory over the batch size](benchmark.png)"] if with_plot else []
    for title, table, note in sections(measured):
        parts += [f"## {title}", tables.markdown(*table).strip()] + ([note] if note else [])
    missing = problems(measured)
    return parts + (["## Not measured", "\n".join(f"- {line}" for line in missing)] if missing else [])


def _csv(measured: Measured) -> str:
    found, against = figures(measured), reference(measured)
    header = [
        "model", "batch_size", "sequence_length", "status", "ms", "p20", "p80", "repeats", "tokens_per_second", "speedup",
        "peak_mib", "memory_ratio",
    ]  # fmt: skip
    rows = []
    for cell in measured["cells"]:
        own, base = found.get(_key(cell)), found.get((against, *_key(cell)[1:]))
        row = [*own[:3], len(own.repeats), own.tokens_per_second] if own else 5 * [None]
        ratios = (base.ms / own.ms, base.peak_mib / own.peak_mib) if own and base else (None, None)
        rows.append([*_key(cell), cell["status"], *row, ratios[0], own.peak_mib if own else None, ratios[1]])
    return tables.csv_text(header, rows)


def plot(measured: Measured, path: Path) -> None:
    """Above throughput, below peak memory, over the batch size; a column for each sequence length."""
    found, lengths, sizes = figures(measured), measured["sequence_lengths"], measured["batch_sizes"]
    wanted = [
        (name, unit, field)
        for name, unit, field in (("throughput", "tokens/s", "tokens_per_second"), ("memory", "peak MiB", "peak_mib"))
        if name in measured["metrics"]
    ]
    figure = plots.new(1.5 + 4 * len(lengths), 0.8 + 3.6 * len(wanted))
    figure.suptitle(f"Benchmark: {measured['precision']['compute']}, {measured['device']['name']}")
    grid = figure.subplots(len(wanted), len(lengths), squeeze=False, sharex=True, sharey="row")
    for row, (_, unit, field) in zip(grid, wanted, strict=True):
        for axes, length in zip(row, lengths, strict=True):
            for i, model in enumerate(measured["models"]):
                points = [(b, getattr(found[model, b, length], field)) for b in sizes if (model, b, length) in found]
                if points:
                    style = dict(color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], label=model)
                    axes.plot(*zip(*points, strict=True), **style)
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.set(title=f"sequence length {length}", xlabel="batch size", ylabel=unit)
            axes.grid(True, color="0.9")
        row[0].set_ylim(0, 1.1 * max(getattr(own, field) for own in found.values()))  # of the whole row
    grid[0][0].legend()
    plots.save(figure, path)
