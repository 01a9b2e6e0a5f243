"""How peak memory grows with the sequence length S, from the profiles of runs that differ in nothing but S and attention.

Through the peaks of each version and kind of attention goes a parabola, by least squares:

    peak  m(S) = a + b S + c S^2    a: what does not depend on S (on a GPU weights, AdamW's moments and the libraries' workspaces)
                                    b: what each position keeps: activations of width D and F, logits
                                    c: what each pair of positions keeps: the [B, H, S, S] matrices of plain attention

The eager path of Version 1 keeps L matrices of 4 B H S^2 bytes in float32 (`footprint.activations`, part scores); a fused kernel
writes none of them (Dao et al. 2022, arXiv:2205.14135). Where both terms are equal, at S = b / c, the quadratic one takes over.

The local exponent log(m2 / m1) / log(S2 / S1) between two neighbouring lengths is that of the step's own memory: 1 is linear, 2
quadratic. The step's own memory is the peak without weights and moments, which last from step to step. The allocator's total on a
GPU includes them; the count of a CPU's profile begins at zero and does not. Gradients do not last, since `zero_grad` drops them:
they are part of the step as far as they are alive at its peak.
"""

import itertools
import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common import files
from common.analysis.formulas import footprint
from common.analysis.output import plots, run_facts
from common.analysis.output.report import Report
from common.config import ModelConfig
from common.errors import UsageError
from common.records import run_record, step_profile
from common.records.memory_files import SEQUENCE_MEMORY, SequenceMemory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = (plots.BLUE, plots.VERMILION, plots.GREEN, plots.PURPLE, plots.ORANGE, plots.SKY, plots.BLACK)
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
    record: dict[str, Any]


class Parabola(NamedTuple):
    """fixed + linear S + quadratic S^2 bytes, and the largest distance of a peak from it (None for three peaks)."""

    fixed: float
    linear: float
    quadratic: float
    residual: int | None

    def at(self, length: float) -> float:
        return self.fixed + self.linear * length + self.quadratic * length**2

    def quadratic_share(self, run: Run) -> float:
        return self.quadratic * run.sequence_length**2 / run.peak


def analyze(folders: list[Path]) -> Report:
    """Compares the newest profile of each folder; the report has the peaks (and CSV), the fits, a figure and a JSON file.

    The JSON (schema "tiny-llama-sequence-memory/1") has the command and the fields of each `Run`, its record without losses and
    step times; the tables can be made from it again.

    Raises:
        UsageError: the profiles cannot be compared, or are too few.
    """
    runs = read(folders)
    report = Report("Memory over the sequence length")
    report.text(conditions(runs))
    report.figure(lambda: figure(runs), "sequence_memory", "Peak memory over the sequence length")
    report.table(*table(runs), csv="sequence_memory")
    report.text(
        "Peak: bytes alive at once. Step: without weights and AdamW's moments. Exponent: of the step's memory, from the length "
        "before; 1 is linear, 2 quadratic. By formula: memory that Version 1's operations keep for the backward pass, with and "
        "without the scores."
    )
    report.table(*fit_table(runs))
    report.text(*findings(runs))
    records = [{name: value for name, value in run.record.items() if name not in ("loss", "step_ms")} for run in runs]
    measured = [run._asdict() | {"path": str(run.path), "record": record} for run, record in zip(runs, records, strict=True)]
    report.json("sequence_memory", {"schema": SEQUENCE_MEMORY, "command": shlex.join(sys.argv), "runs": measured})
    return report


# ----------------------------------------------------------------------------------------------------------- reading


def read(folders: list[Path]) -> list[Run]:
    """The newest profile of each folder, by group and sequence length.

    Raises:
        UsageError: a folder holds no profile, or one without memory or settings; two runs are of one group and length, or
            differ in anything else; a group has fewer than three lengths.
    """
    runs: list[Run] = []
    for folder in folders:
        run = _run(step_profile.find(folder))
        for other in runs:
            _require_comparable(other, run)
        runs.append(run)
    runs.sort(key=lambda run: (run.group, run.sequence_length))
    for group, members in grouped(runs).items():
        if len(members) < LEAST:
            raise UsageError(
                f"{group}: {len(members)} sequence lengths, but the fit needs at least {LEAST}: add folders with other --seq-len "
                f"to {', '.join(str(run.path) for run in members)}"
            )
    return runs


