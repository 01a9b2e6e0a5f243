"""The effect of each fusion, from the steps that `studies.ablation` timed in many combinations.

Two combinations that differ in one fusion only are a pair. For each pair the ratio without / with
is taken, of the median step time, the peak memory and the launches, so above 1 the fusion helps.
The effect of a fusion is the geometric mean over its pairs: of the 16 combinations of the model's
four fusions 8 are pairs.
The range over the rounds, of the effect from the medians of one round alone, shows how well it is
known: if it holds 1, this measurement cannot tell whether the fusion has an effect.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

from tracepage import files
from tracepage.errors import UsageError
from tracepage.records.study_files import Ablation, Combination
from tracepage.show import run_facts, tables
from tracepage.show.report import Report
from tracepage.show.tables import Table

FUSIONS = {  # name of the switch: its label
    "qkv_fusion": "QKV",
    "flash_attention": "flash",
    "swiglu_fusion": "SwiGLU",
    "fused_adamw": "AdamW",  # not in older files
    "torch_compile": "compile",
}
COUNTED = {"kernels": "kernels/step", "operators": "operator calls/step"}


class Effect(NamedTuple):
    """One fusion's own effect: geometric means of without / with over the pairs."""

    fusion: str
    pairs: int
    time: float
    rounds: tuple[float, float]  # range of the time's mean over the rounds
    memory: float | None  # None if none was measured
    launches: float | None  # None if they were not counted


def effects(combinations: Sequence[Combination]) -> list[Effect]:
    """The effect of each fusion that is on in some combination."""
    result = []
    for fusion in FUSIONS:
        pairs = [
            (without, with_)
            for without, with_ in itertools.permutations(combinations, 2)
            if without["fusions"] | {fusion: True} == with_["fusions"]
        ]
        time = _mean((a["step_ms"]["median"], b["step_ms"]["median"]) for a, b in pairs)
        if not time:
            continue
        # The pairs' ratios, in a list for each round.
        times = [zip(a["round_ms"], b["round_ms"], strict=True) for a, b in pairs]
        means = [mean for mean in map(_mean, zip(*times, strict=True)) if mean]
        memory = _mean((a["peak_mib"], b["peak_mib"]) for a, b in pairs)
        launches = _mean((a["launches_per_step"], b["launches_per_step"]) for a, b in pairs)
        rounds = (min(means), max(means))
        result.append(Effect(fusion, len(pairs), time, rounds, memory, launches))
    return result


def _mean(pairs: Iterable[tuple[float | None, float | None]]) -> float | None:
    """The geometric mean of the ratios without / with; None if none was measured."""
    ratios = [without / with_ for without, with_ in pairs if without and with_]
    return geometric_mean(ratios) if ratios else None


def read_ablation(path: Path) -> Ablation:
    """A fusion_ablation.json in which every combination has the same rounds, and some two differ in
    one fusion.
    """
    measured = files.read(path, Ablation)
    if len({len(combination["round_ms"]) for combination in measured["combinations"]}) != 1:
        raise UsageError(f"{path}: combinations: round_ms: not all of them have as many rounds")
    if not effects(measured["combinations"]):
        raise UsageError(f"{path}: combinations: no two differ in one fusion")
    return measured


def render_ablation(path: Path) -> Report:
    """The tables of a fusion_ablation.json, with a CSV file of its combinations."""
    measured = read_ablation(path)
    combinations = measured["combinations"]
    report = Report("Fusion ablation")
    report.text(f"Made by {run_facts.origin(measured)}.")
    medians = f"Medians of {measured['rounds']} rounds of {measured['steps_per_round']} steps."
    report.text(f"{measured['version']}, {run_facts.describe(measured)}. {medians}")
    report.section("Combinations")
    report.text("Speed-up: against none.")
    report.table(*combination_table(measured), csv="fusion_ablation")
    report.section("Effect of each fusion", "effects")
    report.text(
        "Ratios without / with: above 1 the fusion helps. Each is the geometric mean over the "
        "pairs of combinations that differ in this fusion only. If a range over the rounds holds "
        "1, the effect may be none."
    )
    report.table(*effect_table(measured))
    losses = [row["loss"] for row in combinations if row["loss"] is not None]
    if losses:
        report.text(
            f"The losses after the same {combinations[0]['steps']} steps from the same weights on "
            f"the same batch lie {max(losses) - min(losses):.2g} apart: rounding makes a small "
            "difference, another mathematics a large one."
        )
    if combinations[0]["peak_mib"] is None:
        report.text(
            "Peak memory is not given: on a CPU it can only be measured for the whole process."
        )
    if measured["left_out"]:
        report.text(f"Left out: {measured['left_out']}.")
    report.text(*(f"{note[0].upper()}{note[1:]}." for note in measured["notes"]))
    report.json("fusion_ablation", measured)
    return report


def label(combination: Combination) -> str:
    """ "QKV + flash", or "none"."""
    switches: Mapping[str, object] = combination["fusions"]
    return " + ".join(short for name, short in FUSIONS.items() if switches.get(name)) or "none"


def combination_table(measured: Ablation) -> Table:
    """A row per combination; speed-up against the one with all off."""
    combinations = measured["combinations"]
    unit, factor = tables.time_unit(max(row["step_ms"]["median"] for row in combinations))
    header = ["fusions on", f"{unit}/step", "p20", "p80", "speed-up", "peak MiB"]
    header += [COUNTED[measured["counted"]], "loss"]
    rows = []
    for row in combinations:
        step = row["step_ms"]
        times = [factor * step["median"], factor * step["p20"], factor * step["p80"]]
        speed_up = combinations[0]["step_ms"]["median"] / step["median"]
        counts = [row["peak_mib"], row["launches_per_step"], row["loss"]]
        rows.append([label(row), *times, speed_up, *counts])
    return tables.filled(header, rows)


def effect_table(measured: Ablation) -> Table:
    """A row per fusion."""
    header = ["fusion", "pairs", "time", "over the rounds", "memory", COUNTED[measured["counted"]]]
    rows = []
    for effect in effects(measured["combinations"]):
        low, high = effect.rounds
        means = [effect.time, f"{low:.3g} to {high:.3g}", effect.memory, effect.launches]
        rows.append([FUSIONS[effect.fusion], effect.pairs, *means])
    return tables.filled(header, rows)
