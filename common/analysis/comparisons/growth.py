"""How a training step grows with one size, from the profiles of runs that differ in nothing else.

`batch_scaling`: straight lines a + b B over the batch size B, by least squares, through the step times and the peaks of memory.
Of time, a is what every step costs (issuing operations, the optimizer, Python), and throughput tends to S / b. Of memory, a is
weights, gradients and optimizer state, and b the activations of one sample.

`sequence_memory`: a parabola a + b S + c S^2 through the peaks over the sequence length S, of each version and kind of attention.
Each position keeps b (activations, logits) and each pair of positions c: the [B, H, S, S] matrices of plain attention, which a
fused kernel does not write (Dao et al. 2022, arXiv:2205.14135). The exponent log(m2 / m1) / log(S2 / S1) between neighbouring
lengths is that of the step's own memory: the peak without weights and moments, which a GPU's allocator counts and a CPU's profile
does not.
"""

import itertools
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import files
from common.analysis.formulas import footprint
from common.analysis.output import plots, run_facts
from common.analysis.output.report import Report
from common.analysis.output.tables import Table, format_number
from common.config import ModelConfig
from common.errors import UsageError
from common.records import run_record, step_profile
from common.records.run_record import TimedRun
from common.records.study_files import SequenceMemory

import numpy
from matplotlib.figure import Figure

MIB = 2**20


class Curve(NamedTuple):
    """A polynomial: factors of x^0, x^1, ..., and the largest distance of a point from it (None if it goes through all)."""

    factors: tuple[float, ...]
    residual: float | None

    def at(self, x: Any) -> Any:
        """The value at a number, or at each of an array."""
        return sum(factor * x**power for power, factor in enumerate(self.factors))


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
ABOUT_SIZES = (
    "Speed-up: tokens/s over those of the smallest batch. Ideal: the speed-up if a step took as long as with the smallest "
    "batch. Efficiency: speed-up over ideal. MFU is a share of the data sheet's peak."
)