def load(path: Path) -> list[Run]:
    """The runs of a sequence_memory.json.

    Raises:
        UsageError: the file is damaged, or not of schema tiny-llama-sequence-memory/1.
    """
    stored = files.read(path, SequenceMemory)["runs"]
    runs = [Run(**{name: run[name] for name in Run._fields} | {"path": Path(run["path"])}) for run in stored]
    for shorter, longer in itertools.pairwise(runs):
        if shorter.group == longer.group and shorter.sequence_length >= longer.sequence_length:
            raise UsageError(f"{path}: runs: the sequence lengths of {longer.group} are not in order")
    return runs


def grouped(runs: list[Run]) -> dict[str, list[Run]]:
    """The runs of each group, shortest first; `runs` as `read` orders them."""
    return {group: list(members) for group, members in itertools.groupby(runs, key=lambda run: run.group)}


def _run(path: Path) -> Run:
    profile = step_profile.read(path)
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
    group = f"{record['version']}{attention}"
    return Run(group, record["training"]["sequence_length"], peak, peak - lasting, path, record)


def _require_comparable(one: Run, other: Run) -> None:
    """Raises UsageError if the two differ in more than sequence length, version and attention, or not even in these."""
    with_switches = one.record["version"] == other.record["version"]
    identities = tuple(_identity(run.record, with_switches) for run in (one, other))
    run_record.require_equal((one.path, other.path), identities, "sequence length and attention")
    if (one.group, one.sequence_length) == (other.group, other.sequence_length):
        raise UsageError(
            f"{one.path} and {other.path} are both {one.group}, sequence length {one.sequence_length}: leave one out"
        )


def _identity(record: dict[str, Any], with_switches: bool) -> dict[str, Any]:
    named = run_record.conditions(record) | (record["settings"] if with_switches else {})
    return {name: value for name, value in named.items() if name not in MAY_DIFFER}


# ---------------------------------------------------------------------------------------------------------- analysis


def fit(members: list[Run]) -> Parabola:
    """The parabola through the peaks of one group, by least squares; to a millionth of a byte."""
    import numpy as np

    lengths, peaks = np.array([(run.sequence_length, run.peak) for run in members], dtype=float).T
    quadratic, linear, fixed = (round(float(factor), 6) + 0.0 for factor in np.polyfit(lengths, peaks, 2))
    residual = round(float(np.abs(peaks - np.polyval([quadratic, linear, fixed], lengths)).max()))
    return Parabola(fixed, linear, quadratic, residual if len(members) > LEAST else None)


def exponents(members: list[Run]) -> list[float]:
    """Local exponents between neighbouring lengths of one group."""
    return [
        math.log(longer.step / shorter.step) / math.log(longer.sequence_length / shorter.sequence_length)
        for shorter, longer in itertools.pairwise(members)
    ]


def by_formula(run: Run) -> tuple[int, int]:
    """Bytes that the eager path keeps for the backward pass: without the scores, and the scores."""
    record = run.record
    autocast = None if record["precision"]["compute"] == "fp32" else "cpu" if record["device"]["kind"] == "cpu" else "cuda"
    model, batch_size = ModelConfig(**record["model"]), record["training"]["batch_size"]
    kept = footprint.activations(model, batch_size, run.sequence_length, autocast)
    return kept["total"] - kept["scores"], kept["scores"]


def table(runs: list[Run]) -> tuple[list[str], list[list[object]]]:
    """A row per run."""
    header = ["run", "S", "peak MiB", "step MiB", "exponent", "by formula, without scores", "by formula, scores"]
    rows = []
    for members in grouped(runs).values():
        for run, exponent in zip(members, [None, *exponents(members)], strict=True):
            formula = [size / MIB for size in by_formula(run)]
            rows.append([run.group, run.sequence_length, run.peak / MIB, run.step / MIB, exponent, *formula])
    return header, rows


