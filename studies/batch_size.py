"""Searches the batch size at which a version trains fastest, answers fastest, or fills the memory
that it may take.

The batch size is doubled until it no longer fits, a maximum is reached, or a step takes longer than
two seconds. For the target of memory, bisection then finds to a sixteenth where the memory ends.
The answer is, among the sizes tried and with a tolerance of 2 %:

    throughput   the smallest batch whose tokens/s are within it of the best: the rest is bought
                 with ever larger batches
    latency      the largest batch whose step takes at most so much longer than the fastest:
                 samples that cost no time
    memory       the largest batch that fits

Each trial runs in a process of its own, which takes seconds to start. So the search survives if the
kernel kills a process because memory ran out, the peak of the resident set is that of this batch
size alone, and all of a GPU's memory is free for the next trial. The peak covers the whole trial,
including its first steps and their compilation.

batch_search.json is written after each trial. A signal ends the search; what was measured is then
reported without an answer.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from common import cli
from common import device as devices
from common.options import Options
from common.timing import benchmark, summarize
from common.training import record
from studies import benchmark as benchmarks
from studies import job_runner, version_files
from studies.peers.known_models import Model
from tracepage import files
from tracepage.errors import RunError, UsageError
from tracepage.terminal import format_time, progress
from tracepage.views.batch_size_search import SCHEMA

TOLERANCE = 0.02  # of throughput and step time
RESOLUTION = 16  # bisection ends when two batch sizes are a sixteenth apart
MAXIMUM = 4096
LONGEST_MS = 2000.0  # a step: past it the search would take many minutes
WARMUP = 2  # untimed steps
SECONDS = 1.0  # of timed steps
STEPS = (3, 50)  # timed, at least and at most
# What is best, which of the sizes near it is taken, and why.
TARGETS: dict[str, tuple[Callable[[Any], float], Callable[..., int], str]] = {
    "throughput": (
        lambda trial: trial["tokens_per_second"],
        min,
        "the smallest tried within 2 % of the best throughput",
    ),
    "latency": (
        lambda trial: 1 / trial["step_ms"]["median"],
        max,
        "the largest tried within 2 % of the fastest step",
    ),
    "memory": (lambda trial: 1.0, max, "the largest tried that fits"),
}


def search(trial: Callable[[int], Any], target: str, maximum: int) -> dict[str, Any]:
    """Doubles, bisects and answers: why doubling `ended`, the `batch_size`, and the `reason` why it
    is this one. RunError: batch size 1 does not fit.

    `trial` is called once for each batch size that is tried, none above `maximum`.
    """
    size = 1
    last = trial(size)
    if last["status"] != "ok":
        raise RunError(
            f"not even batch size 1 fits ({last['status']}): lower --seq-len, take a smaller "
            "--preset, try --use-amp, or raise --target-memory-usage"
        )
    fitting = [last]
    while last["status"] == "ok" and size < maximum and last["step_ms"]["median"] <= LONGEST_MS:
        size = min(2 * size, maximum)
        last = trial(size)
        if last["status"] == "ok":
            fitting.append(last)
    if last["status"] != "ok":
        ended = f"batch size {size} does not fit: {last['status']}"
    elif size == maximum:
        ended = f"the maximum is reached: {maximum} (--max-batch-size)"
    else:
        ended = f"a step of batch size {size} takes more than {format_time(LONGEST_MS)}"
    largest = fitting[-1]["batch_size"]
    while target == "memory" and size - largest > max(1, largest // RESOLUTION):
        middle = (largest + size) // 2
        last = trial(middle)
        if last["status"] == "ok":
            fitting.append(last)
            largest = middle
        else:
            size = middle
    value, choose, reason = TARGETS[target]
    best = max(map(value, fitting))
    near = [last["batch_size"] for last in fitting if value(last) * (1 + TOLERANCE) >= best]
    return {"ended": ended, "batch_size": choose(near), "reason": reason}


def measure(version: ModuleType, asked: Namespace, flags: list[str], path: Path) -> int:
    """Searches with a process for each trial; after each, prints a line and writes
    batch_search.json (`path`).

    `asked` are the script's flags, and `flags` those that go to the version. Returns the exit code:
    0, or 128 + n if stopped by signal n after a trial. UsageError: a flag is wrong. RunError: batch
    size 1 does not fit, or a trial failed otherwise than by memory.
    """
    if not 0 < asked.target_memory_usage <= 1:
        raise UsageError(
            f"--target-memory-usage: {asked.target_memory_usage} is not a share, "
            "above 0 and at most 1"
        )
    options = version_files.resolve(asked)
    version_files.switched(version, options, *flags)  # refuses an unknown flag at once
    name = record.name(version)
    model = Model(name, Path(str(version.__file__)), tuple(flags), bool(options.capture_step))
    mode = options.deterministic
    measured = record.header(SCHEMA, None, model=options.model, deterministic=mode) | {
        "version": name,
        "training": {"sequence_length": options.seq_len, "seed": options.seed},
        "target": asked.optimization_target,
        "target_memory_usage": asked.target_memory_usage,
        "trials": [],
        "ended": "the search was interrupted",
        "batch_size": None,
        "reason": "",
    }

    def trial(batch_size: int) -> dict[str, Any]:
        settings = replace(options, batch_size=batch_size)
        with progress(f"batch size {batch_size}"):
            outcome = job_runner.in_a_process(partial(train, model, settings), options.device)
        if outcome["status"] == "failed":
            kind = UsageError if outcome["reason"].startswith("UsageError: ") else RunError
            raise kind(f"the trial of batch size {batch_size} failed: {outcome['reason']}")
        result = add_trial(measured, batch_size, outcome)
        if measured["device"]:  # known since the first trial that came to its end
            files.write_measurement(path, measured, "--output-dir")
        step = result["step_ms"]
        numbers = ""
        if step:
            time = format_time(step["median"])
            numbers = f"{time:>9} a step {result['peak_mib']:10,.0f} MiB  "
        print(f"batch size {batch_size:5d}  {numbers}{result['status']}", flush=True)
        return result

    code = 0
    try:
        measured |= search(trial, asked.optimization_target, asked.max_batch_size)
    except KeyboardInterrupt as stop:
        if not measured["device"]:
            raise
        code = 128 + cli.signal_number(stop)
    files.write_measurement(path, measured, "--output-dir")
    return code


def add_trial(
    measured: dict[str, Any], batch_size: int, outcome: job_runner.Outcome
) -> dict[str, Any]:
    """Adds a trial to what was measured, from the outcome of its process."""
    trial = {
        "batch_size": batch_size,
        "status": "out of memory",
        "step_ms": None,
        "tokens_per_second": None,
        "peak_mib": None,
    }
    if "found" in outcome:
        trained = outcome["found"]
        measured |= trained["common"]
        measured |= {"device": outcome["device"], "environment": outcome["environment"]}
        allowed = measured["target_memory_usage"] * measured["device"]["memory_mib"]
        tokens = batch_size * measured["training"]["sequence_length"]
        trial |= {
            "status": "ok" if trained["peak_mib"] <= allowed else "over target",
            "step_ms": trained["step_ms"],
            "tokens_per_second": tokens / trained["step_ms"]["median"] * 1e3,
            "peak_mib": trained["peak_mib"],
        }
    measured["trials"].append(trial)
    return trial


def train(model: Model, options: Options) -> dict[str, Any]:
    """Trains a few steps, in the process of the trial: step times, peak memory, and what all trials
    have in `common`.
    """
    device = devices.select(options.device)
    devices.limit_memory(device, devices.describe(device)["memory_mib"])
    prepared, precision = benchmarks.built(model, options)
    batch = version_files.random_batch(options, device)

    def step() -> None:
        prepared.step(batch)

    first = benchmark(step, device, warmup=WARMUP, iterations=1)[0]
    least, most = STEPS
    count = min(max(int(SECONDS * 1e3 / first), least), most)
    step_ms = summarize(benchmark(step, device, warmup=0, iterations=count))
    peak = devices.peak_memory(device, prepared.graph_peak_bytes)
    common = {
        "precision": {"compute": precision.name},
        "memory_kind": peak["kind"],
        "settings": record.settings(prepared.model, options),
    }
    return {"step_ms": step_ms, "peak_mib": peak["peak_mib"], "common": common}
