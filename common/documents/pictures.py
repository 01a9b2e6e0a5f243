"""The measured pictures of the documents: SVG files in pictures/, drawn from the files in results/ that their marker names.

Versions of matplotlib draw the same figure with different bytes. So a picture holds a digest of the numbers that it shows, and is
out of date when these numbers have changed.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common import files
from common.analysis.formulas import footprint, peaks
from common.analysis.output import plots, run_facts
from common.analysis.output.tables import format_number
from common.analysis.profiles import chrome_trace, kernel_names
from common.analysis.reports import bandwidth, kernel_benchmark
from common.config import ModelConfig
from common.documents import versions
from common.errors import UsageError
from common.records import step_profile

import pandas

COLOURS = (plots.ORANGE, plots.SKY, plots.BLUE, plots.GREEN, plots.PURPLE, plots.VERMILION, plots.BLACK)
GIB = 2**30
WIDTH = 9  # inches of a picture; with letters of 9 points, a slide of 1920 x 1080 shows none smaller than 18 points
WINDOW_US = 3000.0  # of each timeline
STYLE: dict[Any, Any] = {  # matplotlib's parameters
    "font.size": 9, "axes.titleweight": "normal", **dict.fromkeys(("axes.titlesize", "figure.titlesize"), 10),
    **dict.fromkeys(("axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 9),
    "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip
KINDS = ("matrix products", "attention", "reductions", "elementwise", "copies", "other")  # of kernels


class Picture(NamedTuple):
    """A picture: its numbers, a description for readers who cannot see it, and the function that draws it."""

    name: str
    numbers: Any  # as JSON holds them
    description: str
    draw: Callable[[], "plots.Figure"]

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.numbers).encode()).hexdigest()[:16]

    def svg(self) -> str:
        """The content of the SVG file."""
        import matplotlib

        with matplotlib.rc_context(STYLE):
            drawing = plots.svg(self.draw(), self.name, self.description)
        return drawing.replace("<svg ", f'<svg xmlns="http://www.w3.org/2000/svg" data-digest="{self.digest()}" ', 1) + "\n"

    def is_current(self, path: Path) -> bool:
        return path.is_file() and f'data-digest="{self.digest()}"' in path.read_text(encoding="utf-8")[:2000]


def ladder(folder: Path) -> Picture:
    """Speed by version and size: how many times faster than the first version all models are in bf16, a panel for each preset.

    A dot is the quotient of the medians, and a line its range over the processes.
    """
    found, models = versions.headline(folder)
    panels = {
        case.title(): {name: versions.ratio(case.times(models[0]), case.times(name)) for name in models if case.times(name)}
        for case in found
    }
    device = run_facts.device(found[0].studies[0])
    best = [(case.preset, case.fastest(), panels[case.title()][case.fastest()][0]) for case in found]
    said = ", ".join(f"{preset}: {name} {format_number(faster)}x" for preset, name, faster in best)
    description = f"Speed-up over {models[0]} of all versions and peers in bf16, one {device}. The fastest: {said}"

    def draw() -> "plots.Figure":
        figure = plots.new(WIDTH, 0.9 + 0.25 * len(models))
        places = figure.subplots(1, len(panels), sharey=True, squeeze=False).flat
        for axes, (title, panel) in zip(places, panels.items(), strict=True):
            for row, name in enumerate(models):
                if name in panel:
                    faster, *ends = panel[name]
                    axes.plot(ends, [row, row], color=colour(name), linewidth=2)
                    axes.plot(faster, row, "o", color=colour(name))
                    axes.annotate(f"{format_number(faster)}x", (ends[1], row), (4, -3), textcoords="offset points")
            axes.axvline(1, color="0.5", linestyle=":", linewidth=1, zorder=0)
            axes.grid(True, axis="y", color="0.92")
            axes.set_yticks(range(len(models)), models)
            axes.set_title(title.replace(", bf16, ", "\n"))
            axes.set(xlim=(0, 1.35 * axes.dataLim.xmax), ylim=(len(models) - 0.5, -0.5))
        figure.supxlabel(f"times as fast as {models[0]}; dot: medians, line: range over processes", fontsize=STYLE["font.size"])
        figure.suptitle(f"Speed-up of one training step over {models[0]}, bf16, one {device}")
        return figure

    return Picture(f"ladder-{folder.name}", panels, description, draw)


def colour(model: str) -> str:
    """One colour for each version, with and without torch.compile, and grey for the peers."""
    version = versions.VERSION.fullmatch(model)
    return COLOURS[(int(version[1]) - 1) % len(COLOURS)] if version else "0.7"


def held(config: ModelConfig, batch_size: int, sequence_length: int) -> dict[str, list[float]]:
    """Bytes that Version 1 holds under bf16 autocast on a GPU at four moments, by the formulas of `footprint`.

    The moments are before the step, after the forward pass, after the backward pass, and after AdamW, when the gradients are
    released. Between them the layers, all of one size, come and go one by one. Temporary tensors are not counted.
    """
    kept, stays = footprint.activations(config, batch_size, sequence_length, "cuda"), footprint.states(config)
    return {
        "weights": [stays["weights"]] * 4,
        "AdamW's moments": [stays["adamw"]] * 4,
        "gradients": [0, 0, stays["gradients"], 0],
        "other activations": [0, kept["total"] - kept["scores"], 0, 0],
        "scores [B, H, S, S]": [0, kept["scores"], 0, 0],
    }


def memory(folder: Path) -> Picture:
    """Memory over a step of the first version by formula, and its measured peak, at medium and large in bf16."""
    panels: dict[str, dict[str, Any]] = {}
    found, (model, *_) = versions.headline(folder)
    for case in (case for case in found if case.preset in ("medium", "large") and case.times(model)):
        peak = median(run["peak_mib"] for run in case.runs[model]) / 2**10
        areas = held(ModelConfig.model_validate(case.studies[0]["model"]), *case.shape)
        panels[case.title()] = {"peak": peak, "areas": {name: [size / GIB for size in sizes] for name, sizes in areas.items()}}
    device = run_facts.device(found[0].studies[0])
    said = []
    for title, panel in panels.items():
        sizes = [f"{name} {format_number(max(sizes))} GiB" for name, sizes in panel["areas"].items()]
        said.append(f"{title}: {', '.join(sizes)}, measured peak {format_number(panel['peak'])} GiB")
    description = f"Memory over one training step of {model} on one {device}, the most of each. {'; '.join(said)}"

    def draw() -> "plots.Figure":
        figure = plots.new(WIDTH, 3.9)
        for axes, (title, panel) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels.items(), strict=True):
            frame = pandas.DataFrame(panel["areas"], index=[0.0, 1.0, 2.0, 2.2])
            frame.plot.area(ax=axes, color=COLOURS[: len(frame.columns)], linewidth=0, legend=False)
            axes.axhline(panel["peak"], color=plots.BLACK, linestyle="--", linewidth=1, label="measured peak")
            axes.axvline(1, color="0.3", linestyle=":", linewidth=0.8)
            axes.set_xticks([0.5, 1.5, 2.2], ["forward,\nlayer by layer", "backward,\nlast layer first", "AdamW"])
            axes.set(xlim=(0, 2.2), ylim=(0, 1.1 * panel["peak"]), ylabel="GiB", title=f"{title} tokens")
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside right center")
        figure.suptitle(f"Memory over one step of {model}: areas by formula, the line measured on one {device}")
        return figure

    return Picture(f"memory-{folder.name}", panels, description, draw)


def gpu_trace(path: Path) -> tuple[chrome_trace.Trace, pandas.DataFrame]:
    """A trace, and the kernels of its profiled steps. UsageError: no kernel ran in a profiled step."""
    trace = chrome_trace.load(path)
    kernels = trace.kernels[trace.kernels.step >= 0]
    if kernels.empty:
        raise UsageError(f"{path} has no kernels of a GPU: give a trace_*.json of a GPU")
    return trace, kernels


def name_of(trace: Path) -> str:
    """A trace's file as a label: v2_compile_small.json.gz gives "v2, compile, small"."""
    return trace.name.split(".")[0].replace("_", ", ")


