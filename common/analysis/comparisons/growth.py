"""How a training step grows with one size, from the profiles of runs that differ in nothing else.

`batch_scaling`: two straight lines over the batch size B, by least squares:

    step time  t(B) = a + b B    a: the cost of a step that does not depend on B (issuing operations, the optimizer, Python)
                                 b: the cost of each sample; throughput S B / t(B) tends to S / b
    memory     m(B) = a + b B    a: weights, gradients, optimizer state, and on a CPU the process itself
                                 b: activations of one sample

`sequence_memory`: through the peaks over the sequence length S, of each version and kind of attention, goes a parabola:

    peak  m(S) = a + b S + c S^2    a: what does not depend on S (on a GPU weights, AdamW's moments and the libraries' workspaces)
                                    b: what each position keeps: activations of width D and F, logits
                                    c: what each pair of positions keeps: the [B, H, S, S] matrices of plain attention

A fused kernel writes no such matrix (Dao et al. 2022, arXiv:2205.14135). At S = b / c the quadratic term takes over.

The local exponent log(m2 / m1) / log(S2 / S1) between two neighbouring lengths is that of the step's own memory, the peak without
weights and moments, which last from step to step. The allocator's total on a GPU includes them; the count of a CPU's profile
begins at zero and does not. Gradients, which `zero_grad` drops, are part of the step as far as they are alive at its peak.
"""

import itertools
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common import files
from common.analysis.formulas import footprint
from common.analysis.output import plots, run_facts
from common.analysis.output.report import Report
from common.analysis.output.tables import Table, format_number
from common.config import ModelConfig
from common.errors import UsageError
from common.records import run_record, step_profile
from common.records.run_record import TimedRun
from common.records.study_files import SequenceMemory, ShownRun

import numpy
from matplotlib.figure import Figure


class Curve(NamedTuple):
    """A polynomial: factors of x^0, x^1, ..., and the largest distance of a point from it (None if it goes through all)."""

    factors: tuple[float, ...]
    residual: float | None

    def at(self, x: float) -> float:
        return sum(factor * x**power for power, factor in enumerate(self.factors))

    def equation(self, unit: str) -> str:
        """A straight line over B, as text."""
        fixed, slope = self.factors
        return f"{format_number(fixed)} {unit} {'-' if slope < 0 else '+'} {format_number(abs(slope))} {unit} x B"


def fit(points: Sequence[tuple[float, float]], degree: int) -> Curve:
    """The polynomial through points (x, y), by least squares; factors to a millionth."""
    x, y = numpy.array(points, dtype=float).T
    factors = numpy.polyfit(x, y, degree)
    residual = float(numpy.abs(y - numpy.polyval(factors, x)).max()) if len(points) > degree + 1 else None
    return Curve(tuple(round(float(factor), 6) + 0.0 for factor in factors[::-1]), residual)


# ----------------------------------------------------------------------------------------------------------- batch size

HEADER = {  # column of the CSV: heading of the table
    "batch_size": "B", "ms": "ms/step", "p20": "p20", "p80": "p80", "steps": "steps", "tokens_per_second": "tokens/s",
    "speedup": "speed-up", "ideal": "ideal", "efficiency_percent": "efficiency %", "peak_mib": "peak MiB",
    "memory_kind": "memory of", "mib_per_sample": "MiB per extra sample", "tflops": "TFLOP/s", "mfu_percent": "MFU %",
    "gemm_percent": "% of measured GEMM",
}  # fmt: skip


def batch_scaling(folders: Sequence[Path]) -> Report:
    """Compares the newest profile of each folder; the report has a table (and CSV), a figure and what the fits say."""
    runs = read_sizes(folders)
    listed = run_facts.peak_flops(runs[0]) is not None
    share = "a share of the data sheet's peak" if listed else "not given: this device's peak is not listed"
    report = Report("Batch scaling")
    report.text(f"{runs[0]['version']}, {run_facts.describe(runs[0], 'batch_size')}. Step times are medians. MFU is {share}.")
    report.table(
        list(HEADER.values()), size_rows(runs), csv="batch_scaling", csv_header=list(HEADER), least=("memory of", "ideal")
    )
    report.text(
        "Speed-up: tokens/s over those of the smallest batch. Ideal: the speed-up if a step took as long as with the smallest "
        "batch. Efficiency: speed-up over ideal."
    )
    time, memory = lines(runs)
    report.figure(lambda: size_figure(runs), "batch_scaling", "Throughput, step time and memory over the batch size")
    report.text(
        f"Step time: t(B) = {time.equation('ms')}. {_time_meaning(time, runs)}",
        f"Memory: m(B) = {memory.equation('MiB')}. {_memory_meaning(memory, runs[0])}",
    )
    if time.residual is None or memory.residual is None:
        report.text("A line fits any two points, so nothing shows whether it describes other batch sizes: add a third.")
    else:
        report.text(
            f"Largest distance of a median from its line: {format_number(time.residual)} ms, {format_number(memory.residual)} "
            "MiB. A large one means that the step is no straight line in B, as on a GPU that a small batch does not fill, or "
            "that the medians are noisy."
        )
    report.text(*run_facts.doubts({f"B = {size(run)}": run for run in runs}))
    return report


