"""The measured pictures of the documents: SVG files in pictures/, drawn from the files in results/
that their marker names.

Versions of matplotlib draw the same figure with different bytes. So a picture holds a digest of the
numbers that it shows, and is out of date when these numbers have changed.
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
# inches of a picture; with letters of 9 points, a slide of 1920 x 1080 shows none smaller than 18
# points
WIDTH = 9
WINDOW_US = 3000.0  # of each timeline
STYLE: dict[Any, Any] = {  # matplotlib's parameters
    "font.size": 9,
    "axes.titleweight": "normal",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 9,
    "axes.titlesize": 10,
    "figure.titlesize": 10,
    "axes.labelsize": 9,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
}
# of kernels
KINDS = ["matrix products", "attention", "reductions", "elementwise", "copies", "other"]


class Picture(NamedTuple):
    """A picture: its numbers, a description for readers who cannot see it, and the figure."""

    name: str
    numbers: Any  # as JSON holds them
    description: str
    figure: Figure

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.numbers).encode()).hexdigest()[:16]

    def svg(self) -> str:
        """The content of the SVG file."""
        drawing = plots.svg(self.figure, self.name, self.description)
        return (
            drawing.replace(
                "<svg ",
                f'<svg xmlns="http://www.w3.org/2000/svg" data-digest="{self.digest()}" ',
                1,
            )
            + "\n"
        )

    def is_current(self, path: Path) -> bool:
        return (
            path.is_file()
            and f'data-digest="{self.digest()}"' in path.read_text(encoding="utf-8")[:2000]
        )


def ladder(folder: Path) -> Picture:
    """Speed by version and size: how many times faster than the first version all models are in
    bf16, a panel for each preset.

    A dot is the quotient of the medians, and a line its range over the processes.
    """
    found, models = versions.headline(folder)
    device = run_facts.device(found[0].studies[0])
    figure = plots.new(WIDTH, 0.9 + 0.25 * len(models))
    panels = {}
    said = []
    for case, axes in zip(
        found, figure.subplots(1, len(found), sharey=True, squeeze=False).flat, strict=True
    ):
        panel = {
            name: versions.ratio(case.times(models[0]), case.times(name))
            for name in models
            if case.times(name)
        }
        for name, (faster, *ends) in panel.items():
            row = models.index(name)
            axes.plot(ends, [row, row], color=colour(name), linewidth=2)
            axes.plot(faster, row, "o", color=colour(name))
            axes.annotate(
                f"{format_number(faster)}x", (ends[1], row), (4, -3), textcoords="offset points"
            )
        axes.axvline(1, color="0.5", linestyle=":", linewidth=1, zorder=0)
        axes.grid(True, axis="y", color="0.92")
        axes.set_yticks(range(len(models)), models)
        axes.set_title(f"{case.preset}\n{case.shape[0]} x {case.shape[1]}")
        axes.set(xlim=(0, 1.35 * axes.dataLim.xmax), ylim=(len(models) - 0.5, -0.5))
        best = max(panel, key=lambda name: panel[name])
        said.append(f"{case.preset}: {best} {format_number(panel[best][0])}x")
        panels[case.title()] = panel
    figure.supxlabel(
        f"times as fast as {models[0]}; dot: medians, line: range over processes", fontsize=9
    )
    figure.suptitle(f"Speed-up of one training step over {models[0]}, bf16, one {device}")
    description = f"Speed-up over {models[0]} of all versions and peers in bf16, one {device}. The fastest: {', '.join(said)}"
    return Picture(f"ladder-{folder.name}", panels, description, figure)


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


def memory(folder: Path) -> Picture:
    """Memory over a step of the first version by formula, and its measured peak, at the larger half
    of the presets in bf16.
    """
    found, (model, *_) = versions.headline(folder)
    shown = [case for case in found if case.times(model)][-2:]
    device = run_facts.device(found[0].studies[0])
    figure = plots.new(WIDTH, 3.9)
    panels = []
    said = []
    for case, axes in zip(shown, figure.subplots(1, len(shown), squeeze=False).flat, strict=True):
        peak = median(run["peak_mib"] for run in case.runs[model]) / 2**10
        areas = held(ModelConfig.model_validate(case.studies[0]["model"]), *case.shape)
        frame = pandas.DataFrame(areas, index=[0.0, 1.0, 2.0, 2.2])
        frame.plot.area(ax=axes, color=COLOURS[: len(areas)], linewidth=0, legend=False)
        axes.axhline(peak, color=plots.BLACK, linestyle="--", linewidth=1, label="measured peak")
        axes.set_xticks(
            [0.5, 1.5, 2.2], ["forward,\nlayer by layer", "backward,\nlast layer first", "AdamW"]
        )
        axes.set(xlim=(0, 2.2), ylim=(0, 1.1 * peak), ylabel="GiB", title=f"{case.title()} tokens")
        sizes = [f"{name} {format_number(max(each))}" for name, each in areas.items()]
        said.append(f"{case.preset}: {', '.join(sizes)}, measured peak {format_number(peak)}")
        panels.append([case.title(), peak, areas])
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", reverse=True)
    figure.suptitle(
        f"Memory over one step of {model}: areas by formula, the line measured on one {device}"
    )
    description = (
        f"Memory over one training step of {model} on one {device}, GiB at most. {'; '.join(said)}"
    )
    return Picture(f"memory-{folder.name}", panels, description, figure)


def kernels_by_version(*paths: Path) -> Picture:
    """The kernels and copies of a step and their time, by kind, a bar for each trace."""
    steps = {versions.name_of(path): versions.step_kernels(path) for path in paths}
    kinds = {
        name: step.duration_us.groupby(step.name.map(kernel_names.kind))
        for name, step in steps.items()
    }
    both = [
        pandas.DataFrame({name: kind.agg(what) for name, kind in kinds.items()})
        for what in ("size", "sum")
    ]
    frames = [frame.T.reindex(columns=KINDS).fillna(0.0).astype(float) for frame in both]
    figure = plots.new(WIDTH, 1.2 + 0.5 * len(paths))
    device = paths[0].parents[1].name.upper()
    titles = ("kernels and copies in a step", "us of all of them")
    for axes, frame, title in zip(figure.subplots(1, 2, sharey=True), frames, titles, strict=True):
        frame.plot.barh(ax=axes, stacked=True, color=[*COLOURS], legend=False, title=title)
        axes.bar_label(
            axes.containers[-1], [format_number(total) for total in frame.sum(axis=1)], padding=3
        )
        axes.set_xlim(0, 1.2 * frame.sum(axis=1).max())
    axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(KINDS))
    figure.suptitle(f"Kernels of a step by version, bf16, one {device}")
    said = [
        f"{name} {len(step):,} in {step.duration_us.sum():,.0f} us" for name, step in steps.items()
    ]
    description = f"Kernels and copies of a step in bf16 on one {device}: {'; '.join(said)}"
    return Picture(
        f"kernels-{paths[0].parents[1].name}",
        [frame.round(1).to_dict() for frame in frames],
        description,
        figure,
    )


def timeline(*paths: Path) -> Picture:
    """The first milliseconds of profiled steps on the GPU, a panel for each trace: launches of the
    host above, kernels below.
    """
    figure = plots.new(WIDTH, 0.6 + 1.4 * len(paths))
    device = paths[0].parents[1].name.upper()
    panels = {}
    said = []
    for path, axes in zip(
        paths, figure.subplots(len(paths), 1, sharex=True, squeeze=False).flat, strict=True
    ):
        panel = panels[versions.name_of(path)] = _window(path)
        said.append(
            "{}: a step of {} ms has {:,} kernels; the GPU is busy {}% of it".format(
                versions.name_of(path), *panel["step"]
            )
        )
        axes.broken_barh(panel["gpu"], (-0.35, 0.7), color=plots.VERMILION, linewidth=0)
        axes.vlines(panel["launches"], 0.65, 1.35, color=plots.BLACK, linewidth=0.5)
        if not panel["launches"]:
            axes.text(
                WINDOW_US / 2e3,
                1,
                "no launch: the host launched these steps before",
                ha="center",
                va="center",
            )
        axes.set_yticks([0, 1], ["GPU: kernels", "host: launches"])
        axes.set(xlim=(0, WINDOW_US / 1e3), ylim=(-0.5, 1.5), title=said[-1])
    axes.set_xlabel("ms")
    figure.suptitle(f"Profiled steps on one {device}: waiting for the host, and busy")
    description = f"Launches of the host and kernels of one {device} over {WINDOW_US / 1e3:g} ms. {'. '.join(said)}"
    return Picture(f"timeline-{paths[0].parents[1].name}", panels, description, figure)


def _window(path: Path) -> dict[str, Any]:
    """The content of a trace's timeline, in ms from the first kernel of the profiled steps.

    It has launches (their starts), gpu ([start, length] of each kernel), and of a median step the
    ms, the number of kernels with copies and fills, and the percent in which the GPU is busy.
    """
    trace = chrome_trace.load(path)
    kernels = trace.kernels[trace.kernels.step >= 0]
    starts = (kernels.start_ns - kernels.start_ns.min()) / 1e3
    launches = sorted(set((starts - kernels.launch_delay_ns / 1e3).round(1)))
    busy = round(100 * trace.device_busy_ns() / sum(trace.step_ns()), 1)
    return {
        "launches": [launch / 1e3 for launch in launches if 0 <= launch <= WINDOW_US],
        "gpu": [
            [start / 1e3, us / 1e3]
            for start, us in zip(starts, kernels.duration_ns / 1e3, strict=True)
            if start <= WINDOW_US
        ],
        "step": [
            round(median(trace.step_ns()) / 1e6, 2),
            int(median(kernels.groupby("step").size())),
            busy,
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
        if row.flops:
            points[row.name.removeprefix("aten::")] = (
                row.flops / row.bytes,
                row.flops / row.seconds / 1e12,
            )
    figure, roof = _under_the_roof(path, device, compute, points)
    step = f"a step of {run['version']} at {run['training']['preset']} in {compute}"
    figure.suptitle(
        f"The longest operators of {step}, measured on one {device}, under the roof of its data sheet"
    )
    said = [
        f"{name} {format_number(reached)} TFLOP/s at {format_number(at)} FLOP/byte"
        for name, (at, reached) in points.items()
    ]
    description = f"Roofline of one {device} with operators of {step}: {', '.join(said[:4])}"
    return Picture(f"roofline-{path.parent.name}", [*roof, points], description, figure)


def decoding(*paths: Path) -> Picture:
    """The prefill and the decode steps of records under their data sheet's roof, which they meet at
    its two ends.
    """
    points: dict[str, tuple[float, float]] = {}
    for path in paths:
        run = files.read(path, Decoding)
        how = f"{run['operations']}, {run['mode']}"
        prefill = run["prefill_flops"] / run["prefill_ms"]["median"] / 1e9
        points |= {f"prefill, {how}": (run["prefill_intensity"], prefill)}
        points |= {
            f"decode, {how}": (
                run["token_intensity"],
                run["token_intensity"] * run["bytes_per_second"] / 1e12,
            )
        }
    device = run_facts.device(run)
    figure, roof = _under_the_roof(path, device, run["precision"]["compute"], points)
    text = f"a prompt of {run['prompt_tokens']} tokens, and one token at a time after it, at {run['preset']}"
    figure.suptitle(f"Two ends of the roof of one {device}: {text}")
    said = [f"{name} {format_number(reached)}" for name, (_, reached) in points.items()]
    return Picture(
        "roofline-decoding",
        [*roof, points],
        f"Roofline of one {device}, TFLOP/s: {'; '.join(said)}",
        figure,
    )


def _under_the_roof(
    path: Path, device: str, compute: str, points: dict[str, tuple[float, float]]
) -> tuple[Figure, tuple[float, float]]:
    """A roofline with points (FLOP/byte, TFLOP/s), and the roof's TFLOP/s and TB/s. UsageError: the
    data sheet is not known.
    """
    known = peaks.datasheet(device)
    if not known:
        raise UsageError(f"{path}: the data sheet of {device} is not in tracepage/cost/peaks.py")
    peak = known[compute] / 1e12
    rate = known["bandwidth"] / 1e12
    figure = plots.new(WIDTH, 4.2)
    axes = figure.subplots()
    ridge = peak / rate
    low = min(at for at, _ in points.values()) / 2.5
    high = 60 * peak / rate
    bottom = min(reached for _, reached in points.values()) / 10
    top = 5 * peak
    axes.fill_between([low, ridge], bottom, top, color=plots.SKY, alpha=0.12, linewidth=0)
    axes.fill_between([ridge, high], bottom, top, color=plots.ORANGE, alpha=0.12, linewidth=0)
    axes.plot([low, ridge, high], [low * rate, peak, peak], color=plots.BLACK)
    axes.text(
        low * 1.2,
        top / 1.4,
        f"memory-bound\nroof: intensity x {format_number(rate)} TB/s",
        va="top",
    )
    axes.text(
        high / 1.2,
        top / 1.4,
        f"compute-bound\nroof: {format_number(peak)} TFLOP/s",
        ha="right",
        va="top",
    )
    axes.text(
        ridge / 1.2, bottom * 1.4, f"ridge point\n{format_number(ridge)} FLOP/byte", ha="right"
    )
    for number, (name, point) in enumerate(points.items()):
        axes.plot(
            *point,
            color=COLOURS[number % 7],
            marker=plots.MARKERS[number // 7],
            linestyle="",
            label=name,
        )
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, top))
    axes.set(xlabel="arithmetic intensity, FLOP/byte", ylabel="TFLOP/s")
    figure.legend(loc="outside right center")
    return figure, (peak, rate)