def kernels_by_version(*paths: Path) -> Picture:
    """The kernels and copies of a step and their time, by kind, a bar for each trace."""
    counts: dict[str, dict[str, int]] = {}
    times: dict[str, dict[str, float]] = {}
    for path in paths:
        _, kernels = gpu_trace(path)
        step = kernels[kernels.step == kernels.step.min()]
        by_kind = step.duration_us.groupby(step.name.map(kernel_names.kind))
        counts[name_of(path)] = by_kind.size().to_dict()
        times[name_of(path)] = by_kind.sum().round(1).to_dict()
    device = paths[0].parents[1].name.upper()
    said = [f"{name} {sum(kinds.values()):,} in {format_number(sum(times[name].values()))} us" for name, kinds in counts.items()]
    description = f"Kernels and copies of a step in bf16 on one {device}: {'; '.join(said)}"

    def draw() -> "plots.Figure":
        figure = plots.new(WIDTH, 1.2 + 0.5 * len(paths))
        panels = {"kernels and copies in a step": counts, "us of all of them": times}
        for axes, (title, panel) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
            frame = pandas.DataFrame(panel).T.reindex(columns=[*KINDS]).fillna(0)
            frame.plot.barh(ax=axes, stacked=True, color=COLOURS, legend=False, title=title)
            axes.bar_label(axes.containers[-1], [format_number(total) for total in frame.sum(axis=1)], padding=3)
            axes.set_xlim(0, 1.2 * frame.sum(axis=1).max())
        axes.invert_yaxis()
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(KINDS))
        figure.suptitle(f"Kernels of a step by version, bf16, one {device}")
        return figure

    return Picture(f"kernels-{paths[0].parents[1].name}", [counts, times], description, draw)


