"""The measured pictures of the documents: SVG files in pictures/, drawn from the files in results/
that their marker names.

Versions of matplotlib draw the same figure with different bytes. So a picture holds a digest of the
numbers that it shows, and is out of date when these numbers have changed.

One picture is taken by hand, when the page of a trace has changed:

    python page.py results/h200/traces/v1_small.json.gz --output /tmp/run.html
    chromium --headless --hide-scrollbars --window-size=1360,1130 \\
        --screenshot=pictures/page.png file:///tmp/run.html

Its colours are then reduced to 128.
"""

import hashlib
import json
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common.config import ModelConfig
from documents import versions
from tracepage import files
from tracepage.cost import footprint, peaks
from tracepage.errors import UsageError
from tracepage.readers import chrome_trace, kernel_names
from tracepage.records import step_profile
from tracepage.records.study_files import Decoding
from tracepage.show import plots, run_facts
from tracepage.show.tables import format_number
from tracepage.views import bandwidth

import pandas
from matplotlib.figure import Figure

COLOURS = [
    plots.ORANGE,
    plots.SKY,
    plots.BLUE,
    plots.GREEN,
    plots.PURPLE,
    plots.VERMILION,
    plots.BLACK,
]
GIB = 2**30
# Inches of a picture; with letters of 9 points, a slide of 1920 x 1080 shows none smaller than 18
# points.
WIDTH = 9
WINDOW_MS = 3.0  # of each timeline
STYLE: dict[Any, Any] = {  # matplotlib's parameters
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "figure.titlesize": 10,
}
KINDS = ["matrix products", "attention", "reductions", "elementwise", "copies", "other"]
Points = dict[str, tuple[float, float]]  # by name: FLOP/byte, TFLOP/s


class Picture(NamedTuple):
    """A picture: its numbers, a description for readers who cannot see it, and the figure."""

    name: str
    numbers: Any  # as JSON holds them
    description: str
    figure: Figure

    def digest(self) -> str:
        digest = hashlib.sha256(json.dumps(self.numbers).encode()).hexdigest()[:16]
        return f'data-digest="{digest}"'

    def svg(self) -> str:
        """The content of the SVG file."""
        drawing = plots.svg(self.figure, self.name, self.description)
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {self.digest()} '
        return drawing.replace("<svg ", head, 1) + "\n"

    def is_current(self, path: Path) -> bool:
        return path.is_file() and self.digest() in path.read_text(encoding="utf-8")[:2000]


def ladder(*paths: Path) -> Picture:
    """Speed by model and size: how many times faster than its panel's reference each is, a panel
    for each benchmark.

    A dot is the quotient of the medians, and a line its range over the processes.
    """
    cases = versions.read_cases(paths)
    models = versions.headline(cases)
    device = run_facts.device(cases[0].study)
    figure = plots.new(WIDTH, 0.9 + 0.25 * len(models))
    all_axes = figure.subplots(1, len(cases), sharey=True, squeeze=False).flat
    panels = {}
    fastest = []
    for case, axes in zip(cases, all_axes, strict=True):
        panel = {}
        reference = case.reference()
        for row, name in enumerate(models):
            if not case.times(name):
                continue
            panel[name] = case.ratio(reference, name)
            faster, least, most = panel[name]
            label = f"{format_number(faster)}x"
            axes.plot((least, most), [row, row], color=colour(name), linewidth=2)
            axes.plot(faster, row, "o", color=colour(name))
            axes.annotate(label, (most, row), (4, -3), textcoords="offset points")
        axes.axvline(1, color="0.5", linestyle=":", linewidth=1, zorder=0)
        axes.grid(True, axis="y", color="0.92")
        axes.set_yticks(range(len(models)), models)
        axes.set_title(f"{case.preset}, {case.shape[0]} x {case.shape[1]}\n1x: {reference}")
        axes.set(xlim=(0, 1.35 * axes.dataLim.xmax), ylim=(len(models) - 0.5, -0.5))
        best = max(panel, key=lambda name: panel[name])
        fastest.append(f"{case.preset}: {best} {format_number(panel[best][0])}x {reference}")
        panels[case.title()] = [reference, panel]
    figure.supxlabel("times as fast as 1x; dot: medians, line: range over processes", fontsize=9)
    precision = ", ".join(sorted({case.precision for case in cases}))
    figure.suptitle(f"Speed of one training step, {precision}, one {device}")
    description = (
        f"Speed-up of all versions and peers in {precision}, one {device}, over the first version "
        "that was measured, captured where its step waits for the host. The fastest: "
        f"{', '.join(fastest)}"
    )
    return Picture(f"ladder-{paths[0].parent.name}", panels, description, figure)


