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
and the errors of logits and gradients against Version 1 in float64 (`common.validate`), in the precision of the benchmark.

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
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common import cli, data, peers, validate, versions
from common import device as devices
from common.analysis.benchmark import METRICS, SCHEMA
from common.errors import RunError, UsageError
from common.files import read_json, write_json
from common.precision import SHORT, Precision
from common.run import signals_noted, warm_up
from common.timing import benchmark, summarize

VARIANTS = {"v2-compile": ("v2", "--enable-torch-compile")}  # name: version, and flags of its own
WARMUP = 3  # training steps before the timed ones
TOLD = ("preset", "config", "batch_size", "seq_len", "seed", "device", "use_amp", "amp_dtype")  # options that a process gets


class Model(NamedTuple):
    """A version by its file and flags, or a peer, which has no file."""

    name: str
    path: str | None = None
    flags: tuple[str, ...] = ()

    def load(self) -> ModuleType | peers.Peer:
        return versions.load(Path(self.path)) if self.path else peers.PEERS[self.name]


def known_models(root: Path) -> dict[str, Model]:
    """What can be named: the versions in the folders of `root`, their variants, and the peers."""
    paths = {path.stem.removeprefix("tiny_llama_"): str(path) for path in sorted(root.glob("version*/tiny_llama_v[0-9].py"))}
    found = [Model(name, path) for name, path in paths.items()]
    found += [Model(name, paths[base], tuple(flags)) for name, (base, *flags) in VARIANTS.items() if base in paths]
    return {model.name: model for model in [*found, *map(Model, peers.PEERS)]}


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
        if name in peers.PEERS:
            peers.PEERS[name].check(device)
    shapes = [dict(batch_size=b, seq_len=s) for s in sorted(options.seq_lengths) for b in sorted(options.batch_sizes)]
    return [known[name] for name in options.models], [versions.resolve(Namespace(**vars(options) | s)) for s in shapes]


def measure(models: list[Model], shapes: list[Namespace], baseline: Model, path: Path) -> int:
    """Measures what `plan` returned, printing a line a process, and writes benchmark.json (`path`) after each of them.

    Returns:
        The exit code: 0, 1 if a cell failed other than by memory, 128 + n if stopped by signal n.
    """
    metrics = set(shapes[0].metrics)
    jobs = [(blank(model, shapes[0]), model, shapes[0]) for model in models if "accuracy" in metrics]
    measured = conditions(models, shapes) | {"cells": [], "accuracy": [entry for entry, _, _ in jobs]}
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


def conditions(models: list[Model], shapes: list[Namespace]) -> dict[str, Any]:
    """What all cells have in common."""
    options = shapes[0]
    packages = {package for model in models if not model.path for package in peers.PEERS[model.name].packages}
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
                command = [sys.executable, "-m", "common.benchmark", json.dumps(job, default=str)]
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
    model, options = Model(*model), versions.resolve(Namespace(**told | {"config": told["config"] and Path(told["config"])}))
    device = devices.select(options.device)
    outcome: dict[str, Any] = {"device": devices.describe(device), "environment": devices.environment(), "status": "ok"}
    try:
        outcome |= speed(model, options, steps) if what == "runs" else accuracy(model, Model(*baseline), options, accuracy_steps)
    except Exception as error:  # a cell that fails is a result; the others go on
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        outcome |= {"status": "out of memory" if devices.is_out_of_memory(error) else "failed", "reason": reason[:500]}
    write_json(Path(result), outcome)


def built(model: Model, options: Namespace) -> tuple[Callable[[validate.Batch], Tensor], Precision]:
    """The training step of a fresh model, a function of the batch, and its precision."""
    version, device = model.load(), devices.select(options.device)
    settings = versions.switched(version, options, *model.flags)
    precision = Precision(device, cli.amp_dtype(options))
    devices.prepare(device, options.seed)
    module = version.make_model(settings).to(device)
    warm_up(module, versions.random_batch(options, device), precision, passes=1)  # checks that it trains
    optimizer = version.make_optimizer(module, settings)
    return lambda batch: version.train_step(module, optimizer, batch, precision), precision


def speed(model: Model, options: Namespace, steps: int) -> dict[str, Any]:
    """Step times and peak memory."""
    step, precision = built(model, options)
    batch = versions.random_batch(options, precision.device)
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
    errors = validate.errors_against_float64(baseline.load(), model.load(), options, model.flags)
    worst = max((name for name in errors if name.startswith("gradient of ")), key=errors.__getitem__)
    found = {"loss": loss, "floor": source.entropy_floor, "logits_error": errors["logits"], "gradient_error": errors[worst]}
    return found | {"gradient": worst.removeprefix("gradient of ")}


if __name__ == "__main__":
    main()