def timeline(*paths: Path) -> Picture:
    """The first milliseconds of profiled steps on the GPU, a panel for each trace: launches of the host above, kernels below."""
    panels, device = {name_of(path): _window(path) for path in paths}, paths[0].parents[1].name.upper()
    titles = [
        f"{name}: a step of {panel['step_ms']} ms has {panel['kernels']:,} kernels; the GPU is busy {panel['busy']}% of it"
        for name, panel in panels.items()
    ]
    description = f"Launches of the host and kernels of one {device} over {WINDOW_US / 1e3:g} ms. {'. '.join(titles)}"

    def draw() -> "plots.Figure":
        figure = plots.new(WIDTH, 0.6 + 1.4 * len(panels))
        places = figure.subplots(len(panels), 1, sharex=True, squeeze=False).flat
        for axes, title, panel in zip(places, titles, panels.values(), strict=True):
            axes.broken_barh(panel["gpu"], (-0.35, 0.7), color=plots.VERMILION, linewidth=0)
            axes.vlines(panel["launches"], 0.65, 1.35, color=plots.BLACK, linewidth=0.5)
            if not panel["launches"]:
                axes.text(WINDOW_US / 2e3, 1, "no launch: the host launched these steps before", ha="center", va="center")
            axes.set_yticks([0, 1], ["GPU: kernels", "host: launches"])
            axes.set(xlim=(0, WINDOW_US / 1e3), ylim=(-0.5, 1.5), title=title)
        axes.set_xlabel("ms")
        figure.suptitle(f"Profiled steps on one {device}: waiting for the host, and busy")
        return figure

    return Picture(f"timeline-{paths[0].parents[1].name}", panels, description, draw)


def _window(path: Path) -> dict[str, Any]:
    """The content of a trace's timeline, in ms from the first kernel of the profiled steps.

    It has launches (their starts), gpu ([start, length] of each kernel), and of a median step kernels (with copies and fills),
    step_ms and busy (%).
    """
    trace, kernels = gpu_trace(path)
    starts, first = kernels.start_us - kernels.start_us.min(), kernels.start_us.min()
    launches = sorted(set((kernels.start_us - kernels.launch_delay_us - first).round(1)))
    return {
        "launches": [launch / 1e3 for launch in launches if 0 <= launch <= WINDOW_US],
        "gpu": [[start / 1e3, us / 1e3] for start, us in zip(starts, kernels.duration_us, strict=True) if start <= WINDOW_US],
        "kernels": int(median(kernels.groupby("step").size())),
        "step_ms": round(median(trace.step_us()) / 1e3, 2),
        "busy": round(100 * trace.device_busy_us() / sum(trace.step_us()), 1),
    }


