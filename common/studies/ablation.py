"""Times training steps of one version in many combinations of its fusions, all in one process.

A version's fusions are switches, so the effect of one of them can be measured with every setting of the others. Combinations are
timed in rounds, each a few steps of every combination, in turn forward and backward through the list: a slow spell of the
machine, or a clock that falls as it warms up, meets all of them. Every combination starts from the same weights and trains on the
same batch, so all must end at the same loss. With --capture-step every combination is captured as a graph.

Peak memory (GPU only) is what the allocator holds at most in a combination's second and third step, less what it held before the
combination was built. So idle combinations and the matrix library's workspace, which all share, do not count. On a CPU only the
peak of the whole process is known, which says nothing about one of sixteen combinations. Kernels are counted in a trace of
torch.profiler; on a CPU, operator calls that do work are counted.

Two combinations that differ in one fusion only are a pair. For each pair the ratio without / with is taken, of the median step
time, the peak memory and the launches, so above 1 the fusion helps. The effect of a fusion is the geometric mean over its pairs:
with all 16 combinations there are 8, one for each setting of the other three. Two ranges stand beside it:

    over the pairs      the least and the largest ratio: how much the effect depends on the other fusions
    over the rounds     the least and the largest effect from the medians of one round alone: how well it is known. If the range
                        holds 1, this measurement cannot tell whether the fusion has an effect.
"""

import gc
import itertools
import math
import os
import tempfile
import textwrap
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from common import cli, files, signals
from common import device as devices
from common.analysis.output import plots, run_facts, tables
from common.analysis.output.report import Report
from common.analysis.profiles import kernel_table, load_kernels
from common.errors import UsageError
from common.options import Options
from common.precision import Precision
from common.progress import progress
from common.records.ablation_file import SCHEMA, Ablation, Combination
from common.timing import benchmark, summarize
from common.training import record, version_files
from common.training.capture import Batch
from common.training.profiler import Profiler
from common.training.run import out_of_memory_explained
from common.training.step import prepare

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FUSIONS = {"qkv_fusion": "QKV", "flash_attention": "flash", "swiglu_fusion": "SwiGLU", "torch_compile": "compile"}  # labels
ENDED_EARLY = "the study ended before the losses were read and the launches were counted"
COUNTED = {"kernels": "kernels/step", "operators": "operator calls/step"}
STEPS = 5  # timed steps of a combination in a round
WARMUP = 3  # steps before the first round; the first of them compiles
PROFILED = dict(
    num_steps=5, profile_steps=2, profile_memory=False, profile_with_stack=False, profile_with_flops=False
)  # the last two of five steps

Fusions = tuple[bool, ...]  # in the order of FUSIONS


# ---------------------------------------------------------------------------------------------------------- measurement


def combinations(every: bool, with_compile: bool) -> list[Fusions]:
    """All settings of the fusions, or all off, each alone, all but each and all on; in the order of how many are on."""
    choices = [(False, True)] * (len(FUSIONS) - 1) + [(False, True) if with_compile else (False,)]
    most = len(FUSIONS) - (not with_compile)
    found = [c for c in itertools.product(*choices) if every or sum(c) in (0, 1, most - 1, most)]
    return sorted(found, key=lambda c: (sum(c), [not on for on in c]))


def flags_for(fusions: Fusions) -> list[str]:
    """The version's flags that set exactly these fusions."""
    return [f"--{'enable' if on else 'disable'}-{name.replace('_', '-')}" for name, on in zip(FUSIONS, fusions, strict=True)]


