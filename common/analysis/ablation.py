"""What each fusion brings on its own: from the times of all combinations of fusions (written by `common.ablation`).

Two combinations that differ in one fusion only are a pair. For each pair the ratio without / with is taken, of the median step
time, the peak memory and the launches, so above 1 the fusion helps. The effect of a fusion is the geometric mean over
its pairs: with all 16 combinations there are 8, one for each setting of the other three. Two ranges stand beside it:

    over the pairs      the least and the largest ratio: how much the effect depends on the other fusions
    over the rounds     the effect from the medians of one round alone: how well it is known. A range that holds 1 says
                        that this measurement does not tell the fusion's effect from none.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.analysis import plots, tables
from common.files import read_json, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA = "tiny-llama-ablation/1"
FUSIONS = ("qkv_fusion", "flash_attention", "swiglu_fusion", "torch_compile")
LABELS = ("QKV", "flash", "SwiGLU", "compile")
COUNTED = {"kernels": "kernels/step", "operators": "operator calls/step"}

Combination = dict[str, Any]
Pair = tuple[Combination, Combination]  # without, with


class Ratio(NamedTuple):
    """Without / with: geometric mean over the pairs, the least and the largest of them."""

    mean: float
    low: float
    high: float


class Effect(NamedTuple):
    """One fusion's own effect. `rounds`: range of the time's mean over the rounds; memory: None where none was measured."""

    fusion: str
    pairs: int
    time: Ratio
    rounds: tuple[float, float]
    memory: Ratio | None
    launches: Ratio


def analyze(path: Path, folder: Path) -> str:
    """Reads fusion_ablation.json and writes fusion_ablation.csv, .md and .png into `folder`.

    Returns:
        The tables for the terminal.

    Raises:
        UsageError: the file is not of schema tiny-llama-ablation/1.
    """
    measured = read_json(path, SCHEMA)
    found = effects(measured["combinations"])
    write_text(folder / "fusion_ablation.csv", _csv(measured))
    write_text(folder / "fusion_ablation.md", report(measured, found))
    plots.save(figure(measured, found), folder / "fusion_ablation.png")
    written = ", ".join(str(folder / f"fusion_ablation.{kind}") for kind in ("json", "csv", "md", "png"))
    parts = [
        conditions(measured),
        tables.text(*combination_table(measured)),
        "Effect of each fusion, without / with (above 1 it helps):",
        tables.text(*effect_table(measured, found)),
        *notes(measured),
        f"written: {written}",
    ]
    return "\n\n".join(parts)


def effects(combinations: list[Combination]) -> list[Effect]:
    """The effect of each fusion that is on in some combination."""
    result = []
    for fusion in FUSIONS:
        pairs = pairs_of(combinations, fusion)
        if not pairs:
            continue
        rounds = [_ratio(pairs, lambda c, i=i: c["round_ms"][i]).mean for i in range(len(pairs[0][0]["round_ms"]))]
        memory = None if pairs[0][0]["peak_mib"] is None else _ratio(pairs, lambda c: c["peak_mib"])
        time = _ratio(pairs, lambda c: c["step_ms"]["median"])
        launches = _ratio(pairs, lambda c: c["launches_per_step"])
        result.append(Effect(fusion, len(pairs), time, (min(rounds), max(rounds)), memory, launches))
    return result


def pairs_of(combinations: list[Combination], fusion: str) -> list[Pair]:
    """(without, with) for every two combinations that differ in this fusion only."""
    by_setting = {tuple(c["fusions"][name] for name in FUSIONS): c for c in combinations}
    place = FUSIONS.index(fusion)
    without = ((setting, setting[:place] + (True,) + setting[place + 1 :]) for setting in by_setting if not setting[place])
    return [(by_setting[off], by_setting[on]) for off, on in without if on in by_setting]


def _ratio(pairs: list[Pair], value: Callable[[Combination], float]) -> Ratio:
    ratios = [value(without) / value(with_) for without, with_ in pairs]
    return Ratio(math.exp(sum(map(math.log, ratios)) / len(ratios)), min(ratios), max(ratios))


def label(combination: Combination) -> str:
    """ "QKV + flash", or "none"."""
    names = [short for short, fusion in zip(LABELS, FUSIONS, strict=True) if combination["fusions"][fusion]]
    return " + ".join(names) or "none"


def _range(low: float, high: float) -> str:
    return f"{low:.3g} to {high:.3g}"


def combination_table(measured: dict[str, Any]) -> tuple[list[str], list[list[object]]]:
    """A row per combination; speed-up and memory against the one with all off."""
    combinations = measured["combinations"]
    plain, on_gpu = combinations[0], combinations[0]["peak_mib"] is not None
    header = ["fusions on", "ms/step", "p20 to p80", "speed-up", COUNTED[measured["counted"]], "loss"]
    rows = [
        [
            label(c), c["step_ms"]["median"], _range(c["step_ms"]["p20"], c["step_ms"]["p80"]),
            plain["step_ms"]["median"] / c["step_ms"]["median"], c["launches_per_step"], f"{c['loss']:.5f}",
        ]
        for c in combinations
    ]  # fmt: skip
    if on_gpu:
        header.insert(4, "peak MiB")
        for row, combination in zip(rows, combinations, strict=True):
            row.insert(4, combination["peak_mib"])
    return header, rows


def effect_table(measured: dict[str, Any], found: list[Effect]) -> tuple[list[str], list[list[object]]]:
    header = ["fusion", "pairs", "time", "over the pairs", "over the rounds", "memory", COUNTED[measured["counted"]]]
    rows = [
        [
            LABELS[FUSIONS.index(e.fusion)], e.pairs, e.time.mean, _range(e.time.low, e.time.high), _range(*e.rounds),
            e.memory.mean if e.memory else None, e.launches.mean,
        ]
        for e in found
    ]  # fmt: skip
    if all(effect.memory is None for effect in found):
        header.pop(5)
        for row in rows:
            row.pop(5)
    return header, rows


def conditions(measured: dict[str, Any]) -> str:
    """What was measured, in one line."""
    training = measured["training"]
    return (
        f"{measured['version']}, {measured['device']['name']}, {measured['precision']['compute']}, torch "
        f"{measured['environment']['torch']}, batch size {training['batch_size']}, sequence length "
        f"{training['sequence_length']}; {tables.letters(measured['model'])}. "
        f"Medians of {measured['rounds']} rounds of {measured['steps_per_round']} steps."
    )


def notes(measured: dict[str, Any]) -> list[str]:
    """What to know before reading the figures, a line each."""
    losses = [c["loss"] for c in measured["combinations"]]
    spread = max(losses) - min(losses)
    result = [
        f"The losses after the same {measured['combinations'][0]['steps']} steps from the same weights on the same batch lie "
        f"{spread:.2g} apart: rounding makes a small difference, another mathematics a large one."
    ]
    if measured["combinations"][0]["peak_mib"] is None:
        result.append("Peak memory is not given: on a CPU it can only be measured for the whole process.")
    result += [f"Left out: {measured['left_out']}."] if measured["left_out"] else []
    return result + [f"{note[0].upper()}{note[1:]}." for note in measured["notes"]]


def report(measured: dict[str, Any], found: list[Effect]) -> str:
    """The Markdown report."""
    parts = [
        "# Fusion ablation",
        conditions(measured),
        f"Made by `{measured['command']}` on {measured['date']}.",
        "![Step time of each combination, and the effect of each fusion](fusion_ablation.png)",
        "## Effect of each fusion",
        "Ratios without / with: above 1 the fusion helps. Each is the geometric mean over the pairs of combinations that differ "
        "in this fusion only. A range over the rounds that holds 1 does not tell the effect from none.",
        tables.markdown(*effect_table(measured, found)).strip(),
        "## Combinations",
        "Speed-up: against none.",
        tables.markdown(*combination_table(measured)).strip(),
        *notes(measured),
    ]
    return "\n\n".join(parts) + "\n"


def _csv(measured: dict[str, Any]) -> str:
    header = [*FUSIONS, "ms", "p20", "p80", "steps", "peak_mib", f"{measured['counted']}_per_step", "loss"]
    rows = []
    for c in measured["combinations"]:
        times = [c["step_ms"][name] for name in ("median", "p20", "p80", "count")]
        rows.append([*map(int, c["fusions"].values()), *times, c["peak_mib"], c["launches_per_step"], c["loss"]])
    return tables.csv_text(header, rows)


def figure(measured: dict[str, Any], found: list[Effect]) -> "Figure":
    """Above the step time of every combination, below the effect of each fusion on time, memory and launches."""
    heights = [0.9 + 0.24 * len(measured["combinations"]), 0.9 + 0.6 * len(found)]
    result = plots.new(5.8, 0.7 + sum(heights))
    training = measured["training"]
    result.suptitle(
        f"Fusion ablation: {measured['version']}, {measured['precision']['compute']}, batch size {training['batch_size']}, "
        f"sequence length {training['sequence_length']}\n{measured['device']['name']}", fontsize=10,
    )  # fmt: skip
    above, below = result.subplots(2, 1, height_ratios=heights)
    _step_times(above, measured["combinations"])
    _effects(below, measured, found)
    return result


def _step_times(axes: Any, combinations: list[Combination]) -> None:
    steps = [c["step_ms"] for c in combinations]
    medians = [step["median"] for step in steps]
    spread = [[step["median"] - step["p20"] for step in steps], [step["p80"] - step["median"] for step in steps]]
    axes.barh([label(c) for c in combinations], medians, xerr=spread, color=plots.SKY, ecolor=plots.BLACK, capsize=3)
    axes.axvline(medians[0], color=plots.BLACK, linestyle="--", linewidth=1)
    axes.set(title="Step time", xlabel="ms per step: median, p20 to p80\n(dashed: none)", xlim=(0, None))
    axes.invert_yaxis()


def _effects(axes: Any, measured: dict[str, Any], found: list[Effect]) -> None:
    series: list[tuple[str, str, Callable[[Effect], Ratio | None]]] = [
        ("time", plots.BLUE, lambda e: e.time),
        ("peak memory", plots.ORANGE, lambda e: e.memory),
        (COUNTED[measured["counted"]], plots.GREEN, lambda e: e.launches),
    ]
    series = [(name, colour, of) for name, colour, of in series if of(found[0])]
    height = 0.8 / len(series)
    for i, (name, colour, of) in enumerate(series):
        ratios = [of(effect) for effect in found]
        spread = [  # a mean of equal ratios can round to beyond them
            [max(0.0, ratio.mean - ratio.low) for ratio in ratios],
            [max(0.0, ratio.high - ratio.mean) for ratio in ratios],
        ]
        places = [place + (i - (len(series) - 1) / 2) * height for place in range(len(found))]
        means = [ratio.mean - 1 for ratio in ratios]
        axes.barh(places, means, height * 0.9, left=1, xerr=spread, color=colour, capsize=3, label=name)
    axes.axvline(1, color=plots.BLACK, linewidth=1)
    axes.set_yticks(range(len(found)), [LABELS[FUSIONS.index(effect.fusion)] for effect in found])
    axes.set(title="Effect, range over the pairs", xlabel="without / with\n(above 1 the fusion helps)")
    axes.invert_yaxis()
    axes.legend()
