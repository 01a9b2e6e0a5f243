"""Searches the batch size at which a version trains fastest, answers fastest, or fills the memory that it may take.

The batch size is doubled until it no longer fits, a maximum is reached, a step takes too long (by default only on a CPU, whose
step time grows with the batch), or, for throughput and latency, doubling no longer helps. Bisection then finds, to a sixteenth,
where the memory ends (if that ended the doubling) and where the target's condition holds, with a tolerance of e = 2 %:

    throughput   the smallest batch whose tokens/s are within e of the best
    latency      the largest batch whose step takes at most e longer than the fastest: samples that cost no time
    memory       the largest batch that fits

Why doubling may end. Let a step take t(B) = a + b B (see `comparisons.growth`): throughput B / t(B) then tends to 1 / b.
It is flat when two doublings, B -> 4 B, gain less than e: then 4 (a + b B) / (a + 4 b B) < 1.02, so a / (b B) < 0.027, and at
4 B the throughput is above 1 / (1 + 0.027 / 4) = 99.3 % of what the largest batch could reach. The answer is the smallest batch
within e, not the fastest, since the last 2 % are bought with ever larger batches and their memory. The search for latency ends
when two doublings both take more than e longer than the fastest step.

Each trial runs in a process of its own, which takes seconds to start. So the search survives if the kernel kills a process
because memory ran out, the peak of the resident set is that of this batch size alone, and all of a GPU's memory is free for the
next trial. The peak covers the whole trial, including its first steps and their compilation.

batch_search.json is written after each trial. A signal ends the search; what was measured is then reported without an answer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from common import device as devices
from common import files, signals
from common.analysis.output import plots, run_facts, tables
from common.analysis.output.report import Report
from common.errors import RunError, UsageError
from common.options import Options
from common.progress import progress
from common.records.study_files import BatchSearch, Trial
from common.studies import benchmark as benchmarks
from common.studies import job_runner
from common.studies.known_models import Model
from common.timing import benchmark, summarize
from common.training import record, version_files

TOLERANCE = 0.02  # of throughput and step time
RESOLUTION = 16  # bisection ends when two batch sizes are a sixteenth apart
MAXIMUM = 4096
LONGEST = {"cpu": 1.0, "cuda": math.inf}  # seconds a step: past it a CPU's search would take many minutes
WARMUP, SECONDS, STEPS = 2, 1.0, (3, 50)  # untimed steps; then steps for about a second, but at least 3 and at most 50
TARGETS = {  # what the last two doublings have not done when they end the search
    "throughput": "raised the throughput by 2 %",
    "latency": "kept the step time within 2 % of the fastest",
    "memory": "",
}


@dataclass(frozen=True, kw_only=True)
class SearchOptions(Options):
    optimization_target: str  # of TARGETS
    target_memory_usage: float
    max_batch_size: int
    max_step_seconds: int | None  # None: of LONGEST


def search(trial: Callable[[int], Trial], target: str, maximum: int, longest: float = math.inf) -> dict[str, Any]:
    """Doubles, bisects and answers. RunError: batch size 1 does not fit.

    `trial` is called once for each batch size that is tried, none above `maximum`. Once a step takes longer than `longest`
    seconds, the batch size is not doubled again.
    """
    statuses: dict[int, str] = {}
    tried: dict[int, float] = {}
    fitting: dict[int, Any] = {}

    def speed(size: int) -> float:
        """The value that the target maximizes: tokens/s, steps per ms, or (memory) 1; 0 if the batch size does not fit."""
        if size not in tried:
            found = trial(size)
            statuses[size], tried[size] = found["status"], 0.0
            if found["status"] == "ok":
                fitting[size] = found
                values = {"throughput": found["tokens_per_second"], "latency": 1 / found["step_ms"]["median"], "memory": 1.0}
                tried[size] = values[target]
        return tried[size]

    def holds(size: int) -> bool:
        return speed(size) * (1 + TOLERANCE) >= max(tried.values())

    def bisect(holds: Callable[[int], bool], end: Callable) -> int:
        """Closes in on where `holds` begins (`end` is min) or ends (max); returns the last size tried for which it does hold."""
        inside = end(filter(holds, tried))
        beyond = [size for size in tried if end(size, inside) != inside]
        outside = min(beyond, key=lambda size: abs(size - inside), default=inside)
        while abs(outside - inside) > max(1, min(inside, outside) // RESOLUTION):
            middle = (inside + outside) // 2
            inside, outside = (middle, outside) if holds(middle) else (inside, middle)
        return end(filter(holds, tried))

    def double() -> str:
        """Tries 1, 2, 4, ... and returns why it ended."""
        gain = 1 + TOLERANCE if target == "throughput" else 1 / (1 + TOLERANCE)
        size, speeds = 1, []
        while speed(size):
            speeds.append(speed(size))
            if target != "memory" and len(speeds) > 2 and max(speeds[-2:]) < gain * max(speeds[:-2]):
                return f"the last two doublings, up to {size}, have not {TARGETS[target]}"
            median = fitting[size]["step_ms"]["median"]
            if median > 1e3 * longest:
                taken = tables.format_time(median)
                return f"a step of batch size {size} takes {taken}, more than {longest:g} s (--max-step-seconds)"
            if size == maximum:
                return f"the maximum is reached: {maximum} (--max-batch-size)"
            size = min(2 * size, maximum)
        if size == 1:
            advice = "lower --seq-len, take a smaller --preset, try --use-amp, or raise --target-memory-usage"
            raise RunError(f"not even batch size 1 fits ({statuses[1]}): {advice}")
        return f"batch size {size} does not fit: {statuses[size]}"

    ended = double()
    bisect(lambda size: speed(size) > 0, max)
    size = bisect(holds, min if target == "throughput" else max)
    best = fitting[max(fitting, key=speed)]
    above = min((other for other in tried if other > size), default=None)
    if target == "throughput":
        highest = f"{best['tokens_per_second']:,.0f} tokens/s at batch size {best['batch_size']}"
        reason = f"the smallest batch size tried within 2 % of the best throughput, {highest}"
    elif target == "latency":
        fastest = f"{tables.format_time(best['step_ms']['median'])} at batch size {best['batch_size']}"
        reason = f"the largest batch size tried whose step takes at most 2 % longer than the fastest, {fastest}"
    elif above:
        reason = f"the largest batch size tried that fits; the next, {above}, does not: {statuses[above]}"
    else:
        reason = "the largest batch size tried, and it fits: the memory's limit lies above"
    return {"ended": ended, "batch_size": size, "reason": reason}


def measure(version: ModuleType, options: SearchOptions, flags: list[str], path: Path) -> int:
    """Searches with a process for each trial; after each, prints a line and writes batch_search.json (`path`).

    Returns the exit code: 0, or 128 + n if stopped by signal n after a trial. UsageError: the version has no such flag, or the
    device or the number format is not there. RunError: batch size 1 does not fit, or a trial failed otherwise than by memory.
    """
    if not 0 < options.target_memory_usage <= 1:
        raise UsageError(f"--target-memory-usage: {options.target_memory_usage} is not a share, above 0 and at most 1")
    version_files.switched(version, options, *flags)  # refuses an unknown flag before the first process starts
    longest = options.max_step_seconds or LONGEST[devices.select(options.device).type]
    model = Model(record.name(version), Path(str(version.__file__)), tuple(flags), bool(options.capture_step))
    measured = record.header(files.schema_of(BatchSearch), None, model=options.model) | {
        "version": model.name, "training": {"sequence_length": options.seq_len, "seed": options.seed},
        "target": options.optimization_target, "target_memory_usage": options.target_memory_usage,
        "trials": [], "ended": "the search was interrupted", "batch_size": None, "reason": "",
    }  # fmt: skip

    def trial(batch_size: int) -> Trial:
        with progress(f"batch size {batch_size}"):
            own = replace(options, batch_size=batch_size)
            outcome = job_runner.in_a_process(partial(train, model, own), own.device)
        if outcome["status"] == "failed":
            kind = UsageError if outcome["reason"].startswith("UsageError: ") else RunError
            raise kind(f"the trial of batch size {batch_size} failed: {outcome['reason']}")
        result: Trial = {
            "batch_size": batch_size, "status": "out of memory", "step_ms": None, "tokens_per_second": None, "peak_mib": None
        }  # fmt: skip
        if found := outcome.get("found"):
            measured.update({key: outcome[key] for key in ("device", "environment")} | found["common"])
            peak, step_ms = found["peak_mib"], found["step_ms"]
            allowed = options.target_memory_usage * measured["device"]["memory_mib"]
            result = {
                "batch_size": batch_size, "status": "ok" if peak <= allowed else "over target", "step_ms": step_ms,
                "tokens_per_second": batch_size * options.seq_len / step_ms["median"] * 1e3, "peak_mib": peak,
            }  # fmt: skip
        measured["trials"].append(result)
        if measured["device"]:  # known since the first trial that came to its end
            files.write_measurement(path, measured, "--output-dir")
        print(line(result), flush=True)
        return result

    try:
        measured |= search(trial, options.optimization_target, options.max_batch_size, longest)
        code = 0
    except KeyboardInterrupt as stop:
        if not measured["device"]:
            raise
        code = 128 + signals.number(stop)
    files.write_measurement(path, measured, "--output-dir")
    return code


def line(trial: Trial) -> str:
    """A trial for the terminal."""
    start = f"batch size {trial['batch_size']:5d}  "
    if trial["status"] == "out of memory":
        return start + trial["status"]
    rate = f"{tables.format_time(trial['step_ms']['median']):>9} a step  {trial['tokens_per_second']:11,.0f} tokens/s"
    return f"{start}{rate}  {trial['peak_mib']:9,.0f} MiB  {trial['status']}"


def train(model: Model, options: Options) -> dict[str, Any]:
    """Trains a few steps, in the process of the trial: step times, peak memory, and what all trials have in `common`."""
    device = devices.select(options.device)
    devices.limit_memory(device, devices.describe(device)["memory_mib"])
    prepared, precision = benchmarks.built(model, options)
    batch = version_files.random_batch(options, device)
    first = benchmark(lambda: prepared.step(batch), device, warmup=WARMUP, iterations=1)[0]
    count = min(max(int(SECONDS * 1e3 / first), STEPS[0]), STEPS[1])
    step_ms = summarize(benchmark(lambda: prepared.step(batch), device, warmup=0, iterations=count))
    peak = devices.peak_memory(device, prepared.graph_peak_bytes)
    settings = record.settings(prepared.model, options)
    common = {"precision": {"compute": precision.name}, "memory_kind": peak["kind"], "settings": settings}
    return {"step_ms": step_ms, "peak_mib": peak["peak_mib"], "common": common}


def analyze(path: Path) -> Report:
    """The curve of a batch_search.json as table, CSV and figure, and the answer. UsageError: it is missing or damaged."""
    measured = files.read(path, BatchSearch)
    if all(trial["status"] == "out of memory" for trial in measured["trials"]):
        raise UsageError(f"{path}: trials: memory ran out in all of them")
    unit, factor = tables.time_unit(max(row[1] or 0 for row in curve(measured)))
    header = ["B", f"{unit}/step", "p20", "p80", "tokens/s", "peak MiB", "% of memory", "status"]
    rows = [[*row[:-1], row[-1] + ", chosen" * (row[0] == measured["batch_size"])] for row in curve(measured, factor)]
    names = ["batch_size", "ms", "p20", "p80", "tokens_per_second", "peak_mib", "memory_percent", "status"]
    share = f"% of the {measured['device']['memory_mib']:,.0f} MiB that there are"
    report = Report("Batch size search")
    report.text(
        f"{conditions(measured)}. Step times are medians. Memory: peak of the {measured['memory_kind']}; {share}.",
        f"Made by {run_facts.origin(measured)}.",
    )
    report.figure(lambda: figure(measured), "batch_search", "Throughput, step time and memory over the batch size")
    report.table(header, rows)
    report.csv("batch_search", names, curve(measured))
    report.json("batch_search", measured)
    usage = f"The target is at most {100 * measured['target_memory_usage']:g} % of the memory."
    report.text(f"Doubling ended: {measured['ended']}. {usage}")
    if measured["batch_size"]:
        report.text(f"Batch size for {measured['target']}: {measured['batch_size']}. It is {measured['reason']}.")
    return report


def conditions(measured: BatchSearch) -> str:
    return f"{measured['version']}, {run_facts.describe(measured, 'batch_size')}"


def curve(measured: BatchSearch, factor: float = 1.0) -> list[list[Any]]:
    """A row per trial, smallest batch first: B, median, p20 and p80 (ms x factor), tokens/s, peak MiB, % of memory, status."""
    rows = []
    for trial in sorted(measured["trials"], key=lambda trial: trial["batch_size"]):
        step, peak = trial["step_ms"], trial["peak_mib"]
        times = [factor * step["median"], factor * step["p20"], factor * step["p80"]] if step else [None] * 3
        percent = peak and 100 * peak / measured["device"]["memory_mib"]
        rows.append([trial["batch_size"], *times, trial["tokens_per_second"], peak, percent, trial["status"]])
    return rows


def figure(measured: BatchSearch) -> "plots.Figure":
    """Throughput, step time and share of the memory over the batch size; the answer is marked."""
    result, answer, memory = plots.new(15, 4.8), measured["batch_size"], measured["device"]["memory_mib"]
    result.suptitle(f"Batch size for {measured['target']}: {answer or 'not found'} ({conditions(measured)})")
    trained = [row for row in curve(measured) if row[-1] != "out of memory"]
    sizes, medians, p20, p80, rates, _, percents, _ = zip(*trained, strict=True)
    spread = [[abs(end - median) for end, median in zip(ends, medians, strict=True)] for ends in (p20, p80)]
    powers = [size for size in sizes if size & (size - 1) == 0]
    panels = [
        ("Throughput", "tokens/s", rates, None),
        ("Step time: median, p20 to p80", "ms per step", medians, spread),
        (f"Peak memory ({measured['memory_kind']})", f"% of {memory:,.0f} MiB", percents, None),
    ]
    for axes, (title, unit, values, errors) in zip(result.subplots(1, 3), panels, strict=True):
        axes.errorbar(sizes, values, errors, fmt="o-", capsize=4, color=plots.BLUE)
        axes.set_xscale("log", base=2)
        axes.set(title=title, xlabel="batch size", ylabel=unit, ylim=(0, None), xticks=powers[:: 1 + len(powers) // 8])
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_major_formatter("{x:,.10g}")
        axes.grid(True, color="0.9")
        if answer:
            axes.axvline(answer, color=plots.ORANGE, label="chosen")
    axes.axhline(100 * measured["target_memory_usage"], color=plots.VERMILION, linestyle="--", label="target")
    result.legend(*axes.get_legend_handles_labels(), loc="outside lower right", ncols=2)
    return result