def fit_table(runs: list[Run]) -> tuple[list[str], list[list[object]]]:
    """A row per group: the parabola, the S^2 term as a share of the longest peak, and c by formula."""
    header = [
        "run", "a MiB", "b KiB", "c bytes", "residual MiB", "c S^2, % of the longest peak", "c of plain attention by formula",
    ]  # fmt: skip
    rows = []
    for group, members in grouped(runs).items():
        line, longest = fit(members), members[-1]
        residual = None if line.residual is None else line.residual / MIB
        factors = [round(line.fixed / MIB, 3), line.linear / 1024, line.quadratic]
        rows.append([group, *factors, residual, 100 * line.quadratic_share(longest), _plain_factor(longest)])
    return header, rows


def _plain_factor(run: Run) -> float:
    """c by formula: bytes per S^2 of what plain attention keeps in all layers, 4 B H and the mask's byte each in float32."""
    return by_formula(run)[1] / run.sequence_length**2


def conditions(runs: list[Run]) -> str:
    record = runs[0].record
    on_cpu = record["device"]["kind"] == "cpu"
    counted = "the CPU allocator, from the start of the profile" if on_cpu else "the GPU allocator"
    return f"{run_facts.describe(record, 'sequence_length')}. Counted by {counted}."


def findings(runs: list[Run]) -> list[str]:
    """A paragraph on the fit of each group, a comparison of the groups, and the reasons to doubt the fits."""
    groups = grouped(runs)
    notes = [_growth(group, members) for group, members in groups.items()] + _ratios(groups)
    notes.append(
        "The peak is the largest of several moments of a step (the loss, the last layer's attention, the optimizer). Where "
        "another one takes over as S grows, no one parabola goes through all peaks, and the residual shows it."
    )
    if any(len(members) == LEAST for members in groups.values()):
        notes.append("A parabola fits any three points, so nothing shows whether it fits other lengths: add a fourth.")
    return notes


def _growth(group: str, members: list[Run]) -> str:
    line = fit(members)
    before, longest = members[-2:]
    times = line.quadratic / _plain_factor(longest)
    note = (
        f"{group}: from S = {before.sequence_length} to {longest.sequence_length} the step's memory grows with the exponent "
        f"{exponents(members)[-1]:.2f}. c is {times:.2f} times what plain attention keeps by formula"
    )
    if line.quadratic_share(longest) < NOTICEABLE or line.linear <= 0:
        return f"{note}."
    layers = longest.record["model"]["num_layers"]
    return (
        f"{note}, its L matrices; in the backward pass of the last layer the gradients of the softmax's output and input are "
        f"alive too, which makes (L + 2) / L = {(layers + 2) / layers:.2f}. The S^2 term overtakes the linear one at "
        f"S = b / c = {line.linear / line.quadratic:,.0f}."
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


def figure(runs: list[Run]) -> "Figure":
    """Above the peaks with their parabolas, below the step's memory, both axes logarithmic, beside slopes 1 and 2."""
    result = plots.new(6.5, 8)
    above, below = result.subplots(2, 1)
    groups = grouped(runs)
    for (group, members), colour in zip(groups.items(), itertools.cycle(COLOURS), strict=False):
        lengths = [run.sequence_length for run in members]
        line = fit(members)
        reach = [lengths[0] + i * (lengths[-1] - lengths[0]) / 100 for i in range(101)]
        above.plot(reach, [line.at(length) / MIB for length in reach], color=colour, linewidth=1)
        above.plot(lengths, [run.peak / MIB for run in members], "o", color=colour, label=group)
        below.plot(lengths, [run.step / MIB for run in members], "o-", color=colour, label=group)
    shortest, longest = min(run.sequence_length for run in runs), max(run.sequence_length for run in runs)
    start = 0.8 * min(run.step for run in runs) / MIB
    for slope, style in ((1, ":"), (2, "--")):
        ends = [start, start * (longest / shortest) ** slope]
        below.plot([shortest, longest], ends, style, color="0.5", label=f"slope {slope}")
    above.set(title="Peak memory and a + b S + c S^2", ylabel="MiB", ylim=(0, None))
    below.set(title="Memory of the step, without weights and moments", ylabel="MiB", xscale="log", yscale="log")
    lengths = sorted({run.sequence_length for run in runs})
    for axes in (above, below):
        axes.set_xlabel("sequence length S")
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.xaxis.minorticks_off()
        axes.grid(True, color="0.9")
        axes.legend()
    return result
