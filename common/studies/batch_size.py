"""Searches the batch size at which a version trains fastest, answers fastest, or fills the memory that it may take.

The batch size is doubled until it no longer fits, a maximum is reached, a step takes too long (by default only on a CPU, whose
step time grows with the batch), or, for throughput and latency, doubling no longer helps. Then the search narrows. It looks for,
with a tolerance of e = 2 %:

    throughput   the smallest batch whose tokens/s are within e of the best
    latency      the largest batch whose step takes at most e longer than the fastest: samples that cost no time
    memory       the largest batch that fits

Where doubling ends. Let a step take t(B) = a + b B (see common/analysis/comparisons/batch_scaling.py), so that throughput B / t(B) tends to 1 / b.
It is flat when two doublings, B -> 4 B, gain less than e: then 4 (a + b B) / (a + 4 b B) < 1.02, so a / (b B) < 0.027, and at
4 B the throughput is above 1 / (1 + 0.027 / 4) = 99.3 % of what the largest batch could reach. The answer is the smallest batch
within e, not the fastest, since the last 2 % are bought with ever larger batches and their memory. Latency ends likewise: when
two doublings both take more than e longer than the fastest step.

A trial has a process of its own, at the price of seconds to start it. So the search survives the kernel, which kills a process
when a machine's memory runs out; the peak of the resident set is that of this batch size alone; and a GPU's memory is given back
whole. The peak counts all of a trial, its first steps and their compilation too.

The result, batch_search.json (schema "tiny-llama-batch-search/1"):

    command, date, version, device, environment, model, settings     as in a run record
    training         sequence_length, seed
    precision        {"compute": "fp32"}
    target           "throughput", "latency" or "memory"; target_memory_usage: the share of device.memory_mib to stay under
    memory_kind      what peak_mib counts: "GPU allocator" or "process RSS"
    trials           in the order in which they ran: {"batch_size", "status", "step_ms": {"median", "p20", "p80", "count"},
                     "tokens_per_second", "peak_mib"}, the last three null where memory ran out
    ended            why doubling ended
    batch_size       the answer, and reason: why this one

The curve over the batch size that a search has measured (written by `common.studies.batch_size`), and its answer.
"""

import argparse
import math
import multiprocessing
import shlex
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from common import cli
from common import device as devices
from common.analysis.output import plots, tables
from common.errors import RunError, UsageError
from common.files import read_json, write_text
from common.precision import Precision
from common.timing import benchmark, summarize
from common.training import version_files
from common.training.record import settings

import torch

TOLERANCE = 0.02  # of throughput and step time
PERCENT = f"{100 * TOLERANCE:g} %"
RESOLUTION = 16  # narrowing ends when two batch sizes are a sixteenth apart
MAXIMUM = 4096
LONGEST = {"cpu": 1.0, "cuda": math.inf}  # seconds a step: past it a CPU's search would take many minutes
WARMUP, SECONDS, STEPS = 2, 1.0, (3, 50)  # untimed steps; then steps for about a second, but at least 3 and at most 50

TARGETS = ("throughput", "latency", "memory")


class Trial(NamedTuple):
    """One batch size. status: FITS, OVER or OUT; the rest is None where memory ran out."""

    batch_size: int
    status: str
    step_ms: dict[str, float] | None = None
    tokens_per_second: float | None = None
    peak_mib: float | None = None


class Found(NamedTuple):
    """All trials in the order in which they ran, why doubling ended, and the answer."""

    trials: list[Trial]
    ended: str
    batch_size: int
    reason: str