def measure(version: ModuleType, options: Options, every: bool, rounds: int, path: Path) -> int:
    """Measures the combinations; after each round it writes fusion_ablation.json (`path`) and prints a line.

    The first signal within the rounds ends them after the current one; the result then holds fewer rounds.

    Args:
        version: has a switch `--enable-X`, `--disable-X` for each of FUSIONS.
        options: from `version_files.resolve`.
        every: all 16 combinations, not only none, one, all but one, and all.

    Returns:
        The exit code: 0, or 128 + n if stopped by signal n.

    Raises:
        UsageError: the version lacks a switch, the environment overrides one, or the step cannot be captured here.
        RunError: memory ran out, or the result could not be written.
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

    with out_of_memory_explained(options):
        with progress(f"building {len(wanted)} combinations"):
            build(version, options, wanted[0], precision, batch)  # not kept: what is set up once for all must not count for it
            trains, peaks = zip(*(build(version, options, fusions, precision, batch) for fusions in wanted), strict=True)
        measured = record.header(SCHEMA, device, precision.name, model=options.model) | {
            "version": record.name(version), "settings": {"capture_step": True} if options.capture_step else {},
            "training": {"batch_size": options.batch_size, "sequence_length": options.seq_len, "seed": options.seed},
            "rounds": 0, "steps_per_round": STEPS, "left_out": left_out,
            "counted": "kernels" if devices.is_gpu(device) else "operators", "notes": [ENDED_EARLY],
            "combinations": [
                {"fusions": dict(zip(FUSIONS, fusions, strict=True)), "flags": flags_for(fusions), "peak_mib": peak,
                 "round_ms": [], "launches_per_step": None, "loss": None}
                for fusions, peak in zip(wanted, peaks, strict=True)
            ],
        }  # fmt: skip
        found, times = measured["combinations"], [[] for _ in wanted]  # ms of the timed steps
        with signals.deferred() as received:
            for done in range(1, rounds + 1):
                start = time.perf_counter()
                for i in range(len(wanted))[:: 1 if done % 2 else -1]:
                    ms = benchmark(trains[i], device, warmup=1, iterations=STEPS)
                    times[i] += ms
                    found[i]["round_ms"].append(summarize(ms)["median"])
                for combination, ms in zip(found, times, strict=True):
                    combination |= {"step_ms": summarize(ms), "steps": WARMUP + done * (1 + STEPS)}
                measured["rounds"] = done
                files.write_measurement(path, measured, "--output-dir")
                print(f"round {done} of {rounds}: {len(wanted)} combinations in {time.perf_counter() - start:.1f} s", flush=True)
                if received:
                    break
        losses = [train().item() for train in trains]
        with progress("counting the launches of each combination"):
            counts = [count(train, device) for train in trains]
    for combination, loss, counted in zip(found, losses, counts, strict=True):
        combination |= {"loss": loss, "steps": combination["steps"] + 1, "launches_per_step": launches_per_step(counted)}
    stopped = [f"the study was stopped after {done} of {rounds} rounds"] if done < rounds else []
    measured["counted"] = "operators" if counts[0].are_operators else "kernels"
    measured["notes"] = list(dict.fromkeys(stopped + [note for counted in counts for note in counted.notes]))
    files.write_measurement(path, measured, "--output-dir")
    return 128 + received[0] if received else 0


def build(
    version: ModuleType, options: Options, fusions: Fusions, precision: Precision, batch: Batch
) -> tuple[Callable[[], Tensor], float | None]:
    """A combination's training step, which returns the loss, after its first steps from the seed's weights; its peak in MiB."""
    device = precision.device
    gc.collect()
    devices.synchronize(device)
    devices.reset_peak_memory(device)
    before = devices.peak_memory(device)["peak_mib"]  # after a reset: what is held now
    torch.manual_seed(options.seed)
    prepared = prepare(version, version_files.switched(version, options, *flags_for(fusions)), precision, batch)

    def train() -> Tensor:
        return prepared.step(batch)  # and keeps the model: a captured step holds none of the weights that it reads

    train()
    devices.synchronize(device)
    devices.reset_peak_memory(device)  # without what compiling needed
    for _ in range(WARMUP - 1):
        train()
    devices.synchronize(device)
    peak = devices.peak_memory(device, prepared.graph_peak_bytes)["peak_mib"] - before
    return train, peak if devices.is_gpu(device) else None


def count(train: Callable[[], Tensor], device: torch.device) -> kernel_table.Kernels:
    """The kernels of two steps, from a trace in a folder that is then removed."""
    with tempfile.TemporaryDirectory() as folder:
        profiler = Profiler(Namespace(profile_dir=Path(folder), **PROFILED), device)
        profiler.start()
        for step in range(PROFILED["num_steps"]):
            train()
            profiler.step(step + 1)
        profiler.stop()
        profiler.export()
        return load_kernels.load(profiler.trace_path)


def launches_per_step(counted: kernel_table.Kernels) -> float:
    """Kernels per step without copies and fills; on a CPU, operator calls that do work."""
    wanted = counted.table.category.isin(["kernel", "operator"])
    return float(counted.table.calls[wanted].sum()) / counted.steps


# -------------------------------------------------------------------------------------------------------------- effects


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


def effects(combinations: list[Combination]) -> list[Effect]:
    """The effect of each fusion that is on in some combination."""
    result = []
    for fusion in FUSIONS:
        pairs = [(a, b) for a, b in itertools.permutations(combinations, 2) if a["fusions"] | {fusion: True} == b["fusions"]]

        def ratio(value: Callable[[Combination], float], pairs: list = pairs) -> Ratio:
            ratios = [value(without) / value(with_) for without, with_ in pairs]
            return Ratio(math.exp(sum(map(math.log, ratios)) / len(ratios)), min(ratios), max(ratios))

        if pairs:
            rounds = [ratio(lambda c, i=i: c["round_ms"][i]).mean for i in range(len(combinations[0]["round_ms"]))]
            time = ratio(lambda c: c["step_ms"]["median"])
            memory = ratio(lambda c: c["peak_mib"]) if combinations[0]["peak_mib"] else None
            launches = ratio(lambda c: c["launches_per_step"]) if combinations[0]["launches_per_step"] else None
            result.append(Effect(fusion, len(pairs), time, (min(rounds), max(rounds)), memory, launches))
    return result


# --------------------------------------------------------------------------------------------------------------- report


def read(path: Path) -> Ablation:
    """A fusion_ablation.json in which every combination has the same rounds, and some two differ in one fusion.

    Raises:
        UsageError: the file is missing, damaged, or not of schema tiny-llama-ablation/1.
    """
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
    """The tables of a fusion_ablation.json, with a CSV file and a figure.

    Raises:
        UsageError: the file is missing, damaged, or not of schema tiny-llama-ablation/1.
    """
    measured = read(path)
    found = effects(measured["combinations"])
    report = Report("Fusion ablation")
    report.text(conditions(measured), f"Made by {run_facts.origin(measured)}.")
    picture = "Step time of each combination, and the effect of each fusion"
    report.figure(lambda: figure(measured, found), "fusion_ablation", picture)
    report.section("Combinations")
    report.text("Speed-up: against none.")
    report.table(*combination_table(measured))
    times = {"median": "ms", "p20": "p20", "p80": "p80", "count": "steps"}
    values = {"peak_mib": "peak_mib", "launches_per_step": f"{measured['counted']}_per_step", "loss": "loss"}
    rows = [
        [*(int(c["fusions"][name]) for name in FUSIONS), *(c["step_ms"][name] for name in times), *(c[name] for name in values)]
        for c in measured["combinations"]
    ]
    report.csv("fusion_ablation", [*FUSIONS, *times.values(), *values.values()], rows)
    report.json("fusion_ablation", measured)
    report.section("Effect of each fusion", "effects")
    report.text(
        "Ratios without / with: above 1 the fusion helps. Each is the geometric mean over the pairs of combinations that differ "
        "in this fusion only. If a range over the rounds holds 1, the effect may be none."
    )
    report.table(*effect_table(measured, found))
    report.text(*notes(measured))
    return report


def label(combination: Combination) -> str:
    """ "QKV + flash", or "none"."""
    return " + ".join(short for fusion, short in FUSIONS.items() if combination["fusions"][fusion]) or "none"


def combination_table(measured: Ablation) -> tuple[list[str], list[list[object]]]:
    """A row per combination; speed-up against the one with all off."""
    combinations = measured["combinations"]
    unit, factor = tables.time_unit(max(c["step_ms"]["median"] for c in combinations))
    header = ["fusions on", f"{unit}/step", "p20 to p80", "speed-up", "peak MiB", COUNTED[measured["counted"]], "loss"]
    rows = []
    for c in combinations:
        median, p20, p80 = (factor * c["step_ms"][name] for name in ("median", "p20", "p80"))
        speed_up = combinations[0]["step_ms"]["median"] / c["step_ms"]["median"]
        loss = None if c["loss"] is None else f"{c['loss']:.5f}"
        rows.append([label(c), median, _range(p20, p80), speed_up, c["peak_mib"], c["launches_per_step"], loss])
    return tables.filled(header, rows)


def effect_table(measured: Ablation, found: list[Effect]) -> tuple[list[str], list[list[object]]]:
    """A row per fusion."""
    header = ["fusion", "pairs", "time", "over the pairs", "over the rounds", "memory", COUNTED[measured["counted"]]]
    rows = []
    for e in found:
        ranges, means = (_range(e.time.low, e.time.high), _range(*e.rounds)), (r and r.mean for r in (e.memory, e.launches))
        rows.append([FUSIONS[e.fusion], e.pairs, e.time.mean, *ranges, *means])
    return tables.filled(header, rows)


def _range(low: float, high: float) -> str:
    return f"{low:.3g} to {high:.3g}"


def conditions(measured: Ablation) -> str:
    """The measured configuration, in one line."""
    medians = f"Medians of {measured['rounds']} rounds of {measured['steps_per_round']} steps."
    return f"{measured['version']}, {run_facts.describe(measured)}. {medians}"


def notes(measured: Ablation) -> list[str]:
    """Notes for a reader of the numbers, a paragraph each."""
    first, losses = measured["combinations"][0], [c["loss"] for c in measured["combinations"] if c["loss"] is not None]
    apart = [
        f"The losses after the same {first['steps']} steps from the same weights on the same batch lie "
        f"{max(losses) - min(losses):.2g} apart: rounding makes a small difference, another mathematics a large one."
    ] if losses else []  # fmt: skip
    return [
        *apart,
        *["Peak memory is not given: on a CPU it can only be measured for the whole process."] * (first["peak_mib"] is None),
        *[f"Left out: {measured['left_out']}."] * bool(measured["left_out"]),
        *(f"{note[0].upper()}{note[1:]}." for note in measured["notes"]),
    ]


def figure(measured: Ablation, found: list[Effect]) -> "Figure":
    """Above the step time of every combination, below the effect of each fusion on time, memory and launches."""
    combinations = measured["combinations"]
    heights = [0.9 + 0.24 * len(combinations), 0.9 + 0.6 * len(found)]
    result = plots.new(5.8, 1 + sum(heights))
    above, below = result.subplots(2, 1, height_ratios=heights)
    title = f"Fusion ablation: {measured['version']}, {run_facts.describe(measured)}"
    result.suptitle(textwrap.fill(title, 72), fontsize=9)

    def bars(axes: Any, places: list, values: list[Sequence[float]], left: float, **style) -> None:
        """Draws horizontal bars from `left` to the first of each three values, with the other two as their range."""
        ranges = [[abs(value[end] - value[0]) for value in values] for end in (1, 2)]
        axes.barh(places, [value[0] - left for value in values], left=left, xerr=ranges, capsize=3, **style)
        axes.axvline(left or values[0][0], color=plots.BLACK, linestyle="-" if left else "--", linewidth=1)

    times = [[c["step_ms"][name] for name in ("median", "p20", "p80")] for c in combinations]
    bars(above, list(map(label, combinations)), times, 0, color=plots.SKY)
    above.set(title="Step time", xlabel="ms per step: median, p20 to p80\n(dashed: none)", xlim=(0, None))
    above.invert_yaxis()
    names = {"time": "time", "memory": "peak memory", "launches": COUNTED[measured["counted"]]}
    shown = [name for name in names if getattr(found[0], name)]
    for i, name in enumerate(shown):
        places = [place + (i - (len(shown) - 1) / 2) * 0.8 / len(shown) for place in range(len(found))]
        style = dict(height=0.72 / len(shown), color=(plots.BLUE, plots.ORANGE, plots.GREEN)[list(names).index(name)])
        bars(below, places, [getattr(effect, name) for effect in found], 1, label=names[name], **style)
    below.set_yticks(range(len(found)), [FUSIONS[effect.fusion] for effect in found])
    below.set(title="Effect, range over the pairs", xlabel="without / with\n(above 1 the fusion helps)")
    below.invert_yaxis()
    result.legend(*below.get_legend_handles_labels(), loc="outside lower right", ncols=3, fontsize=9)
    return result