def colour(model: str) -> str:
    """One colour for each version, with and without torch.compile, and grey for the peers."""
    version = versions.VERSION.fullmatch(model)
    return COLOURS[(int(version[1]) - 1) % len(COLOURS)] if version else "0.7"


def held(config: ModelConfig, batch_size: int, sequence_length: int) -> dict[str, list[float]]:
    """GiB that Version 1 holds under bf16 autocast on a GPU at four moments, by the formulas of
    `footprint`.

    The moments are before the step, after the forward pass, after the backward pass, and after
    AdamW, when the gradients are released. Between them the layers, all of one size, come and go
    one by one. Temporary tensors are not counted.
    """
    kept = footprint.activations(config, batch_size, sequence_length, "cuda")
    stays = footprint.states(config)
    return {
        "weights": [stays["weights"] / GIB] * 4,
        "AdamW's moments": [stays["adamw"] / GIB] * 4,
        "gradients": [0, 0, stays["gradients"] / GIB, 0],
        "other activations": [0, (kept["total"] - kept["scores"]) / GIB, 0, 0],
        "scores [B, H, S, S]": [0, kept["scores"] / GIB, 0, 0],
    }


def memory(*paths: Path) -> Picture:
    """Memory over a step of the first version by formula, and its measured peak, in the last two
    benchmarks that measured it in bf16.
    """
    cases = versions.read_cases(paths)
    model = versions.models(cases)[0]
    cases = [case for case in cases if case.times(model)][-2:]
    device = run_facts.device(cases[0].study)
    figure = plots.new(WIDTH, 3.9)
    all_axes = figure.subplots(1, len(cases), squeeze=False).flat
    panels = []
    sizes = []
    for case, axes in zip(cases, all_axes, strict=True):
        peak = median(run["peak_mib"] for run in case.runs[model]) / 2**10
        areas = held(ModelConfig.model_validate(case.study["model"]), *case.shape)
        frame = pandas.DataFrame(areas, index=[0.0, 1.0, 2.0, 2.2])
        frame.plot.area(ax=axes, color=COLOURS[: len(areas)], linewidth=0, legend=False)
        axes.axhline(peak, color=plots.BLACK, linestyle="--", linewidth=1, label="measured peak")
        phases = ["forward,\nlayer by layer", "backward,\nlast layer first", "AdamW"]
        axes.set_xticks([0.5, 1.5, 2.2], phases)
        axes.set(xlim=(0, 2.2), ylim=(0, 1.1 * peak), ylabel="GiB", title=f"{case.title()} tokens")
        text = ", ".join(f"{name} {format_number(max(area))}" for name, area in areas.items())
        sizes.append(f"{case.preset}: {text}, measured peak {format_number(peak)}")
        panels.append([case.title(), peak, areas])
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", reverse=True)
    figure.suptitle(
        f"Memory over one step of {model}: areas by formula, the line measured on one {device}"
    )
    description = (
        f"Memory over one training step of {model} on one {device}, GiB at most. {'; '.join(sizes)}"
    )
    return Picture(f"memory-{paths[0].parent.name}", panels, description, figure)


