"""Times training steps of one version in many combinations of its fusions, all in one process.

A version's fusions are switches, so what one of them brings can be seen with every setting of the others. Combinations are
timed in rounds, each a few steps of every combination, in turn forward and backward through the list: a slow spell of the
machine, or a clock that falls as it warms up, meets all of them. Every combination starts from the same weights and trains on the
same batch, so all must end at the same loss.

Peak memory (GPU only) is what the allocator holds at most in a combination's second and third step, less what it held before the
combination was built: idle combinations and the matrix library's workspace, which all share, are not in it. On a CPU the only
peak is that of the whole process, which says nothing about one of sixteen.

Kernels are counted in a trace of torch.profiler by `common.analysis.reports.launches`; on a CPU, operator calls that do work.

The result, fusion_ablation.json (schema "tiny-llama-ablation/1"):

    command, date, device, environment, model     as in a run record
    version          the version's name
    training         batch_size, sequence_length, seed
    precision        {"compute": "fp32"}
    rounds, steps_per_round
    left_out         why there are no combinations with torch_compile, or null
    counted          "kernels" or "operators": what launches_per_step counts; notes: what to know about that count
    combinations     a list of {"fusions": {name: on}, "flags": the version's flags for it,
                     "step_ms": {"median", "p20", "p80", "count"}, "round_ms": [median of each round],
                     "peak_mib": MiB or null, "launches_per_step", "loss": nats, "steps": steps trained until that loss}

What each fusion brings on its own: from the times of all combinations of fusions (written by `common.studies.ablation`).

Two combinations that differ in one fusion only are a pair. For each pair the ratio without / with is taken, of the median step
time, the peak memory and the launches, so above 1 the fusion helps. The effect of a fusion is the geometric mean over
its pairs: with all 16 combinations there are 8, one for each setting of the other three. Two ranges stand beside it:

    over the pairs      the least and the largest ratio: how much the effect depends on the other fusions
    over the rounds     the effect from the medians of one round alone: how well it is known. A range that holds 1 says
                        that this measurement does not tell the fusion's effect from none.
"""

import gc
import itertools
import math
import os
import shlex
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from common import cli
from common import device as devices
from common.analysis.output import plots, tables
from common.analysis.profiles import kernel_table, load_kernels
from common.errors import UsageError
from common.files import read_json, write_text
from common.precision import Precision
from common.timing import benchmark, summarize
from common.training import record, version_files
from common.training.profiler import Profiler
from common.training.run import out_of_memory_explained

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS = 5  # timed steps of a combination in a round
WARMUP = 3  # steps before the first round; the first of them compiles
PROFILED = dict(num_steps=5, profile_steps=2)  # the last two of five steps

Fusions = tuple[bool, ...]  # in the order of FUSIONS


@dataclass
class Case:
    """A combination: its model and optimizer, and what was measured of it."""

    fusions: Fusions
    flags: list[str]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    peak_mib: float | None = None
    rounds: list[list[float]] = field(default_factory=list)  # ms per step
    steps: int = 0
    loss: Tensor | None = None


def combinations(every: bool, with_compile: bool) -> list[Fusions]:
    """All settings of the fusions, or all off, each alone, all but each and all on; in the order of how many are on."""
    choices = [(False, True)] * (len(FUSIONS) - 1) + [(False, True) if with_compile else (False,)]
    most = len(FUSIONS) - (not with_compile)
    found = [c for c in itertools.product(*choices) if every or sum(c) in (0, 1, most - 1, most)]
    return sorted(found, key=lambda c: (sum(c), [not on for on in c]))


def flags_for(fusions: Fusions) -> list[str]:
    """The version's flags that set exactly these fusions."""
    return [f"--{'enable' if on else 'disable'}-{name.replace('_', '-')}" for name, on in zip(FUSIONS, fusions, strict=True)]