def roofline(path: Path) -> Picture:
    """A profile's longest operators under its data sheet's roof. UsageError: the data sheet is not known."""
    profile = step_profile.read(path)
    run = profile["run"]
    compute, device = run["precision"]["compute"], run_facts.device(run)
    known = peaks.datasheet(device)
    if not known:
        raise UsageError(f"{path}: the data sheet of {device} is not in common/analysis/formulas/peaks.py")
    peak, rate = known[compute] / 1e12, known["bandwidth"] / 1e12
    longest = sorted((row for row in bandwidth.from_profile(profile)[0] if row.flops), key=lambda row: -row.seconds)[:16]
    points = {row.name.removeprefix("aten::"): (row.flops / row.bytes, row.flops / row.seconds / 1e12) for row in longest}
    said = [f"{name} {format_number(reached)} TFLOP/s at {format_number(at)} FLOP/byte" for name, (at, reached) in points.items()]
    step = f"a step of {run['version']} at {run['training']['preset']} in {compute}"
    description = f"Roofline of one {device} with operators of {step}: {', '.join(said[:4])}"

    def draw() -> "plots.Figure":
        figure = plots.new(WIDTH, 4.2)
        axes = figure.subplots()
        ridge, low, high = peak / rate, min(at for at, _ in points.values()) / 2.5, 60 * peak / rate
        bottom, top = min(reached for _, reached in points.values()) / 10, 5 * peak
        axes.fill_between([low, ridge], bottom, top, color=plots.SKY, alpha=0.12, linewidth=0)
        axes.fill_between([ridge, high], bottom, top, color=plots.ORANGE, alpha=0.12, linewidth=0)
        axes.plot([low, ridge, high], [low * rate, peak, peak], color=plots.BLACK)
        axes.text(low * 1.2, top / 1.4, f"memory-bound\nroof: intensity x {format_number(rate)} TB/s", va="top")
        axes.text(high / 1.2, top / 1.4, f"compute-bound\nroof: {format_number(peak)} TFLOP/s", ha="right", va="top")
        axes.text(ridge / 1.2, bottom * 1.4, f"ridge point\n{format_number(ridge)} FLOP/byte", ha="right")
        axes.axvline(ridge, color="0.5", linestyle=":", linewidth=1)
        for number, (name, point) in enumerate(points.items()):
            axes.plot(*point, color=COLOURS[number % 7], marker=plots.MARKERS[number // 7], linestyle="", label=name)
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, top))
        axes.set(xlabel="arithmetic intensity, FLOP/byte", ylabel="TFLOP/s")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")  # an exponent would be small
        figure.legend(loc="outside right center")
        figure.suptitle(f"The longest operators of {step}, measured on one {device}, under the roof of its data sheet")
        return figure

    return Picture(f"roofline-{path.parent.name}", [peak, rate, points], description, draw)


def kernel_rates(path: Path) -> Picture:
    """The share of a copy's rate that each contender of a kernel benchmark reaches, at the largest shape.

    Every contender is given the bytes of the fused kernel, so what it moves beyond them lowers its share.
    """
    measured = files.read_json(path)
    size = max((row["sequence_length"], row["hidden_size"]) for row in measured["rows"])
    rows = [row for row in measured["rows"] if (row["sequence_length"], row["hidden_size"]) == size]
    shares: dict[str, dict[str, float]] = {}
    for row in sorted(rows, key=lambda row: row["contender"] == "kernel"):
        shares.setdefault(row["operation"], {})[row["contender"]] = round(kernel_benchmark.share(row, measured), 1)
    shape = f"{rows[0]['batch_size']} x {size[0]} tokens, D = {size[1]:,}"
    device = run_facts.device(measured)
    said = [f"{name}: {', '.join(f'{who} {share:.0f}%' for who, share in each.items())}" for name, each in shares.items()]
    description = f"Rate of each contender in % of a copy's; {shape}, one {device}. {'; '.join(said)}"

    def draw() -> "plots.Figure":
        figure = plots.new(WIDTH, 3)
        frame = pandas.DataFrame(shares).T
        axes = frame.plot.bar(ax=figure.subplots(), rot=0, width=0.8, legend=False, color=COLOURS[: len(frame.columns)])
        for bars in axes.containers:
            axes.bar_label(bars, fmt="%.0f", padding=2)
        axes.axhline(100, color="0.3", linestyle="--", linewidth=1, zorder=0)
        axes.set(ylabel="% of the rate of a copy", ylim=(0, 120))
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right center")
        figure.suptitle(f"Forward and backward, {shape}, {measured['precision']['compute']}, one {device}")
        return figure

    return Picture(f"kernel-rates-{path.parent.name}", shares, description, draw)