def kernels_by_version(*paths: Path) -> Picture:
    """The kernels and copies of a step and their time, by kind, a bar for each trace."""
    folder = paths[0].parents[1].name
    device = folder.upper()
    figure = plots.new(WIDTH, 1.2 + 0.5 * len(paths))
    counts = {}
    times = {}
    sums = []
    for path in paths:
        name = versions.name_of(path)
        step = versions.step_kernels(path)
        kinds = step.duration_us.groupby(step.name.map(kernel_names.kind))
        counts[name] = kinds.size()
        times[name] = kinds.sum()
        sums.append(f"{name} {len(step):,} in {step.duration_us.sum():,.0f} us")
    panels = {"kernels and copies in a step": counts, "us of all of them": times}
    numbers = []
    for axes, (title, panel) in zip(
        figure.subplots(1, 2, sharey=True), panels.items(), strict=True
    ):
        frame = pandas.DataFrame(panel).T.reindex(columns=KINDS).fillna(0.0).astype(float)
        frame.plot.barh(ax=axes, stacked=True, color=[*COLOURS], legend=False, title=title)
        totals = frame.sum(axis=1)
        axes.bar_label(axes.containers[-1], [format_number(total) for total in totals], padding=3)
        axes.set_xlim(0, 1.2 * totals.max())
        numbers.append(frame.round(1).to_dict())
    axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(KINDS))
    figure.suptitle(f"Kernels of a step by version, bf16, one {device}")
    description = f"Kernels and copies of a step in bf16 on one {device}: {'; '.join(sums)}"
    return Picture(f"kernels-{folder}", numbers, description, figure)


def timeline(*paths: Path) -> Picture:
    """The first milliseconds of profiled steps on the GPU, a panel for each trace: launches of the
    host above, kernels below.
    """
    folder = paths[0].parents[1].name
    device = folder.upper()
    figure = plots.new(WIDTH, 0.6 + 1.4 * len(paths))
    all_axes = figure.subplots(len(paths), 1, sharex=True, squeeze=False).flat
    panels = {}
    titles = []
    for path, axes in zip(paths, all_axes, strict=True):
        name = versions.name_of(path)
        panel = panels[name] = _window(path)
        ms, kernels, busy = panel["step"]
        titles.append(
            f"{name}: a step of {ms} ms has {kernels:,} kernels; the GPU is busy {busy}% of it"
        )
        axes.broken_barh(panel["gpu"], (-0.35, 0.7), color=plots.VERMILION, linewidth=0)
        axes.vlines(panel["launches"], 0.65, 1.35, color=plots.BLACK, linewidth=0.5)
        if not panel["launches"]:
            note = "no launch: the host launched these steps before"
            axes.text(WINDOW_MS / 2, 1, note, ha="center", va="center")
        axes.set_yticks([0, 1], ["GPU: kernels", "host: launches"])
        axes.set(xlim=(0, WINDOW_MS), ylim=(-0.5, 1.5), title=titles[-1])
    axes.set_xlabel("ms")
    figure.suptitle(f"Profiled steps on one {device}: waiting for the host, and busy")
    description = (
        f"Launches of the host and kernels of one {device} over {WINDOW_MS:g} ms. "
        f"{'. '.join(titles)}"
    )
    return Picture(f"timeline-{folder}", panels, description, figure)


def _window(path: Path) -> dict[str, Any]:
    """The content of a trace's timeline, in ms from the first kernel of the profiled steps.

    It has launches (their starts), gpu ([start, length] of each kernel), and of a median step the
    ms, the number of kernels with copies and fills, and the percent in which the GPU is busy.
    """
    trace = chrome_trace.load(path)
    kernels = trace.kernels[trace.kernels.step >= 0]
    starts = (kernels.start_ns - kernels.start_ns.min()) / 1e3  # us
    launches = (starts - kernels.launch_delay_ns / 1e3).round(1) / 1e3
    bars = pandas.DataFrame({"start": starts / 1e3, "ms": kernels.duration_ns / 1e6})
    steps = trace.step_ns()
    return {
        "launches": sorted({*launches[launches.between(0, WINDOW_MS)]}),
        "gpu": bars[bars.start <= WINDOW_MS].to_numpy().tolist(),
        "step": [
            round(median(steps) / 1e6, 2),
            int(median(kernels.groupby("step").size())),
            round(100 * trace.device_busy_ns() / sum(steps), 1),
        ],
    }