def read_sizes(folders: Sequence[Path]) -> list[TimedRun]:
    """The run records of the newest profile in each of two folders or more, by batch size; they differ in nothing else."""
    if len(folders) < 2:
        raise UsageError(f"--profile-dirs: scaling needs at least two batch sizes, and {len(folders)} folder was given")
    found = [(path, step_profile.read(path)["run"]) for path in map(step_profile.find, folders)]
    for (path, run), (other_path, other) in itertools.combinations(found, 2):
        if size(run) == size(other):
            raise UsageError(f"{path} and {other_path} both have batch size {size(run)}: leave one out")
        ours, theirs = (run_record.identity(each) | each.get("settings", {}) for each in (run, other))
        run_record.require_equal((path, other_path), (ours, theirs), "the batch size")
    return sorted((run for _, run in found), key=size)


def size(run: TimedRun) -> int:
    return run["training"]["batch_size"]


def size_rows(runs: Sequence[TimedRun]) -> list[list[object]]:
    """The columns of HEADER, a row per run; `runs` begin with the smallest batch."""
    smallest, table = runs[0], []
    for before, run in zip([None, *runs[:-1]], runs, strict=True):
        step, memory = run["step_ms"], run["memory"]
        speedup, ideal = run["tokens_per_second"] / smallest["tokens_per_second"], size(run) / size(smallest)
        added = before and (memory["peak_mib"] - before["memory"]["peak_mib"]) / (size(run) - size(before))
        row = run_facts.columns(run) | {
            "B": size(run), "p20": step["p20"], "p80": step["p80"], "steps": step["count"], "speed-up": speedup, "ideal": ideal,
            "efficiency %": 100 * speedup / ideal, "memory of": memory["kind"], "MiB per extra sample": added,
        }  # fmt: skip
        table.append([row[heading] for heading in HEADER.values()])
    return table


def lines(runs: Sequence[TimedRun]) -> tuple[Curve, Curve]:
    """The lines through the medians of the step times in ms, and through the peaks of memory in MiB."""
    times = [(size(run), run["step_ms"]["median"]) for run in runs]
    peaks = [(size(run), run["memory"]["peak_mib"]) for run in runs]
    return fit(times, 1), fit(peaks, 1)


def _time_meaning(line: Curve, runs: Sequence[TimedRun]) -> str:
    fixed, per_sample = line.factors
    if per_sample <= 0:
        return "Step time does not grow with the batch here: the device has room for more samples, or noise hides the growth."
    if fixed <= 0:
        return "Step time grows at least as fast as the batch, so there is no fixed cost that a larger batch could hide."
    smallest, largest = size(runs[0]), size(runs[-1])
    length = runs[0]["training"]["sequence_length"] * run_record.processes(runs[0])  # tokens of all processes for each sample
    enough = 9 * fixed / per_sample
    where = "" if smallest <= enough <= largest else ", outside the measured range"
    shares = " and ".join(f"{100 * fixed / line.at(batch):.0f} % at B = {batch}" for batch in (smallest, largest))
    return (
        f"The fixed {format_number(fixed)} ms are {shares} of the step, and fall to 10 % at B = 9 a / b = "
        f"{format_number(enough)}{where}. Throughput cannot exceed S / b = {length / per_sample * 1e3:,.0f} tokens/s on "
        "this line."
    )


def _memory_meaning(line: Curve, run: TimedRun) -> str:
    fixed, per_sample = line.factors
    if per_sample <= 0:
        return "The peak does not grow with the batch here, so something else sets it."
    memory, on_cpu = run["device"]["memory_mib"], run["device"]["kind"] == "cpu"
    process = " and the process itself (interpreter, PyTorch)" * on_cpu
    full = f" On this line the device's {memory:,.0f} MiB are full at B = {(memory - fixed) / per_sample:,.0f}."
    return (
        f"The fixed part is weights, gradients, optimizer state{process}. Each sample adds the activations that its backward "
        f"pass needs.{full * (not on_cpu)}"
    )


