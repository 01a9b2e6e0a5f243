"""The effect of each fusion, from the steps that `studies.ablation` timed in many combinations of them.

Two combinations that differ in one fusion only are a pair. For each pair the ratio without / with is taken, of the median step
time, the peak memory and the launches, so above 1 the fusion helps. The effect of a fusion is the geometric mean over its pairs:
with all 16 combinations there are 8. The range over the pairs shows how much the effect depends on the other fusions. The range
over the rounds, of the effect from the medians of one round alone, shows how well it is known: if it holds 1, this measurement
cannot tell whether the fusion has an effect.
"""

import itertools
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from common import files
from common.analysis.output import plots, run_facts, tables
from common.analysis.output.report import Report
from common.analysis.output.tables import Table
from common.errors import UsageError
from common.records.study_files import Ablation, Combination

from matplotlib.figure import Figure

FUSIONS = {"qkv_fusion": "QKV", "flash_attention": "flash", "swiglu_fusion": "SwiGLU", "torch_compile": "compile"}  # labels
COLOURS = {"time": plots.BLUE, "memory": plots.ORANGE, "launches": plots.GREEN}
COUNTED = {"kernels": "kernels/step", "operators": "operator calls/step"}


class Ratio(NamedTuple):
    """Without / with: geometric mean over the pairs, the least and the largest of them."""

    mean: float
    low: float
    high: float


class Effect(NamedTuple):
    """One fusion's own effect."""

    fusion: str
    pairs: int
    time: Ratio
    rounds: tuple[float, float]  # range of the time's mean over the rounds
    memory: Ratio | None  # None if none was measured
    launches: Ratio | None  # None if they were not counted


def effects(combinations: Sequence[Combination]) -> list[Effect]:
    """The effect of each fusion that is on in some combination."""
    result = []
    for fusion in FUSIONS:
        pairs = [(a, b) for a, b in itertools.permutations(combinations, 2) if a["fusions"] | {fusion: True} == b["fusions"]]
        time = _ratio((a["step_ms"]["median"], b["step_ms"]["median"]) for a, b in pairs)
        rounds = [_ratio(each) for each in zip(*(zip(a["round_ms"], b["round_ms"], strict=True) for a, b in pairs), strict=True)]
        means = [found.mean for found in rounds if found]
        memory = _ratio((a["peak_mib"], b["peak_mib"]) for a, b in pairs)
        launches = _ratio((a["launches_per_step"], b["launches_per_step"]) for a, b in pairs)
        if time:
            result.append(Effect(fusion, len(pairs), time, (min(means), max(means)), memory, launches))
    return result


def _ratio(pairs: Iterable[tuple[float | None, float | None]]) -> Ratio | None:
    """Of the values without and with a fusion; None if none was measured."""
    ratios = [without / with_ for without, with_ in pairs if without and with_]
    return Ratio(math.exp(sum(map(math.log, ratios)) / len(ratios)), min(ratios), max(ratios)) if ratios else None


def read(path: Path) -> Ablation:
    """A fusion_ablation.json in which every combination has the same rounds, and some two differ in one fusion."""
    measured = files.read(path, Ablation)
    first, *others = measured["combinations"]
    for i, other in enumerate(others, 1):
        if len(other["round_ms"]) != len(first["round_ms"]):
            raise UsageError(f"{path}: combinations.{i}.round_ms: not as many rounds as in the first combination")
        if (other["peak_mib"] is None) != (first["peak_mib"] is None):
            raise UsageError(f"{path}: combinations.{i}.peak_mib: given for some combinations and not for others")
    if not effects(measured["combinations"]):
        raise UsageError(f"{path}: combinations: no two differ in one fusion")
    return measured