def roofline(path: Path) -> Picture:
    """A profile's longest operators under its data sheet's roof. UsageError: the data sheet is not
    known.
    """
    profile = step_profile.read(path)
    run = profile["run"]
    compute = run["precision"]["compute"]
    device = run_facts.device(run)
    points = {}
    for row in sorted(bandwidth.from_profile(profile)[0], key=lambda row: -row.seconds)[:24]:
        if row.flops and row.bytes:
            point = row.flops / row.bytes, row.flops / row.seconds / 1e12
            points[row.name.removeprefix("aten::")] = point
    figure, roof = _under_the_roof(path, device, compute, points)
    step = f"a step of {run['version']} at {run['training']['preset']} in {compute}"
    figure.suptitle(
        f"The longest operators of {step} on one {device}, under the roof of its data sheet"
    )
    longest = ", ".join(
        f"{name} {format_number(reached)} TFLOP/s at {format_number(intensity)} FLOP/byte"
        for name, (intensity, reached) in [*points.items()][:4]
    )
    description = f"Roofline of one {device} with operators of {step}: {longest}"
    return Picture(f"roofline-{path.parent.name}", [*roof, points], description, figure)


def decoding(*paths: Path) -> Picture:
    """The prefill and the decode steps of records under their data sheet's roof, which they meet at
    its two ends.
    """
    points = {}
    for path in paths:
        run = files.read(path, Decoding)
        mode = f"{run['operations']}, {run['mode']}"
        prefill = run["prefill_flops"] / run["prefill_ms"]["median"] / 1e9
        decode = run["token_intensity"] * run["bytes_per_second"] / 1e12
        points[f"prefill, {mode}"] = run["prefill_intensity"], prefill
        points[f"decode, {mode}"] = run["token_intensity"], decode
    device = run_facts.device(run)
    figure, roof = _under_the_roof(path, device, run["precision"]["compute"], points)
    figure.suptitle(
        f"Two ends of the roof of one {device}: a prompt of {run['prompt_tokens']} tokens, and one "
        f"token at a time after it, at {run['preset']}"
    )
    rates = "; ".join(f"{name} {format_number(reached)}" for name, (_, reached) in points.items())
    description = f"Roofline of one {device}, TFLOP/s: {rates}"
    return Picture("roofline-decoding", [*roof, points], description, figure)


def _under_the_roof(
    path: Path, device: str, compute: str, points: Points
) -> tuple[Figure, tuple[float, float]]:
    """A roofline with points, and the roof's TFLOP/s and TB/s. UsageError: the data sheet is not
    known.
    """
    known = peaks.datasheet(device)
    if not known:
        raise UsageError(f"{path}: the data sheet of {device} is not in tracepage/cost/peaks.csv")
    peak = known[compute] / 1e12
    rate = known["bandwidth"] / 1e12
    ridge = peak / rate
    intensities, rates = zip(*points.values(), strict=True)
    low = min(intensities) / 2.5
    high = 60 * ridge
    bottom = min(rates) / 10
    top = 5 * peak
    figure = plots.new(WIDTH, 4.2)
    axes = figure.subplots()
    axes.fill_between([low, ridge], bottom, top, color=plots.SKY, alpha=0.12, linewidth=0)
    axes.fill_between([ridge, high], bottom, top, color=plots.ORANGE, alpha=0.12, linewidth=0)
    axes.plot([low, ridge, high], [low * rate, peak, peak], color=plots.BLACK)
    memory_bound = f"memory-bound\nroof: intensity x {format_number(rate)} TB/s"
    compute_bound = f"compute-bound\nroof: {format_number(peak)} TFLOP/s"
    ridge_point = f"ridge point\n{format_number(ridge)} FLOP/byte"
    axes.text(low * 1.2, top / 1.4, memory_bound, va="top")
    axes.text(high / 1.2, top / 1.4, compute_bound, ha="right", va="top")
    axes.text(ridge / 1.2, bottom * 1.4, ridge_point, ha="right")
    for number, (name, point) in enumerate(points.items()):
        marker = plots.MARKERS[number // 7]
        axes.plot(*point, color=COLOURS[number % 7], marker=marker, linestyle="", label=name)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, top))
    axes.set(xlabel="arithmetic intensity, FLOP/byte", ylabel="TFLOP/s")
    figure.legend(loc="outside right center")
    return figure, (peak, rate)