def size_figure(runs: Sequence[TimedRun]) -> Figure:
    """Throughput against the ideal, step time with its line, and memory with its line."""
    result = plots.new(15, 4.8)
    result.suptitle(f"Batch scaling: {runs[0]['version']}, {run_facts.describe(runs[0], 'batch_size')}")
    throughput, times, memory = result.subplots(1, 3)
    sizes, rates, steps = list(map(size, runs)), [run["tokens_per_second"] for run in runs], [run["step_ms"] for run in runs]
    reach, medians = [0, sizes[-1] * 1.05], [step["median"] for step in steps]
    spread = [step["median"] - step["p20"] for step in steps], [step["p80"] - step["median"] for step in steps]
    ideal = [rates[0] * batch / sizes[0] for batch in sizes]
    throughput.plot(sizes, rates, "o-", color=plots.BLUE, label="measured")
    throughput.plot(sizes, ideal, "--", color=plots.BLACK, label="ideal: step as long as with the smallest batch")
    times.errorbar(sizes, medians, spread, fmt="o", capsize=4, color=plots.BLUE, label="median, p20 to p80")
    peaks = [run["memory"]["peak_mib"] for run in runs]
    memory.plot(sizes, peaks, "o", color=plots.BLUE, label=f"peak, {runs[0]['memory']['kind']}")
    for axes, line, unit in zip((times, memory), lines(runs), ("ms", "MiB"), strict=True):
        axes.plot(reach, list(map(line.at, reach)), color=plots.VERMILION, label=f"fit: {line.equation(unit)}")
    titles = {"Throughput": "tokens/s", "Step time": "ms per step", "Peak memory": "MiB"}
    for axes, (title, unit) in zip((throughput, times, memory), titles.items(), strict=True):
        bottom, top = axes.get_ylim()
        axes.set(title=title, xlabel="batch size", ylabel=unit, xlim=reach)
        axes.set_ylim(min(0, bottom) if axes is times else 0, 1.2 * top)  # room for the legend above the points
        axes.grid(True, color="0.9")
        axes.legend(loc="upper left", fontsize=9)
    return result


# ------------------------------------------------------------------------------------------------------ sequence length

LEAST = 3  # lengths that a parabola needs
NOTICEABLE = 0.05  # the least share of the longest peak from which the S^2 term is discussed
MIB = 2**20
MAY_DIFFER = ("sequence length", "model max_sequence_length", "flash_attention")  # the rotary tables' length follows S


class Run(NamedTuple):
    """One profile. group: version and kind of attention; peak, step: bytes at the peak, and of them the step's own."""

    group: str
    sequence_length: int
    peak: int
    step: int
    path: Path
    record: ShownRun | TimedRun


def sequence_memory(folders: Sequence[Path]) -> Report:
    """Compares the newest profile of each folder; the report has the peaks (and CSV), the fits, a figure and a JSON file.

    The JSON (schema "tiny-llama-sequence-memory/1") has the command and the fields of each `Run`, its record without losses and
    step times; the tables can be made from it again.
    """
    runs = read_lengths(folders)
    report = Report("Memory over the sequence length")
    add_lengths(report, runs, "sequence_memory")
    records = [{name: value for name, value in run.record.items() if name not in ("loss", "step_ms")} for run in runs]
    measured = [run._asdict() | {"path": str(run.path), "record": record} for run, record in zip(runs, records, strict=True)]
    report.json("sequence_memory", {"schema": files.schema_of(SequenceMemory), "command": shlex.join(sys.argv), "runs": measured})
    return report


def add_lengths(report: Report, runs: Sequence[Run], stem: str) -> None:
    """Adds the peaks, the fits and what they say; `stem` is that of the figure and of a CSV file."""
    record = runs[0].record
    on_cpu = record["device"]["kind"] == "cpu"
    counted = "the CPU allocator, from the start of the profile" if on_cpu else "the GPU allocator"
    report.text(f"{run_facts.describe(record, 'sequence_length')}. Counted by {counted}.")
    report.figure(lambda: length_figure(runs), stem, "Peak memory, and that of the step alone, over the sequence length")
    report.table(*peak_table(runs), csv=stem)
    report.text(
        "Peak: bytes alive at once. Step: without weights and AdamW's moments. Exponent: of the step's memory, from the length "
        "before; 1 is linear, 2 quadratic. By formula: memory that Version 1's operations keep for the backward pass, with and "
        "without the scores."
    )
    report.table(*fit_table(runs))
    groups = grouped(runs)
    report.text(
        *(_growth(group, members) for group, members in groups.items()), *_ratios(groups),
        "The peak is the largest of several moments of a step (the loss, the last layer's attention, the optimizer). Where "
        "another one takes over as S grows, no one parabola goes through all peaks, and the residual shows it.",
    )  # fmt: skip
    if any(len(members) == LEAST for members in groups.values()):
        report.text("A parabola fits any three points, so nothing shows whether it fits other lengths: add a fourth.")


