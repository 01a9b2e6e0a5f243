"""How step time, throughput and memory grow with the batch size B, from the profiles of runs that differ in nothing else.

Two straight lines are fitted by least squares:

    step time  t(B) = a + b B    a: the cost of a step that does not depend on B (issuing operations, the optimizer, Python)
                                 b: the cost of each sample; throughput S B / t(B) tends to S / b
    memory     m(B) = a + b B    a: weights, gradients, optimizer state, and on a CPU the process itself
                                 b: activations of one sample

A larger batch hides a: its share a / t(B) falls to 10 % where a = 0.1 (a + b B), at B = 9 a / b.
"""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.analysis.output import plots, run_facts
from common.analysis.output.report import Report
from common.analysis.output.tables import format_number
from common.errors import UsageError
from common.records import run_record, step_profile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Run = dict[str, Any]  # see run_record.TimedRun

HEADER = {  # column of the CSV: heading of the table
    "batch_size": "B", "ms": "ms/step", "p20": "p20", "p80": "p80", "steps": "steps", "tokens_per_second": "tokens/s",
    "speedup": "speed-up", "ideal": "ideal", "efficiency_percent": "efficiency %", "peak_mib": "peak MiB",
    "memory_kind": "memory of", "mib_per_sample": "MiB per extra sample", "tflops": "TFLOP/s", "mfu_percent": "MFU %",
    "gemm_percent": "% of measured GEMM",
}  # fmt: skip


class Line(NamedTuple):
    """fixed + per_sample B, and the largest distance of a measured point from it (None for two points)."""

    fixed: float
    per_sample: float
    residual: float | None

    def at(self, batch_size: float) -> float:
        return self.fixed + self.per_sample * batch_size

    def equation(self, unit: str) -> str:
        sign = "-" if self.per_sample < 0 else "+"
        return f"{format_number(self.fixed)} {unit} {sign} {format_number(abs(self.per_sample))} {unit} x B"


def analyze(folders: list[Path]) -> Report:
    """Compares the newest profile of each folder; the report has a table (and CSV), a figure and what the fits say.

    Raises:
        UsageError: the profiles cannot be compared, or are fewer than two.
    """
    runs = read(folders)
    listed = run_facts.peak_flops(runs[0]) is not None
    share = "a share of the data sheet's peak" if listed else "not given: this device's peak is not listed"
    report = Report("Batch scaling")
    report.text(f"{runs[0]['version']}, {run_facts.describe(runs[0], 'batch_size')}. Step times are medians. MFU is {share}.")
    report.table(list(HEADER.values()), rows(runs), csv="batch_scaling", csv_header=list(HEADER), least=("memory of", "ideal"))
    report.text(
        "Speed-up: tokens/s over those of the smallest batch. Ideal: the speed-up if a step took as long as with the smallest "
        "batch. Efficiency: speed-up over ideal."
    )
    report.figure(lambda: figure(runs), "batch_scaling", "Throughput, step time and memory over the batch size")
    report.text(*findings(runs))
    return report


def read(folders: list[Path]) -> list[Run]:
    """The run records of the newest profile in each folder, by batch size.

    Raises:
        UsageError: a folder holds no profile, two runs have one batch size or differ in anything else, or there are fewer than
            two.
    """
    if len(folders) < 2:
        raise UsageError(f"--profile-dirs: scaling needs at least two batch sizes, and {len(folders)} folder was given")
    found: dict[int, tuple[Path, Run]] = {}
    for path in map(step_profile.find, folders):
        run = step_profile.read(path)["run"]
        if size(run) in found:
            raise UsageError(f"{path} and {found[size(run)][0]} both have batch size {size(run)}: leave one out")
        found[size(run)] = path, run
        first_path, first = next(iter(found.values()))
        run_record.require_equal((first_path, path), (run_record.identity(first), run_record.identity(run)), "the batch size")
    return [found[batch_size][1] for batch_size in sorted(found)]


def size(run: Run) -> int:
    return run["training"]["batch_size"]


def rows(runs: list[Run]) -> list[list[object]]:
    """The columns of HEADER, a row per run; `runs` begin with the smallest batch."""
    smallest, table = runs[0], []
    for before, run in itertools.pairwise([None, *runs]):
        step, memory = run["step_ms"], run["memory"]
        speedup, ideal = run["tokens_per_second"] / smallest["tokens_per_second"], size(run) / size(smallest)
        added = before and (memory["peak_mib"] - before["memory"]["peak_mib"]) / (size(run) - size(before))
        table.append([
            size(run), step["median"], step["p20"], step["p80"], step["count"], run["tokens_per_second"], speedup, ideal,
            100 * speedup / ideal, memory["peak_mib"], memory["kind"], added, run["flops_per_second"] / 1e12,
            run_facts.mfu(run), run_facts.of_measured_gemm(run),
        ])  # fmt: skip
    return table


def fit(points: list[tuple[float, float]]) -> Line:
    """The straight line through the points (B, value), by least squares."""
    import numpy as np

    batch_sizes, values = np.array(points, dtype=float).T
    per_sample, fixed = (float(factor) for factor in np.polyfit(batch_sizes, values, 1))
    residual = float(np.abs(values - (fixed + per_sample * batch_sizes)).max()) if len(points) > 2 else None
    return Line(fixed, per_sample, residual)


