"""Searches the batch size at which a version trains fastest, answers fastest, or fills the memory
that it may take.

The batch size is doubled until it no longer fits, a maximum is reached, or a step takes longer than
two seconds. For the target of memory, bisection then finds to a sixteenth where the memory ends.
The answer is, among the sizes tried and with a tolerance of 2 %:

    throughput   the smallest batch whose tokens/s are within it of the best: the rest is bought with ever larger batches
    latency      the largest batch whose step takes at most so much longer than the fastest: samples that cost no time
    memory       the largest batch that fits

Each trial runs in a process of its own, which takes seconds to start. So the search survives if the
kernel kills a process because memory ran out, the peak of the resident set is that of this batch
size alone, and all of a GPU's memory is free for the next trial. The peak covers the whole trial,
including its first steps and their compilation.

batch_search.json is written after each trial. A signal ends the search; what was measured is then
reported without an answer.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping
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
from tracepage.show import run_facts, tables
from tracepage.show.report import Report
from tracepage.terminal import progress

TOLERANCE = 0.02  # of throughput and step time
RESOLUTION = 16  # bisection ends when two batch sizes are a sixteenth apart
MAXIMUM = 4096
LONGEST_MS = 2000.0  # a step: past it the search would take many minutes
# untimed steps; then steps for about a second, but at least 3 and at most 50
WARMUP = 2
SECONDS = 1.0
STEPS = (3, 50)
# what is best, which size is taken, and why
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
    tried = {1: trial(1)}
    if tried[1]["status"] != "ok":
        advice = "lower --seq-len, take a smaller --preset, try --use-amp, or raise --target-memory-usage"
        raise RunError(f"not even batch size 1 fits ({tried[1]['status']}): {advice}")
    while (
        tried[size]["status"] == "ok"
        and size < maximum
        and tried[size]["step_ms"]["median"] <= LONGEST_MS
    ):
        size = min(2 * size, maximum)
        tried[size] = trial(size)
    if tried[size]["status"] != "ok":
        ended = f"batch size {size} does not fit: {tried[size]['status']}"
    elif size == maximum:
        ended = f"the maximum is reached: {maximum} (--max-batch-size)"
    else:
        ended = f"a step of batch size {size} takes more than {tables.format_time(LONGEST_MS)}"
    largest = max(each for each, found in tried.items() if found["status"] == "ok")
    while target == "memory" and size - largest > max(1, largest // RESOLUTION):
        middle = (largest + size) // 2
        tried[middle] = trial(middle)
        largest, size = (middle, size) if tried[middle]["status"] == "ok" else (largest, middle)
    value, choose, reason = TARGETS[target]
    fitting = [found for found in tried.values() if found["status"] == "ok"]
    best = max(map(value, fitting))
    chosen = choose(
        found["batch_size"] for found in fitting if value(found) * (1 + TOLERANCE) >= best
    )
    return {"ended": ended, "batch_size": chosen, "reason": reason}


def measure(
    version: ModuleType, asked: Namespace, flags: list[str], path: Path
) -> tuple[dict[str, Any], int]:
    """Searches with a process for each trial; after each, prints a line and writes
    batch_search.json (`path`).

    `asked` are the script's flags, and `flags` those that go to the version. Returns what was
    measured, and the exit code: 0, or 128 + n if stopped by signal n after a trial. UsageError: a
    flag is wrong. RunError: batch size 1 does not fit, or a trial failed otherwise than by memory.
    """
    if not 0 < asked.target_memory_usage <= 1:
        raise UsageError(
            f"--target-memory-usage: {asked.target_memory_usage} is not a share, above 0 and at most 1"
        )
    options = version_files.resolve(asked)
    # refuses an unknown flag before the first process starts
    version_files.switched(version, options, *flags)
    model = Model(
        record.name(version), Path(str(version.__file__)), tuple(flags), bool(options.capture_step)
    )
    measured = record.header("tiny-llama-batch-search/1", None, model=options.model) | {
        "version": model.name,
        "training": {"sequence_length": options.seq_len, "seed": options.seed},
        "target": asked.optimization_target,
        "target_memory_usage": asked.target_memory_usage,
        "trials": [],
        "ended": "the search was interrupted",
        "batch_size": None,
        "reason": "",
    }

    def trial(batch_size: int) -> dict[str, Any]:
        with progress(f"batch size {batch_size}"):
            own = replace(options, batch_size=batch_size)
            outcome = job_runner.in_a_process(partial(train, model, own), own.device)
        if outcome["status"] == "failed":
            kind = UsageError if outcome["reason"].startswith("UsageError: ") else RunError
            raise kind(f"the trial of batch size {batch_size} failed: {outcome['reason']}")
        result: dict[str, Any] = {"batch_size": batch_size, "status": "out of memory"}
        result |= dict.fromkeys(("step_ms", "tokens_per_second", "peak_mib"))
        if found := outcome.get("found"):
            measured.update(
                {key: outcome[key] for key in ("device", "environment")} | found["common"]
            )
            rate = batch_size * options.seq_len / found["step_ms"]["median"] * 1e3
            allowed = asked.target_memory_usage * measured["device"]["memory_mib"]
            status = "ok" if found["peak_mib"] <= allowed else "over target"
            result |= {"status": status, "tokens_per_second": rate} | {
                key: found[key] for key in ("step_ms", "peak_mib")
            }
        measured["trials"].append(result)
        if measured["device"]:  # known since the first trial that came to its end
            files.write_measurement(path, measured, "--output-dir")
        step = result["step_ms"]
        peak = result["peak_mib"]
        shown = (
            f"{tables.format_time(step['median']):>9} a step {peak:10,.0f} MiB  " if step else ""
        )
        print(f"batch size {batch_size:5d}  {shown}{result['status']}", flush=True)
        return result

    try:
        measured |= search(trial, asked.optimization_target, asked.max_batch_size)
        code = 0
    except KeyboardInterrupt as stop:
        if not measured["device"]:
            raise
        code = 128 + cli.signal_number(stop)
    files.write_measurement(path, measured, "--output-dir")
    return measured, code


def train(model: Model, options: Options) -> dict[str, Any]:
    """Trains a few steps, in the process of the trial: step times, peak memory, and what all trials
    have in `common`.
    """
    device = devices.select(options.device)
    devices.limit_memory(device, devices.describe(device)["memory_mib"])
    prepared, precision = benchmarks.built(model, options)
    batch = version_files.random_batch(options, device)
    first = benchmark(lambda: prepared.step(batch), device, warmup=WARMUP, iterations=1)[0]
    count = min(max(int(SECONDS * 1e3 / first), STEPS[0]), STEPS[1])
    step_ms = summarize(benchmark(lambda: prepared.step(batch), device, warmup=0, iterations=count))
    peak = devices.peak_memory(device, prepared.graph_peak_bytes)
    settings = record.settings(prepared.model, options)
    common = {
        "precision": {"compute": precision.name},
        "memory_kind": peak["kind"],
        "settings": settings,
    }
    return {"step_ms": step_ms, "peak_mib": peak["peak_mib"], "common": common}


def analyze(measured: Mapping[str, Any]) -> Report:
    """The curve of what was measured as table and CSV, and the answer."""
    memory = f"{measured['device']['memory_mib']:,.0f} MiB that there are"
    report = Report("Batch size search")
    report.text(
        f"{measured['version']}, {run_facts.describe(measured, 'batch_size')}. Step times are medians. Memory: peak of the "
        f"{measured['memory_kind']}; % of the {memory}.",
        f"Made by {run_facts.origin(measured)}.",
    )
    names = [
        "batch_size",
        "ms",
        "p20",
        "p80",
        "tokens_per_second",
        "peak_mib",
        "memory_percent",
        "status",
    ]
    header = ["B", "ms/step", "p20", "p80", "tokens/s", "peak MiB", "% of memory", "status"]
    report.table(header, curve(measured))
    report.csv("batch_search", names, curve(measured))
    report.json("batch_search", measured)
    usage = f"The target is at most {100 * measured['target_memory_usage']:g} % of the memory."
    report.text(f"Doubling ended: {measured['ended']}. {usage}")
    if measured["batch_size"]:
        report.text(
            f"Batch size for {measured['target']}: {measured['batch_size']}. It is {measured['reason']}."
        )
    return report


def curve(measured: Mapping[str, Any]) -> list[list[Any]]:
    """A row per trial, smallest batch first: B, median, p20 and p80 in ms, tokens/s, peak MiB, % of
    memory, status.
    """
    rows = []
    for trial in sorted(measured["trials"], key=lambda trial: trial["batch_size"]):
        step = trial["step_ms"]
        peak = trial["peak_mib"]
        times = [step["median"], step["p20"], step["p80"]] if step else [None] * 3
        percent = peak and 100 * peak / measured["device"]["memory_mib"]
        rows.append(
            [
                trial["batch_size"],
                *times,
                trial["tokens_per_second"],
                peak,
                percent,
                trial["status"],
            ]
        )
    return rows
