"""How step time, throughput and memory grow with the batch size B, from the profiles of runs that differ in nothing else.

Two straight lines are fitted by least squares:

    step time  t(B) = a + b B    a: what a step costs however small its batch (issuing operations, the optimizer, Python)
                                 b: what each sample adds; throughput S B / t(B) tends to S / b
    memory     m(B) = a + b B    a: weights, gradients, optimizer state, and on a CPU the process itself
                                 b: activations of one sample

A larger batch hides a: its share a / t(B) falls to 10 % where a = 0.1 (a + b B), at B = 9 a / b.
"""

from pathlib import Path
from typing import Any, NamedTuple

from common.analysis.output import plots, tables
from common.analysis.profiles import run_record, step_profile
from common.errors import UsageError
from common.files import writable_folder, write_text

HEADER = {  # column of batch_scaling.csv: heading of the table
    "batch_size": "B", "ms": "ms/step", "p20": "p20", "p80": "p80", "steps": "steps", "tokens_per_second": "tokens/s",
    "speedup": "speed-up", "ideal": "ideal", "efficiency_percent": "efficiency %", "peak_mib": "peak MiB",
    "memory_kind": "memory of", "mib_per_sample": "MiB per extra sample", "tflops": "TFLOP/s", "mfu_percent": "MFU %",
}  # fmt: skip


class Line(NamedTuple):
    """fixed + per_sample B, and the largest distance of a measured point from it (None for two points)."""

    fixed: float
    per_sample: float
    residual: float | None

    def at(self, batch_size: float) -> float:
        return self.fixed + self.per_sample * batch_size


def analyze(folders: list[Path], output: Path) -> str:
    """Compares the newest profile of each folder and writes batch_scaling.csv, .md and .png into `output`.

    Returns:
        The table and what the fits say, for the terminal.

    Raises:
        UsageError: the profiles cannot be compared, or are fewer than two, or `output` cannot be written.
    """
    runs = read(folders)
    writable_folder(output, "--output-dir")
    rows = describe(runs)
    time_line = fit([(row["batch_size"], row["ms"]) for row in rows])
    memory_line = fit([(row["batch_size"], row["peak_mib"]) for row in rows])
    notes = findings(runs, rows, time_line, memory_line)
    table = [list(row.values()) for row in rows]
    write_text(output / "batch_scaling.csv", tables.csv_text(list(HEADER), table))
    parts = [
        "# Batch scaling",
        conditions(runs[0]),
        tables.markdown(list(HEADER.values()), table).strip(),
        "Speed-up: tokens/s over those of the smallest batch; ideal: what it would be if a step took as long as with the "
        "smallest batch; efficiency: one over the other.",
        "![Throughput, step time and memory over the batch size](batch_scaling.png)",
        *notes,
    ]
    write_text(output / "batch_scaling.md", "\n\n".join(parts) + "\n")
    plot(runs[0], rows, time_line, memory_line, output / "batch_scaling.png")
    written = ", ".join(str(output / f"batch_scaling.{kind}") for kind in ("csv", "md", "png"))
    return "\n\n".join([conditions(runs[0]), tables.text(list(HEADER.values()), table), *notes, f"written: {written}"])


def read(folders: list[Path]) -> list[dict[str, Any]]:
    """The run records of the newest profile in each folder, by batch size.

    Raises:
        UsageError: a folder holds no profile, a run has no finished step, two runs have one batch size or differ in
            anything else, or there are fewer than two.
    """
    if len(folders) < 2:
        raise UsageError(f"--profile-dirs: scaling needs at least two batch sizes, and {len(folders)} folder was given")
    paths = [step_profile.find(folder) for folder in folders]
    found: dict[int, tuple[Path, dict[str, Any]]] = {}
    for path in paths:
        run = step_profile.read(path)["run"]
        batch_size = run["training"]["batch_size"]
        if "median" not in run["step_ms"]:
            raise UsageError(f"{path}: the run finished no step; run it again, or leave this folder out")
        if batch_size in found:
            raise UsageError(f"{path} and {found[batch_size][0]} both have batch size {batch_size}: leave one out")
        found[batch_size] = path, run
        _same(found[next(iter(found))], (path, run))
    return [found[batch_size][1] for batch_size in sorted(found)]