def batch_scaling(folders: Sequence[Path]) -> Report:
    """Compares the newest profile of each folder; the report has a table (and CSV), a figure and what the fits say."""
    runs = read_sizes(folders)
    report = Report("Batch scaling")
    report.text(f"{runs[0]['version']}, {run_facts.describe(runs[0], 'batch_size')}. Step times are medians.")
    columns = list(HEADER.values())
    report.table(columns, size_rows(runs), csv="batch_scaling", csv_header=list(HEADER), least=("memory of", "ideal"))
    report.text(ABOUT_SIZES)
    time, memory = lines(runs)
    report.figure(lambda: size_figure(runs), "batch_scaling", "Throughput, step time and memory over the batch size")
    report.text(f"Step time: t(B) = {equation(time, 'ms')}.", f"Memory: m(B) = {equation(memory, 'MiB')}.")
    fixed, slope = time.factors
    if fixed > 0 and slope > 0:
        shares = " and ".join(f"{100 * fixed / time.at(size(run)):.0f} % at B = {size(run)}" for run in (runs[0], runs[-1]))
        tokens = runs[0]["training"]["sequence_length"] * run_record.processes(runs[0])
        report.text(f"The fixed time is {shares}. Throughput tends to S / b = {tokens / slope * 1e3:,.0f} tokens/s on this line.")
    if time.residual is None or memory.residual is None:
        report.text("A line fits any two points, so nothing shows whether it describes other batch sizes: add a third.")
    else:
        distances = f"{format_number(time.residual)} ms, {format_number(memory.residual)} MiB"
        report.text(
            f"Largest distance of a median from its line: {distances}. Where it is large, the step is no straight line in B."
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


def equation(line: Curve, unit: str) -> str:
    """A straight line over B, as text."""
    fixed, slope = line.factors
    return f"{format_number(fixed)} {unit} {'-' if slope < 0 else '+'} {format_number(abs(slope))} {unit} x B"


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


def size_figure(runs: Sequence[TimedRun]) -> Figure:
    """Throughput, step time with its line, and memory with its line."""
    result = plots.new(15, 4.8)
    result.suptitle(f"Batch scaling: {runs[0]['version']}, {run_facts.describe(runs[0], 'batch_size')}")
    throughput, times, memory = panels = result.subplots(1, 3)
    sizes, steps = [size(run) for run in runs], [run["step_ms"] for run in runs]
    spread = [[step["median"] - step["p20"] for step in steps], [step["p80"] - step["median"] for step in steps]]
    throughput.plot(sizes, [run["tokens_per_second"] for run in runs], "o-", color=plots.BLUE, label="measured")
    times.errorbar(sizes, [step["median"] for step in steps], spread, fmt="o", capsize=4, label="median, p20 to p80")
    memory.plot(sizes, [run["memory"]["peak_mib"] for run in runs], "o", color=plots.BLUE, label="peak")
    for axes, line, unit in zip((times, memory), lines(runs), ("ms", "MiB"), strict=True):
        ends = [0, sizes[-1]]
        axes.plot(ends, [line.at(end) for end in ends], color=plots.VERMILION, label=f"fit: {equation(line, unit)}")
    for axes, unit in zip(panels, ("tokens/s", "ms per step", "peak memory, MiB"), strict=True):
        axes.set(xlabel="batch size", ylabel=unit, xlim=(0, None), ylim=(min(0, axes.get_ylim()[0]), None))
        axes.grid(True, color="0.9")
        axes.legend(fontsize=9)
    return result


# ------------------------------------------------------------------------------------------------------ sequence length

LEAST = 3  # lengths that a parabola needs
MAY_DIFFER = ("sequence length", "model max_sequence_length", "flash_attention")  # the rotary tables' length follows S
ABOUT_LENGTHS = (
    "Peak: bytes alive at once. Step: without weights and AdamW's moments. Exponent: of the step's memory, from the length "
    "before; 1 is linear, 2 quadratic. By formula: memory that Version 1's operations keep for the backward pass, with and "
    "without the scores."
)
ABOUT_FITS = (
    "Memory is fitted as a + b S + c S^2; the S^2 term overtakes the linear one at S = b / c. Plain attention keeps L score "
    "matrices by formula, and in the backward pass of the last layer two gradients of that size are alive too. The peak is the "
    "largest of several moments of a step: where another one takes over as S grows, no one parabola goes through all peaks, and "
    "the residual shows it."
)


class Run(NamedTuple):
    """One profile. group: version and kind of attention; peak, step: bytes at the peak, and of them the step's own."""

    group: str
    sequence_length: int
    peak: int
    step: int
    path: Path
    record: TimedRun


def sequence_memory(folders: Sequence[Path]) -> Report:
    """Compares the newest profile of each folder; the report has the peaks (and CSV), the fits, a figure and a JSON file.

    The JSON (schema "tiny-llama-sequence-memory/1") has the command and the fields of each `Run`, its record without losses and
    step times; the tables can be made from it again.
    """
    runs = read_lengths(folders)
    report, record = Report("Memory over the sequence length"), runs[0].record
    on_cpu = record["device"]["kind"] == "cpu"
    counted = "the CPU allocator, from the start of the profile" if on_cpu else "the GPU allocator"
    report.text(f"{run_facts.describe(record, 'sequence_length')}. Counted by {counted}.")
    report.figure(lambda: length_figure(runs), "sequence_memory", "Peak memory over the sequence length")
    report.table(*peak_table(runs), csv="sequence_memory")
    report.text(ABOUT_LENGTHS)
    report.table(*fit_table(runs))
    report.text(ABOUT_FITS)
    if any(len(members) == LEAST for members in grouped(runs).values()):
        report.text("A parabola fits any three points, so nothing shows whether it fits other lengths: add a fourth.")
    records = [{name: value for name, value in run.record.items() if name not in ("loss", "step_ms")} for run in runs]
    measured = [run._asdict() | {"path": str(run.path), "record": record} for run, record in zip(runs, records, strict=True)]
    report.json("sequence_memory", {"schema": files.schema_of(SequenceMemory), "command": shlex.join(sys.argv), "runs": measured})
    return report


def read_lengths(folders: Sequence[Path]) -> list[Run]:
    """The newest profile of each folder, by group and sequence length: at least LEAST lengths a group, which differ in nothing
    else.
    """
    profiles = [(path, step_profile.read(path)) for path in map(step_profile.find, folders)]
    found = [(_run(path, profile), profile["run"]) for path, profile in profiles]
    for (one, ours), (other, theirs) in itertools.combinations(found, 2):
        alike = ours["version"] == theirs["version"]
        named = [run_record.conditions(each) | (each["settings"] if alike else {}) for each in (ours, theirs)]
        own, others = ({name: value for name, value in each.items() if name not in MAY_DIFFER} for each in named)
        run_record.require_equal((one.path, other.path), (own, others), "sequence length and attention")
        if one[:2] == other[:2]:
            raise UsageError(f"{one.path} and {other.path} both are {one.group} of length {one.sequence_length}: leave one out")
    runs = sorted((run for run, _ in found), key=lambda run: (run.group, run.sequence_length))
    for group, members in grouped(runs).items():
        if len(members) < LEAST:
            raise UsageError(f"{group}: {len(members)} sequence lengths, but the fit needs at least {LEAST}: add other --seq-len")
    return runs


def _run(path: Path, profile: step_profile.Profile) -> Run:
    record, peak = profile["run"], profile["memory_peak_bytes"]
    if peak is None or "settings" not in record:
        raise UsageError(f"{path} was recorded without memory: profile again with --enable-memory-profiling")
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


def grouped(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each group, shortest first; `runs` as `read_lengths` orders them."""
    return {group: list(members) for group, members in itertools.groupby(runs, key=lambda run: run.group)}


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


def peak_table(runs: Sequence[Run]) -> Table:
    """A row per run."""
    header = ["run", "S", "peak MiB", "step MiB", "exponent", "by formula, without scores", "by formula, scores"]
    rows: list[list[object]] = []
    for members in grouped(runs).values():
        for run, exponent in zip(members, [None, *exponents(members)], strict=True):
            formula = [kept / MIB for kept in by_formula(run)]
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
        longest, pairs = members[-1], members[-1].sequence_length ** 2
        distance = None if residual is None else round(residual) / MIB
        share, formula = 100 * quadratic * pairs / longest.peak, by_formula(longest)[1] / pairs
        rows.append([group, round(fixed / MIB, 3), linear / 1024, quadratic, distance, share, formula])
    return header, rows


def length_figure(runs: Sequence[Run]) -> Figure:
    """The peaks, with their parabolas."""
    result = plots.new(6.5, 4)
    axes = result.add_subplot()
    for i, (group, members) in enumerate(grouped(runs).items()):
        colour, lengths = plots.style(i)["color"], [run.sequence_length for run in members]
        reach = numpy.linspace(lengths[0], lengths[-1], 101)
        axes.plot(reach, parabola(members).at(reach) / MIB, color=colour, linewidth=1)
        axes.plot(lengths, [run.peak / MIB for run in members], "o", color=colour, label=group)
    axes.set(xlabel="sequence length S", ylabel="peak memory, MiB (line: a + b S + c S^2)", ylim=(0, None))
    axes.grid(True, color="0.9")
    axes.legend()
    return result