def measure(version: ModuleType, options: Namespace, every: bool, rounds: int) -> dict[str, Any]:
    """Measures the combinations, printing a line per round.

    Args:
        version: has a switch `--enable-X`, `--disable-X` for each of FUSIONS.
        options: from `version_files.resolve`.
        every: all 16 combinations, not only none, one, all but one, and all.

    Returns:
        The content of fusion_ablation.json.

    Raises:
        UsageError: the version lacks a switch, or the environment overrides one.
        RunError: memory ran out.
    """
    if os.environ.get("PYTORCH_FALLBACK_ATTENTION") == "1":
        raise UsageError("PYTORCH_FALLBACK_ATTENTION=1 keeps flash attention off in every combination: unset it")
    device = devices.select(options.device)
    devices.prepare(device, options.seed)
    precision = Precision(device, cli.amp_dtype(options))
    batch = version_files.random_batch(options, device)
    left_out = devices.compile_problem(device)
    if left_out:
        print(f"left out: {left_out}", flush=True)
    else:
        torch._dynamo.config.recompile_limit = 64  # one function, compiled once for each combination
    wanted = combinations(every, not left_out)

    def train(case: Case) -> None:
        case.loss = version.train_step(case.model, case.optimizer, batch, precision)
        case.steps += 1

    with out_of_memory_explained(options):
        build(version, options, wanted[0], device, train)  # not kept: what is set up once for all must not count for the first
        cases = [build(version, options, fusions, device, train) for fusions in wanted]
        for i in range(rounds):
            start = time.perf_counter()
            for case in cases if i % 2 == 0 else reversed(cases):
                case.rounds.append(benchmark(lambda case=case: train(case), device, warmup=1, iterations=STEPS))
            print(f"round {i + 1} of {rounds}: {len(cases)} combinations in {time.perf_counter() - start:.1f} s", flush=True)
        losses = [(case.loss.item(), case.steps) for case in cases]
        counts = [count(case, train, device) for case in cases]
    return {
        "schema": SCHEMA,
        "command": shlex.join(sys.argv),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "version": record.name(version),
        "device": devices.describe(device),
        "environment": devices.environment(),
        "model": options.model.model_dump(),
        "training": {"batch_size": options.batch_size, "sequence_length": options.seq_len, "seed": options.seed},
        "precision": {"compute": precision.name},
        "rounds": rounds,
        "steps_per_round": STEPS,
        "left_out": left_out,
        "counted": "operators" if counts[0].are_operators else "kernels",
        "notes": list(dict.fromkeys(note for counted in counts for note in counted.notes)),
        "combinations": [
            {
                "fusions": dict(zip(FUSIONS, case.fusions, strict=True)),
                "flags": case.flags,
                "step_ms": summarize([ms for times in case.rounds for ms in times]),
                "round_ms": [summarize(times)["median"] for times in case.rounds],
                "peak_mib": case.peak_mib,
                "launches_per_step": launches_per_step(counted),
                "loss": loss,
                "steps": steps,
            }
            for case, counted, (loss, steps) in zip(cases, counts, losses, strict=True)
        ],
    }


def build(version: ModuleType, options: Namespace, fusions: Fusions, device: torch.device, train: Any) -> Case:
    """A combination from the seed's weights, after its first steps, with its peak memory."""
    gc.collect()
    devices.synchronize(device)
    devices.reset_peak_memory(device)
    before = devices.peak_memory(device)["peak_mib"]  # after a reset: what is held now
    torch.manual_seed(options.seed)
    flags = flags_for(fusions)
    settings = version_files.switched(version, options, *flags)
    model = version.make_model(settings).to(device)
    case = Case(fusions, flags, model, version.make_optimizer(model, settings))
    train(case)
    devices.synchronize(device)
    devices.reset_peak_memory(device)  # without what compiling needed
    for _ in range(WARMUP - 1):
        train(case)
    devices.synchronize(device)
    if devices.is_gpu(device):
        case.peak_mib = devices.peak_memory(device)["peak_mib"] - before
    return case


def count(case: Case, train: Any, device: torch.device) -> kernel_table.Kernels:
    """The kernels of two steps, from a trace in a folder that is then removed."""
    with tempfile.TemporaryDirectory() as folder:
        profiler = Profiler(Namespace(profile_dir=Path(folder), profile_memory=False, **PROFILED), device)
        profiler.start()
        for step in range(PROFILED["num_steps"]):
            train(case)
            profiler.step(step + 1)
        profiler.stop()
        return load_kernels.load(profiler.trace_path)


def launches_per_step(counted: kernel_table.Kernels) -> float:
    """Kernels per step without copies and fills; on a CPU, operator calls that do work."""
    wanted = counted.table.category.isin(["kernel", "operator"])
    return float(counted.table.calls[wanted].sum()) / counted.steps


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