def _same(first: tuple[Path, dict[str, Any]], other: tuple[Path, dict[str, Any]]) -> None:
    """Raises UsageError if the two runs differ in anything but the batch size that a step's time depends on."""
    ours, theirs = run_record.identity(first[1]), run_record.identity(other[1])
    differing = [f"{name} ({ours[name]} and {theirs.get(name)})" for name in ours if ours[name] != theirs.get(name)]
    if differing:
        raise UsageError(
            f"{first[0]} and {other[0]} differ in more than the batch size: {', '.join(differing)}; "
            "give runs that are otherwise equal"
        )


def describe(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per run, smallest batch first, with the keys of HEADER."""
    smallest = runs[0]
    rows: list[dict[str, Any]] = []
    for i, run in enumerate(runs):
        step, batch_size, peak = run["step_ms"], run["training"]["batch_size"], run["memory"]["peak_mib"]
        speedup = run["tokens_per_second"] / smallest["tokens_per_second"]
        ideal = batch_size / smallest["training"]["batch_size"]
        added = batch_size - rows[-1]["batch_size"] if i else None
        rows.append(
            {
                "batch_size": batch_size,
                "ms": step["median"],
                "p20": step["p20"],
                "p80": step["p80"],
                "steps": step["count"],
                "tokens_per_second": run["tokens_per_second"],
                "speedup": speedup,
                "ideal": ideal,
                "efficiency_percent": 100 * speedup / ideal,
                "peak_mib": peak,
                "memory_kind": run["memory"]["kind"],
                "mib_per_sample": (peak - rows[-1]["peak_mib"]) / added if added else None,
                "tflops": run["flops_per_second"] / 1e12,
                "mfu_percent": 100 * run["mfu"]["utilization"] if run["mfu"] else None,
            }
        )
    return rows


def fit(points: list[tuple[float, float]]) -> Line:
    """The straight line through the points (B, value), by least squares."""
    import numpy as np

    batch_sizes, values = np.array(points, dtype=float).T
    per_sample, fixed = np.polyfit(batch_sizes, values, 1)
    residual = np.abs(values - (fixed + per_sample * batch_sizes)).max() if len(points) > 2 else None
    return Line(float(fixed), float(per_sample), None if residual is None else float(residual))


def conditions(run: dict[str, Any]) -> str:
    precision = run["precision"]
    tf32 = " (TF32 allowed)" if precision["tf32"] else ""
    mfu = (
        f" MFU is a share of the run's peak ({run['mfu']['peak_source']})."
        if run["mfu"]
        else " MFU is not given: this device's peak is not known."
    )
    return (
        f"{run['version']}, {run['device']['name']}, {precision['compute']}{tf32}, torch {run['environment']['torch']}, sequence "
        f"length {run['training']['sequence_length']}; {tables.letters(run['model'])}. "
        f"Step times are medians.{mfu}"
    )


def findings(runs: list[dict[str, Any]], rows: list[dict[str, Any]], time_line: Line, memory_line: Line) -> list[str]:
    """What the two lines say, a paragraph each, and what to hold against them."""
    length = runs[0]["training"]["sequence_length"]
    notes = [
        f"Step time: t(B) = {_equation(time_line, 'ms')}. {_time_meaning(time_line, rows, length)}",
        f"Memory: m(B) = {_equation(memory_line, 'MiB')}. {_memory_meaning(memory_line, runs[0])}",
    ]
    if time_line.residual is not None:
        notes.append(
            f"Largest distance of a median from its line: {tables.figure(time_line.residual)} ms, "
            f"{tables.figure(memory_line.residual)} MiB. A large one says that the step is no straight line in B, as on a GPU "
            "that a small batch does not fill, or that the medians are noisy."
        )
    if len(rows) == 2:
        notes.append("A line goes through any two points: nothing here says whether it describes other batch sizes. Add a third.")
    profiled = [
        row["batch_size"] for row, run in zip(rows, runs, strict=True) if run["step_ms"]["profiled"] >= len(run["step_ms"]["all"])
    ]
    if profiled:
        notes.append(
            f"All steps at B = {', '.join(map(str, profiled))} ran under the profiler, which slows them: raise --num-steps."
        )
    few = min(row["steps"] for row in rows)
    if few < 10:
        notes.append(f"As few as {few} timed steps stand behind a median; raise --num-steps for figures to rely on.")
    return notes


def _equation(line: Line, unit: str) -> str:
    sign = "-" if line.per_sample < 0 else "+"
    return f"{tables.figure(line.fixed)} {unit} {sign} {tables.figure(abs(line.per_sample))} {unit} x B"


def _time_meaning(line: Line, rows: list[dict[str, Any]], length: int) -> str:
    if line.per_sample <= 0:
        return "Step time does not grow with the batch here: the device has room for more samples, or noise hides the growth."
    if line.fixed <= 0:
        return "No fixed cost shows: step time grows at least as fast as the batch, so a larger batch hides nothing."
    smallest, largest = rows[0]["batch_size"], rows[-1]["batch_size"]
    enough = 9 * line.fixed / line.per_sample
    where = "" if smallest <= enough <= largest else ", outside the measured range"
    shares = " and ".join(f"{100 * line.fixed / line.at(size):.0f} % at B = {size}" for size in (smallest, largest))
    return (
        f"The fixed {tables.figure(line.fixed)} ms are {shares} of the step, and fall to 10 % at "
        f"B = 9 a / b = {tables.figure(enough)}{where}. Throughput cannot exceed S / b = "
        f"{length / line.per_sample * 1e3:,.0f} tokens/s on this line."
    )


def _memory_meaning(line: Line, run: dict[str, Any]) -> str:
    if line.per_sample <= 0:
        return "The peak does not grow with the batch here; it is set by something else."
    on_cpu = run["device"]["kind"] == "cpu"
    process = " and the process itself (interpreter, PyTorch)" if on_cpu else ""
    meaning = (
        f"The fixed part is weights, gradients, optimizer state{process}; each sample adds the activations that its backward "
        "pass needs."
    )
    if on_cpu:
        return meaning
    memory = run["device"]["memory_mib"]
    return (
        f"{meaning} On this line the device's {memory:,.0f} MiB are full at B = {(memory - line.fixed) / line.per_sample:,.0f}."
    )


def plot(run: dict[str, Any], rows: list[dict[str, Any]], time_line: Line, memory_line: Line, path: Path) -> None:
    """Throughput against the ideal, step time with its line, and memory with its line."""
    figure = plots.new(15, 4.8)
    figure.suptitle(
        f"Batch scaling: {run['version']}, {run['precision']['compute']}, sequence length {run['training']['sequence_length']}, "
        f"{run['device']['name']}"
    )
    throughput, times, memory = figure.subplots(1, 3)
    sizes = [row["batch_size"] for row in rows]
    reach = [0, sizes[-1] * 1.05]

    throughput.plot(sizes, [row["tokens_per_second"] for row in rows], "o-", color=plots.BLUE, label="measured")
    ideal = [rows[0]["tokens_per_second"] * row["ideal"] for row in rows]
    throughput.plot(sizes, ideal, "--", color=plots.BLACK, label="ideal: step as long as with the smallest batch")
    throughput.set(title="Throughput", ylabel="tokens/s")

    below, above = [row["ms"] - row["p20"] for row in rows], [row["p80"] - row["ms"] for row in rows]
    times.errorbar(
        sizes, [row["ms"] for row in rows], (below, above), fmt="o", capsize=4, color=plots.BLUE, label="median, p20 to p80"
    )
    label = f"fit: {_equation(time_line, 'ms')}"
    times.plot(reach, [time_line.at(size) for size in reach], color=plots.VERMILION, label=label)
    times.set(title="Step time", ylabel="ms per step")

    memory.plot(sizes, [row["peak_mib"] for row in rows], "o", color=plots.BLUE, label=f"peak, {rows[0]['memory_kind']}")
    label = f"fit: {_equation(memory_line, 'MiB')}"
    memory.plot(reach, [memory_line.at(size) for size in reach], color=plots.VERMILION, label=label)
    memory.set(title="Peak memory", ylabel="MiB")

    for axes in (throughput, times, memory):
        axes.set(xlabel="batch size", xlim=reach)
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]) if axes is times else 0)
        axes.grid(True, color="0.9")
        axes.legend(fontsize=9)
    plots.save(figure, path)