def analyze(path: Path) -> Report:
    """The tables of a fusion_ablation.json, with a CSV file and a figure."""
    measured = read(path)
    found, combinations = effects(measured["combinations"]), measured["combinations"]
    report = Report("Fusion ablation")
    report.text(f"Made by {run_facts.origin(measured)}.")
    medians = f"Medians of {measured['rounds']} rounds of {measured['steps_per_round']} steps."
    report.text(f"{measured['version']}, {run_facts.describe(measured)}. {medians}")
    report.figure(lambda: figure(measured, found), "fusion_ablation", "The effect of each fusion")
    report.section("Combinations")
    report.text("Speed-up: against none.")
    report.table(*combination_table(measured))
    report.section("Effect of each fusion", "effects")
    report.text(
        "Ratios without / with: above 1 the fusion helps. Each is the geometric mean over the pairs of combinations that differ "
        "in this fusion only. If a range over the rounds holds 1, the effect may be none."
    )
    report.table(*effect_table(measured, found))
    if losses := [c["loss"] for c in combinations if c["loss"] is not None]:
        report.text(
            f"The losses after the same {combinations[0]['steps']} steps from the same weights on the same batch lie "
            f"{max(losses) - min(losses):.2g} apart: rounding makes a small difference, another mathematics a large one."
        )
    if combinations[0]["peak_mib"] is None:
        report.text("Peak memory is not given: on a CPU it can only be measured for the whole process.")
    if measured["left_out"]:
        report.text(f"Left out: {measured['left_out']}.")
    report.text(*(f"{note[0].upper()}{note[1:]}." for note in measured["notes"]))
    header, rows = [*FUSIONS, "ms", "p20", "p80", "steps", "peak_mib", f"{measured['counted']}_per_step", "loss"], []
    for c in combinations:
        switches, step = [int(name in _on(c)) for name in FUSIONS], c["step_ms"]
        times = step["median"], step["p20"], step["p80"], step["count"]
        rows.append([*switches, *times, c["peak_mib"], c["launches_per_step"], c["loss"]])
    report.csv("fusion_ablation", header, rows)
    report.json("fusion_ablation", measured)
    return report


def _on(combination: Combination) -> list[str]:
    """The fusions that are on."""
    switches: Mapping[str, object] = combination["fusions"]
    return [name for name in FUSIONS if switches[name]]


def label(combination: Combination) -> str:
    """ "QKV + flash", or "none"."""
    return " + ".join(FUSIONS[name] for name in _on(combination)) or "none"


def combination_table(measured: Ablation) -> Table:
    """A row per combination; speed-up against the one with all off."""
    combinations = measured["combinations"]
    unit, factor = tables.time_unit(max(c["step_ms"]["median"] for c in combinations))
    header = ["fusions on", f"{unit}/step", "p20 to p80", "speed-up", "peak MiB", COUNTED[measured["counted"]], "loss"]
    rows: list[list[object]] = []
    for c in combinations:
        step, speed_up = c["step_ms"], combinations[0]["step_ms"]["median"] / c["step_ms"]["median"]
        loss = None if c["loss"] is None else f"{c['loss']:.5f}"
        median, ends = factor * step["median"], _range(factor * step["p20"], factor * step["p80"])
        rows.append([label(c), median, ends, speed_up, c["peak_mib"], c["launches_per_step"], loss])
    return tables.filled(header, rows)


def effect_table(measured: Ablation, found: Sequence[Effect]) -> Table:
    """A row per fusion."""
    header = ["fusion", "pairs", "time", "over the pairs", "over the rounds", "memory", COUNTED[measured["counted"]]]
    rows: list[list[object]] = []
    for e in found:
        ranges, means = (_range(e.time.low, e.time.high), _range(*e.rounds)), (r and r.mean for r in (e.memory, e.launches))
        rows.append([FUSIONS[e.fusion], e.pairs, e.time.mean, *ranges, *means])
    return tables.filled(header, rows)


def _range(low: float, high: float) -> str:
    return f"{low:.3g} to {high:.3g}"


def figure(measured: Ablation, found: Sequence[Effect]) -> Figure:
    """The effect of each fusion on time, memory and launches, as bars from 1, with the range over the pairs."""
    result = plots.new(5.8, 1.5 + 0.6 * len(found))
    axes = result.subplots()
    axes.set_title(textwrap.fill(f"{measured['version']}, {run_facts.describe(measured)}", 72), fontsize=9)
    names = {"time": "time", "memory": "peak memory", "launches": COUNTED[measured["counted"]]}
    shown = [name for name in names if getattr(found[0], name)]
    for i, name in enumerate(shown):
        ratios: list[Ratio] = [getattr(effect, name) for effect in found]
        places = [place + (i + 0.5) * 0.8 / len(shown) for place in range(len(found))]
        ranges = [[abs(ratio.mean - ratio[end]) for ratio in ratios] for end in (1, 2)]
        widths = [ratio.mean - 1 for ratio in ratios]
        axes.barh(places, widths, 0.72 / len(shown), left=1, xerr=ranges, capsize=3, color=COLOURS[name], label=names[name])
    axes.axvline(1, color=plots.BLACK, linewidth=1)
    axes.set_yticks([place + 0.4 for place in range(len(found))], [FUSIONS[effect.fusion] for effect in found])
    axes.set_xlabel("without / with (above 1 the fusion helps), range over the pairs")
    axes.invert_yaxis()
    result.legend(loc="outside lower center", ncols=3, fontsize=9)
    return result