def read_lengths(folders: Sequence[Path]) -> list[Run]:
    """The newest profile of each folder, by group and sequence length: at least LEAST lengths a group, which differ in nothing
    else.
    """
    profiles = [(path, step_profile.read(path)) for path in map(step_profile.find, folders)]
    found = [(_run(path, profile), profile["run"]) for path, profile in profiles]
    for (one, ours), (other, theirs) in itertools.combinations(found, 2):
        switches = ours["version"] == theirs["version"]
        identities = _identity(ours, switches), _identity(theirs, switches)
        run_record.require_equal((one.path, other.path), identities, "sequence length and attention")
        if (one.group, one.sequence_length) == (other.group, other.sequence_length):
            what = f"{one.group}, sequence length {one.sequence_length}"
            raise UsageError(f"{one.path} and {other.path} are both {what}: leave one out")
    runs = sorted((run for run, _ in found), key=lambda run: (run.group, run.sequence_length))
    for group, members in grouped(runs).items():
        if len(members) < LEAST:
            raise UsageError(
                f"{group}: {len(members)} sequence lengths, but the fit needs at least {LEAST}: add folders with other --seq-len "
                f"to {', '.join(str(run.path) for run in members)}"
            )
    return runs


def _identity(record: TimedRun, with_switches: bool) -> dict[str, object]:
    """All that two runs must share, by name."""
    named = run_record.conditions(record) | (record["settings"] if with_switches else {})
    return {name: value for name, value in named.items() if name not in MAY_DIFFER}


def load(path: Path) -> list[Run]:
    """The runs of a sequence_memory.json."""
    stored = files.read(path, SequenceMemory)["runs"]
    runs = [
        Run(run["group"], run["sequence_length"], run["peak"], run["step"], Path(run["path"]), run["record"]) for run in stored
    ]
    for shorter, longer in itertools.pairwise(runs):
        if shorter.group == longer.group and shorter.sequence_length >= longer.sequence_length:
            raise UsageError(f"{path}: runs: the sequence lengths of {longer.group} are not in order")
    return runs