def share(text: str) -> float:
    """ "0.8" -> 0.8, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share of the device's memory, above 0 and at most 1")
    return value


# ------------------------------------------------------------------------------------------------------------ search


def search(trial: Callable[[int], Trial], target: str, maximum: int, longest: float = math.inf) -> Found:
    """Doubles, narrows and answers.

    Args:
        trial: called once for each batch size that is tried.
        target: of TARGETS.
        maximum: no larger batch size is tried.
        longest: seconds; once a step takes longer, the batch size is not doubled again.

    Raises:
        RunError: batch size 1 does not fit.
    """
    tried: dict[int, Trial] = {}

    def fits(size: int) -> bool:
        if size not in tried:
            tried[size] = trial(size)
        return tried[size].status == FITS

    ended = double(fits, tried, target, maximum, longest)
    if target == "memory":
        batch_size, reason = largest(fits, tried)
    elif target == "latency":
        batch_size, reason = largest_as_fast(fits, tried)
    else:
        batch_size, reason = smallest_within_best(fits, tried)
    return Found(list(tried.values()), ended, batch_size, reason)


def double(fits: Callable[[int], bool], tried: dict[int, Trial], target: str, maximum: int, longest: float) -> str:
    """Tries 1, 2, 4, ... and returns why it ended.

    Raises:
        RunError: batch size 1 does not fit.
    """
    size = 1
    while fits(size):
        if target != "memory" and flat(list(tried.values()), target):
            gain = "raised the throughput by" if target == "throughput" else "kept the step time within"
            than = "" if target == "throughput" else " of the fastest"
            return f"the last two doublings, up to {size}, have not {gain} {PERCENT}{than}"
        seconds = tried[size].step_ms["median"] / 1e3
        if seconds > longest:
            return f"a step of batch size {size} takes {seconds:.3g} s, more than {longest:g} (--max-step-seconds)"
        if size == maximum:
            return f"the maximum is reached: {maximum} (--max-batch-size)"
        size = min(2 * size, maximum)
    if size == 1:
        raise RunError(
            f"not even batch size 1 fits ({tried[1].status}): lower --seq-len, take a smaller --preset, try --use-amp, or raise "
            "--target-memory-usage"
        )
    return f"batch size {size} does not fit: {tried[size].status}"


def flat(trials: list[Trial], target: str) -> bool:
    """Whether the last two doublings have brought nothing, by the tolerance. `trials` all fit, smallest first."""
    if len(trials) < 3:
        return False
    if target == "throughput":
        rates = [trial.tokens_per_second for trial in trials]
        return max(rates[-2:]) < (1 + TOLERANCE) * max(rates[:-2])
    times = [trial.step_ms["median"] for trial in trials]
    return min(times[-2:]) > (1 + TOLERANCE) * min(times[:-2])


def narrow(low: int, high: int, holds: Callable[[int], bool]) -> None:
    """Bisects between `low`, for which it holds, and `high`, for which it does not, down to a sixteenth of `low`."""
    while high - low > max(1, low // RESOLUTION):
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)


def fitting(tried: dict[int, Trial]) -> list[Trial]:
    return sorted(trial for trial in tried.values() if trial.status == FITS)


def above(tried: dict[int, Trial], size: int) -> int | None:
    """The next larger batch size that was tried."""
    return min((other for other in tried if other > size), default=None)


def largest(fits: Callable[[int], bool], tried: dict[int, Trial]) -> tuple[int, str]:
    """The answer for memory, and why."""
    low = fitting(tried)[-1].batch_size
    high = above(tried, low)
    if high is None:
        return low, "the largest batch size tried, and it fits: the memory's limit lies above"
    narrow(low, high, fits)
    low = fitting(tried)[-1].batch_size
    high = above(tried, low)
    return low, f"the largest batch size tried that fits; the next, {high}, does not: {tried[high].status}"


def largest_as_fast(fits: Callable[[int], bool], tried: dict[int, Trial]) -> tuple[int, str]:
    """The answer for latency, and why."""

    def fast(size: int) -> bool:
        return fits(size) and tried[size].step_ms["median"] <= (1 + TOLERANCE) * fastest().step_ms["median"]

    def fastest() -> Trial:
        return min(fitting(tried), key=lambda trial: trial.step_ms["median"])

    def answer() -> int:
        return max(trial.batch_size for trial in fitting(tried) if fast(trial.batch_size))

    high = above(tried, answer())
    if high is not None:
        narrow(answer(), high, fast)
    first = fastest()
    return answer(), (
        f"the largest batch size tried whose step takes at most {PERCENT} longer than the fastest, "
        f"{first.step_ms['median']:.2f} ms at batch size {first.batch_size}"
    )


def smallest_within_best(fits: Callable[[int], bool], tried: dict[int, Trial]) -> tuple[int, str]:
    """The answer for throughput, and why."""

    def best() -> Trial:
        return max(fitting(tried), key=lambda trial: trial.tokens_per_second)

    def enough(size: int) -> bool:
        return fits(size) and tried[size].tokens_per_second >= (1 - TOLERANCE) * best().tokens_per_second

    def answer() -> int:
        return min(trial.batch_size for trial in fitting(tried) if enough(trial.batch_size))

    for _ in range(2):  # look between the best and its neighbours, twice as closely the second time
        size = best().batch_size
        neighbours = [max((other for other in tried if other < size), default=None), above(tried, size)]
        for middle in [(size + other) // 2 for other in neighbours if other]:
            fits(middle)
    below = max((size for size in tried if size < answer()), default=None)
    if below is not None:
        narrow(below, answer(), lambda size: not enough(size))
    first = best()
    return answer(), (
        f"the smallest batch size tried within {PERCENT} of the best throughput, {first.tokens_per_second:,.0f} tokens/s at "
        f"batch size {first.batch_size}"
    )


# ------------------------------------------------------------------------------------------------------------- trials


def measure(version: ModuleType, options: Namespace, flags: list[str]) -> dict[str, Any]:
    """Searches with a process for each trial, and prints a line for each.

    Args:
        options: from `version_files.resolve`, with optimization_target, target_memory_usage, max_batch_size and max_step_seconds
            (None: of LONGEST).
        flags: of the version's own.

    Returns:
        The content of batch_search.json.

    Raises:
        UsageError: the version has no such flag, or the device or the number format is not there.
        RunError: batch size 1 does not fit, or a trial failed for another reason than memory.
    """
    chosen, path = version_files.switched(version, options, *flags), Path(version.__file__)
    described = settings(version, chosen)
    longest = options.max_step_seconds or LONGEST[devices.select(options.device).type]
    common: dict[str, Any] = {}

    def trial(batch_size: int) -> Trial:
        measured = in_own_process(path, Namespace(**vars(options) | {"batch_size": batch_size}), flags)
        result = Trial(batch_size, OUT)
        if measured:
            common.update(measured["common"])
            allowed = options.target_memory_usage * common["device"]["memory_mib"]
            status = FITS if measured["peak_mib"] <= allowed else OVER
            rate = batch_size * options.seq_len / measured["step_ms"]["median"] * 1e3
            result = Trial(batch_size, status, measured["step_ms"], rate, measured["peak_mib"])
        print(line(result), flush=True)
        return result

    found = search(trial, options.optimization_target, options.max_batch_size, longest)
    return {
        "schema": SCHEMA,
        "command": shlex.join(sys.argv),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "version": path.stem.removeprefix("tiny_llama_"),
        "environment": devices.environment(),
        "model": options.model.model_dump(),
        "settings": described,
        "training": {"sequence_length": options.seq_len, "seed": options.seed},
        "target": options.optimization_target,
        "target_memory_usage": options.target_memory_usage,
        **common,
        "trials": [item._asdict() for item in found.trials],
        "ended": found.ended,
        "batch_size": found.batch_size,
        "reason": found.reason,
    }


def line(trial: Trial) -> str:
    """A trial for the terminal."""
    if trial.status == OUT:
        return f"batch size {trial.batch_size:5d}  {OUT}"
    return (
        f"batch size {trial.batch_size:5d}  {trial.step_ms['median']:9.2f} ms/step  {trial.tokens_per_second:11,.0f} tokens/s  "
        f"{trial.peak_mib:9,.0f} MiB  {trial.status}"
    )


def in_own_process(path: Path, options: Namespace, flags: list[str]) -> dict[str, Any] | None:
    """What `train` returns, run in a new process; None where memory ran out or the kernel killed it (SIGKILL).

    Raises:
        UsageError, RunError: as in the process, and RunError where it ended in any other way.
    """
    context = multiprocessing.get_context("spawn")  # a forked process could use neither the GPU nor PyTorch's threads
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_trial, args=(sender, path, options, flags), daemon=True)
    process.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        result = None
    process.join()
    if isinstance(result, UsageError | RunError):
        raise result
    if process.exitcode not in (0, -signal.SIGKILL):
        raise RunError(
            f"the trial of batch size {options.batch_size} failed, exit code {process.exitcode}: see its message above"
        )
    return result


def _trial(sender: Connection, path: Path, options: Namespace, flags: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches this process too: end without a traceback
    try:
        result = train(version_files.load(path), options, flags)
    except (UsageError, RunError) as error:
        result = error
    except (RuntimeError, MemoryError) as error:
        if not devices.is_out_of_memory(error):
            raise
        result = None
    sender.send(result)


def train(version: ModuleType, options: Namespace, flags: list[str]) -> dict[str, Any]:
    """Trains a few steps, in the process of the trial: step_ms, peak_mib, and under `common` what is the same in all trials."""
    device = devices.select(options.device)
    devices.prepare(device, options.seed)
    described = devices.describe(device)
    devices.limit_memory(device, described["memory_mib"])
    precision = Precision(device, cli.amp_dtype(options))
    chosen, batch = version_files.switched(version, options, *flags), version_files.random_batch(options, device)
    model = version.make_model(chosen).to(device)
    optimizer = version.make_optimizer(model, chosen)

    def step() -> torch.Tensor:
        return version.train_step(model, optimizer, batch, precision)

    first = benchmark(step, device, warmup=WARMUP, iterations=1)[0]
    count = min(max(int(SECONDS * 1e3 / first), STEPS[0]), STEPS[1])
    times = benchmark(step, device, warmup=0, iterations=count)
    peak = devices.peak_memory(device)
    common = {"device": described, "precision": {"compute": precision.name}, "memory_kind": peak["kind"]}
    return {"step_ms": summarize(times), "peak_mib": peak["peak_mib"], "common": common}


SCHEMA = "tiny-llama-batch-search/1"
FITS, OVER, OUT = "ok", "over target", "out of memory"
NAME = "batch_search"


def analyze(path: Path, folder: Path) -> str:
    """Reads batch_search.json and writes batch_search.csv, .md and .png into `folder`.

    Returns:
        The curve and the answer, for the terminal.

    Raises:
        UsageError: the file is not of schema tiny-llama-batch-search/1.
    """
    measured = read_json(path, SCHEMA)
    header, rows = table(measured)
    write_text(folder / f"{NAME}.csv", _csv(measured))
    parts = [
        "# Batch size search",
        conditions(measured),
        f"Made by `{measured['command']}` on {measured['date']}.",
        f"![Throughput, step time and memory over the batch size]({NAME}.png)",
        tables.markdown(header, rows).strip(),
        *findings(measured),
    ]
    write_text(folder / f"{NAME}.md", "\n\n".join(parts) + "\n")
    plot(measured, folder / f"{NAME}.png")
    written = ", ".join(str(folder / f"{NAME}.{kind}") for kind in ("json", "csv", "md", "png"))
    return "\n\n".join([conditions(measured), tables.text(header, rows), *findings(measured), f"written: {written}"])


def curve(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """The trials, smallest batch first, with memory_percent, the peak's share of the device's memory."""
    whole = measured["device"]["memory_mib"]
    trials = sorted(measured["trials"], key=lambda trial: trial["batch_size"])
    return [trial | {"memory_percent": trial["peak_mib"] and 100 * trial["peak_mib"] / whole} for trial in trials]


def table(measured: dict[str, Any]) -> tuple[list[str], list[list[object]]]:
    """A row per trial, smallest batch first."""
    header = ["B", "ms/step", "p20", "p80", "tokens/s", "peak MiB", "% of memory", "status"]
    rows = []
    for trial in curve(measured):
        step = trial["step_ms"] or {}
        status = f"{trial['status']}, chosen" if trial["batch_size"] == measured["batch_size"] else trial["status"]
        rows.append([
            trial["batch_size"], step.get("median"), step.get("p20"), step.get("p80"), trial["tokens_per_second"],
            trial["peak_mib"], trial["memory_percent"], status,
        ])  # fmt: skip
    return header, rows


def conditions(measured: dict[str, Any]) -> str:
    device = measured["device"]
    on = [name for name, value in measured["settings"].items() if value is True]
    switches = f" ({', '.join(on) or 'nothing'} on)" if measured["settings"] else ""
    return (
        f"{measured['version']}{switches}, {device['name']}, {measured['precision']['compute']}, torch "
        f"{measured['environment']['torch']}, sequence length {measured['training']['sequence_length']}; "
        f"{tables.letters(measured['model'])}. Step times are medians. Memory: peak of the "
        f"{measured['memory_kind']}; % of the {device['memory_mib']:,.0f} MiB that there are."
    )


def findings(measured: dict[str, Any]) -> list[str]:
    """Which rule ended the search, and the answer, a paragraph each."""
    share = f"{100 * measured['target_memory_usage']:g} %"
    return [
        f"Doubling ended: {measured['ended']}. The target is at most {share} of the memory.",
        f"Batch size for {measured['target']}: {measured['batch_size']}. It is {measured['reason']}.",
    ]


def _csv(measured: dict[str, Any]) -> str:
    header = ["batch_size", "ms", "p20", "p80", "tokens_per_second", "peak_mib", "memory_percent", "status"]
    pairs = zip(table(measured)[1], curve(measured), strict=True)
    return tables.csv_text(header, ([*row[:-1], trial["status"]] for row, trial in pairs))


def plot(measured: dict[str, Any], path: Path) -> None:
    """Throughput, step time and share of the memory over the batch size; the answer is marked."""
    figure = plots.new(15, 4.8)
    figure.suptitle(
        f"Batch size for {measured['target']}: {measured['batch_size']} ({measured['version']}, "
        f"{measured['precision']['compute']}, sequence length {measured['training']['sequence_length']}, "
        f"{measured['device']['name']})"
    )
    trials = [trial for trial in curve(measured) if trial["status"] != OUT]
    sizes = [trial["batch_size"] for trial in trials]
    throughput, times, memory = figure.subplots(1, 3)
    throughput.plot(sizes, [trial["tokens_per_second"] for trial in trials], "o-", color=plots.BLUE)
    throughput.set(title="Throughput", ylabel="tokens/s")
    medians = [trial["step_ms"]["median"] for trial in trials]
    below = [trial["step_ms"]["median"] - trial["step_ms"]["p20"] for trial in trials]
    over = [trial["step_ms"]["p80"] - trial["step_ms"]["median"] for trial in trials]
    times.errorbar(sizes, medians, (below, over), fmt="o-", capsize=4, color=plots.BLUE)
    times.set(title="Step time: median, p20 to p80", ylabel="ms per step")
    memory.plot(sizes, [trial["memory_percent"] for trial in trials], "o-", color=plots.BLUE)
    memory.axhline(100 * measured["target_memory_usage"], color=plots.VERMILION, linestyle="--", label="target")
    memory.set(title=f"Peak memory ({measured['memory_kind']})", ylabel=f"% of {measured['device']['memory_mib']:,.0f} MiB")
    for axes in (throughput, times, memory):
        axes.set_xscale("log", base=2)
        axes.set(xlabel="batch size")
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_ylim(bottom=0)
        axes.axvline(measured["batch_size"], color=plots.ORANGE, label="chosen")
        axes.grid(True, color="0.9")
        axes.legend()
    plots.save(figure, path)