def lines(runs: list[Run]) -> tuple[Line, Line]:
    """The lines through the medians of the step times in ms, and through the peaks of memory in MiB."""
    times = [(size(run), run["step_ms"]["median"]) for run in runs]
    peaks = [(size(run), run["memory"]["peak_mib"]) for run in runs]
    return fit(times), fit(peaks)


def findings(runs: list[Run]) -> list[str]:
    """A paragraph on each of the two lines, and the reasons to doubt them."""
    time, memory = lines(runs)
    notes = [
        f"Step time: t(B) = {time.equation('ms')}. {_time_meaning(time, runs)}",
        f"Memory: m(B) = {memory.equation('MiB')}. {_memory_meaning(memory, runs[0])}",
    ]
    if time.residual is None:
        notes.append("A line fits any two points, so nothing shows whether it describes other batch sizes: add a third.")
    else:
        notes.append(
            f"Largest distance of a median from its line: {format_number(time.residual)} ms, {format_number(memory.residual)} "
            "MiB. A large one means that the step is no straight line in B, as on a GPU that a small batch does not fill, or "
            "that the medians are noisy."
        )
    return notes + run_facts.doubts({f"B = {size(run)}": run for run in runs})


def _time_meaning(line: Line, runs: list[Run]) -> str:
    if line.per_sample <= 0:
        return "Step time does not grow with the batch here: the device has room for more samples, or noise hides the growth."
    if line.fixed <= 0:
        return "Step time grows at least as fast as the batch, so there is no fixed cost that a larger batch could hide."
    smallest, largest, length = size(runs[0]), size(runs[-1]), runs[0]["training"]["sequence_length"]
    enough = 9 * line.fixed / line.per_sample
    where = "" if smallest <= enough <= largest else ", outside the measured range"
    shares = " and ".join(f"{100 * line.fixed / line.at(batch):.0f} % at B = {batch}" for batch in (smallest, largest))
    return (
        f"The fixed {format_number(line.fixed)} ms are {shares} of the step, and fall to 10 % at B = 9 a / b = "
        f"{format_number(enough)}{where}. Throughput cannot exceed S / b = {length / line.per_sample * 1e3:,.0f} tokens/s on "
        "this line."
    )


def _memory_meaning(line: Line, run: Run) -> str:
    if line.per_sample <= 0:
        return "The peak does not grow with the batch here, so something else sets it."
    memory, on_cpu = run["device"]["memory_mib"], run["device"]["kind"] == "cpu"
    process = " and the process itself (interpreter, PyTorch)" * on_cpu
    full = f" On this line the device's {memory:,.0f} MiB are full at B = {(memory - line.fixed) / line.per_sample:,.0f}."
    return (
        f"The fixed part is weights, gradients, optimizer state{process}. Each sample adds the activations that its backward "
        f"pass needs.{full * (not on_cpu)}"
    )


def figure(runs: list[Run]) -> "Figure":
    """Throughput against the ideal, step time with its line, and memory with its line."""
    result = plots.new(15, 4.8)
    result.suptitle(f"Batch scaling: {runs[0]['version']}, {run_facts.describe(runs[0], 'batch_size')}")
    throughput, times, memory = result.subplots(1, 3)
    sizes, rates, steps = list(map(size, runs)), [run["tokens_per_second"] for run in runs], [run["step_ms"] for run in runs]
    reach = [0, sizes[-1] * 1.05]

    throughput.plot(sizes, rates, "o-", color=plots.BLUE, label="measured")
    ideal = [rates[0] * batch / sizes[0] for batch in sizes]
    throughput.plot(sizes, ideal, "--", color=plots.BLACK, label="ideal: step as long as with the smallest batch")
    throughput.set(title="Throughput", ylabel="tokens/s")

    spread = [step["median"] - step["p20"] for step in steps], [step["p80"] - step["median"] for step in steps]
    medians = [step["median"] for step in steps]
    times.errorbar(sizes, medians, spread, fmt="o", capsize=4, color=plots.BLUE, label="median, p20 to p80")
    times.set(title="Step time", ylabel="ms per step")

    peaks, label = [run["memory"]["peak_mib"] for run in runs], f"peak, {runs[0]['memory']['kind']}"
    memory.plot(sizes, peaks, "o", color=plots.BLUE, label=label)
    memory.set(title="Peak memory", ylabel="MiB")

    for axes, line, unit in zip((times, memory), lines(runs), ("ms", "MiB"), strict=True):
        axes.plot(reach, list(map(line.at, reach)), color=plots.VERMILION, label=f"fit: {line.equation(unit)}")
    for axes in (throughput, times, memory):
        bottom, top = axes.get_ylim()
        axes.set(xlabel="batch size", xlim=reach)
        axes.set_ylim(min(0, bottom) if axes is times else 0, 1.2 * top)  # room for the legend above the points
        axes.grid(True, color="0.9")
        axes.legend(loc="upper left", fontsize=9)
    return result