def grouped(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each group, shortest first; `runs` as `read_lengths` orders them."""
    return {group: list(members) for group, members in itertools.groupby(runs, key=lambda run: run.group)}


def _run(path: Path, profile: step_profile.Profile) -> Run:
    record, peak = profile["run"], profile["memory_peak_bytes"]
    if peak is None:
        raise UsageError(f"{path} was recorded without memory: profile again with --enable-memory-profiling")
    if "settings" not in record:
        raise UsageError(f"{path} does not say which attention it ran, since it is of an earlier version: profile again")
    if len(record["step_ms"]["all"]) <= profile["profiled_steps"]:
        raise UsageError(
            f"{path} has only profiled steps, the first too, which allocates the moments: take --num-steps 3 or more"
        )
    states = footprint.states(ModelConfig(**record["model"]))
    lasting = states["weights"] + states["adamw"] if profile["kernels"] else 0
    if peak <= lasting:
        raise UsageError(f"{path}: memory_peak_bytes: {peak} bytes are no more than weights and moments take ({lasting})")
    flash = record["settings"].get("flash_attention")
    attention = "" if flash is None else ", flash attention" if flash else ", plain attention"
    return Run(f"{record['version']}{attention}", record["training"]["sequence_length"], peak, peak - lasting, path, record)


def parabola(members: Sequence[Run]) -> Curve:
    """The parabola through the peaks of one group, in bytes."""
    return fit([(run.sequence_length, run.peak) for run in members], 2)


def exponents(members: Sequence[Run]) -> list[float]:
    """Local exponents between neighbouring lengths of one group."""
    return [
        math.log(longer.step / shorter.step) / math.log(longer.sequence_length / shorter.sequence_length)
        for shorter, longer in itertools.pairwise(members)
    ]


def by_formula(run: Run) -> tuple[int, int]:
    """Bytes that the eager path keeps for the backward pass: without the scores, and the scores."""
    kept = footprint.activations_of(run.record)
    return kept["total"] - kept["scores"], kept["scores"]


def _plain_factor(run: Run) -> float:
    """c by formula: bytes per S^2 of what plain attention keeps in all layers, 4 B H and the mask's byte each in float32."""
    return by_formula(run)[1] / run.sequence_length**2


def _quadratic_share(members: Sequence[Run]) -> float:
    """The S^2 term at the longest of these lengths, as a share of its peak."""
    return parabola(members).factors[2] * members[-1].sequence_length ** 2 / members[-1].peak


def peak_table(runs: Sequence[Run]) -> Table:
    """A row per run."""
    header = ["run", "S", "peak MiB", "step MiB", "exponent", "by formula, without scores", "by formula, scores"]
    rows: list[list[object]] = []
    for members in grouped(runs).values():
        for run, exponent in zip(members, [None, *exponents(members)], strict=True):
            formula = [size / MIB for size in by_formula(run)]
            rows.append([run.group, run.sequence_length, run.peak / MIB, run.step / MIB, exponent, *formula])
    return header, rows


def fit_table(runs: Sequence[Run]) -> Table:
    """A row per group: the parabola, the S^2 term as a share of the longest peak, and c by formula."""
    header = [
        "run", "a MiB", "b KiB", "c bytes", "residual MiB", "c S^2, % of the longest peak", "c of plain attention by formula",
    ]  # fmt: skip
    rows: list[list[object]] = []
    for group, members in grouped(runs).items():
        (fixed, linear, quadratic), residual = parabola(members)
        residual_mib = None if residual is None else round(residual) / MIB
        share = 100 * _quadratic_share(members)
        rows.append([group, round(fixed / MIB, 3), linear / 1024, quadratic, residual_mib, share, _plain_factor(members[-1])])
    return header, rows


def _growth(group: str, members: Sequence[Run]) -> str:
    _, linear, quadratic = parabola(members).factors
    before, longest = members[-2:]
    note = (
        f"{group}: from S = {before.sequence_length} to {longest.sequence_length} the step's memory grows with the exponent "
        f"{exponents(members)[-1]:.2f}. c is {quadratic / _plain_factor(longest):.2f} times what plain attention keeps by formula"
    )
    if _quadratic_share(members) < NOTICEABLE or linear <= 0:
        return f"{note}."
    layers = longest.record["model"]["num_layers"]
    return (
        f"{note}, its L matrices; in the backward pass of the last layer the gradients of the softmax's output and input are "
        f"alive too, which makes (L + 2) / L = {(layers + 2) / layers:.2f}. The S^2 term overtakes the linear one at "
        f"S = b / c = {linear / quadratic:,.0f}."
    )


def _ratios(groups: dict[str, list[Run]]) -> list[str]:
    """The groups' peaks at the longest length that all have, against the smallest of them."""
    lengths = set.intersection(*({run.sequence_length for run in members} for members in groups.values()))
    if len(groups) < 2 or not lengths:
        return []
    longest = max(lengths)
    peaks = sorted((run.peak, group) for group, members in groups.items() for run in members if run.sequence_length == longest)
    least, smallest = peaks[0]
    against = ", ".join(f"{group} {peak / least:.2f} times as much ({peak / MIB:,.0f} MiB)" for peak, group in peaks[1:])
    return [f"At S = {longest} the peak of {smallest} is {least / MIB:,.0f} MiB; {against}."]


def length_figure(runs: Sequence[Run]) -> Figure:
    """Above the peaks with their parabolas, below the step's memory, both axes logarithmic, beside slopes 1 and 2."""
    result = plots.new(6.5, 8)
    above, below = result.subplots(2, 1)
    for i, (group, members) in enumerate(grouped(runs).items()):
        colour, lengths = plots.style(i)["color"], [run.sequence_length for run in members]
        reach = [lengths[0] + part * (lengths[-1] - lengths[0]) / 100 for part in range(101)]
        above.plot(reach, [parabola(members).at(length) / MIB for length in reach], color=colour, linewidth=1)
        above.plot(lengths, [run.peak / MIB for run in members], "o", color=colour, label=group)
        below.plot(lengths, [run.step / MIB for run in members], "o-", color=colour, label=group)
    lengths = sorted({run.sequence_length for run in runs})
    start = 0.8 * min(run.step for run in runs) / MIB
    for slope, style in ((1, ":"), (2, "--")):
        ends = [start, start * (lengths[-1] / lengths[0]) ** slope]
        below.plot([lengths[0], lengths[-1]], ends, style, color="0.5", label=f"slope {slope}")
    above.set_ylim(0, None)
    below.set(xscale="log", yscale="log")
    titles = "Peak memory and a + b S + c S^2", "Memory of the step, without weights and moments"
    for axes, title in zip((above, below), titles, strict=True):
        axes.set(title=title, xlabel="sequence length S", ylabel="MiB")
        axes.grid(True, color="0.9")
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.xaxis.minorticks_off()
        axes.legend()
    return result
