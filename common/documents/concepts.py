"""The pictures of CONCEPTS.md and its table of a GPU's sizes.

The pictures are a roofline, the timelines of a step that waits and of one that is busy, and the tiles of attention.
"""

import re
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from common.analysis.formulas import flops
from common.analysis.formulas.peaks import datasheet
from common.analysis.output import plots, run_facts, tables
from common.analysis.profiles import communication
from common.analysis.profiles.json_elements import elements
from common.analysis.reports import bandwidth as traffic
from common.config import ModelConfig
from common.documents.pictures import SPANS, WIDTH, Picture, colour, described, gpu_trace
from common.documents.result_tables import cases
from common.errors import UsageError
from common.records import step_profile

import numpy as np
import pandas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMED = {  # the operators of the roofline with a label, and its place in points from the dot
    "mm (mlp)": (7, -7), "mm (attention)": (-7, -9), "bmm (attention)": (-6, -11), "_softmax (attention)": (7, -7),
    "silu_backward (mlp)": (-8, 4), "mul (norm)": (3, -15), "sum (attention)": (7, -5), "mean (norm)": (8, -4),
}  # fmt: skip
WINDOW_US = 3000.0  # of each timeline
LENGTH, TILE = 512, 64  # positions of the attention that is drawn, and of a side of its tiles
VERSION = re.compile(r"v\d+")
CHIP = {  # what a trace says of its GPU: key, label, and units in one of the label's
    "numSms": ("multiprocessors (SM, CU)", 1),
    "warpSize": ("threads of a warp", 1),
    "maxThreadsPerMultiprocessor": ("threads that a multiprocessor holds at most", 1),
    "regsPerMultiprocessor": ("32-bit registers of a multiprocessor", 1),
    "sharedMemPerMultiprocessor": ("shared memory of a multiprocessor, KiB", 2**10),
    "totalGlobalMem": ("HBM, GiB", 2**30),
}


def roofline(folder: Path, path: Path) -> Picture:
    """A profile's operators under its data sheet's roof, and the MFU of the folder's bf16 steps. UsageError: none is listed."""
    profile = step_profile.read(path)
    run = profile["run"]
    compute, device, size = run["precision"]["compute"], run_facts.device(run), run["training"]["preset"]
    peaks = datasheet(device)
    if not peaks:
        raise UsageError(f"{path}: the data sheet of {device} is not in common/analysis/formulas/peaks.py")
    peak, bandwidth = peaks[compute] / 1e12, peaks["bandwidth"] / 1e12
    points = {
        row.name.removeprefix("aten::"): (row.flops / row.bytes, row.flops / row.seconds / 1e12)
        for row in sorted(traffic.from_profile(profile)[0], key=lambda row: -row.seconds)[:24]
        if row.flops
    }
    shares = {}
    for case in cases(folder, "bf16"):
        work = flops.training_step(ModelConfig.model_validate(case.studies[0]["model"]), *case.shape)["total"]
        versions = filter(case.times, filter(VERSION.fullmatch, case.cells))
        shares[case.preset] = {name: 1e5 * work / median(case.times(name)) / peaks["bf16"] for name in versions}
    numbers = [(name, *map(tables.format_number, reversed(point))) for name, point in [*points.items()][:4]]
    description = (
        f"Roofline of one {device} in {compute} with the longest operators of a step of {run['version']} at {size}, measured: "
        f"{', '.join('{} {} TFLOP/s at {} FLOP/byte'.format(*each) for each in numbers)}. "
        f"MFU of whole steps in bf16: {described(shares, '%')}"
    )

    def draw() -> "Figure":
        figure = plots.new(WIDTH, 4.2)
        left, right = figure.subplots(1, 2, width_ratios=[1.7, 1])
        left.set_title(f"{run['version']} at {size} in {compute}: measured operators")
        _roof(left, peak, bandwidth, points)
        for column, each in enumerate(shares.values()):
            for number, (name, share) in enumerate(each.items()):
                place = column + 0.18 * (number - (len(each) - 1) / 2)
                right.plot(place, share, "s", color=colour(name), markersize=7, label=None if column else name)
        right.set_xticks(range(len(shares)), list(shares))
        right.set(xlim=(-0.6, len(shares) - 0.4), ylim=(0, 100), ylabel="MFU, %", title="Whole steps in bf16")
        right.grid(True, axis="y", color="0.9")
        right.legend(loc="upper left")
        figure.suptitle(f"Measured on one {device}, under the roof of its data sheet")
        return figure

    return Picture(f"roofline-{folder.name}", [peak, bandwidth, points, shares], description, draw)


def _roof(axes: "Axes", peak: float, bandwidth: float, points: dict[str, tuple[float, float]]) -> None:
    """The roof and its two regions, and a dot for each operator in its span's colour; some are named."""
    at = [intensity for intensity, _ in points.values()]
    ridge, low, high = peak / bandwidth, min(at) / 2.5, 6 * max(*at, peak / bandwidth)
    bottom, top = min(rate for _, rate in points.values()) / 10, 5 * peak
    axes.fill_between([low, ridge], bottom, top, color=plots.SKY, alpha=0.12, linewidth=0)
    axes.fill_between([ridge, high], bottom, top, color=plots.ORANGE, alpha=0.12, linewidth=0)
    axes.plot([low, ridge, high], [low * bandwidth, peak, peak], color=plots.BLACK)
    numbers = [tables.format_number(number) for number in (bandwidth, peak, ridge)]
    axes.text(low * 1.2, top / 1.4, f"memory-bound\nroof: intensity x {numbers[0]} TB/s", va="top")
    axes.text(high / 1.2, top / 1.4, f"compute-bound\nroof: {numbers[1]} TFLOP/s", ha="right", va="top")
    axes.text(ridge / 1.2, bottom * 1.4, f"ridge point\n{numbers[2]} FLOP/byte", ha="right")
    axes.axvline(ridge, color="0.5", linestyle=":", linewidth=1)
    for span, shade in {**SPANS, "residual": plots.BLACK}.items():
        if inside := [point for name, point in points.items() if name.endswith(f"({span})")]:
            axes.plot(*zip(*inside, strict=True), "o", color=shade, markeredgecolor="0.3", label=span)
    for name, place in NAMED.items():
        if name in points:
            text, side = name.partition(" ")[0].strip("_"), "left" if place[0] > 0 else "right"
            axes.annotate(text, points[name], place, textcoords="offset points", ha=side)
    axes.legend(loc="lower right")
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, top))
    axes.set(xlabel="arithmetic intensity, FLOP/byte", ylabel="TFLOP/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")  # an exponent would be small


def chip(path: Path) -> str:
    """A row per size of the GPU that a trace was recorded on, as the trace gives it."""
    device = _device(path)
    return tables.markdown(["", device["name"]], [[label, device[key] / unit] for key, (label, unit) in CHIP.items()])


def _device(path: Path) -> dict[str, Any]:
    """The properties of the first GPU of a trace. UsageError: the trace names none."""
    missing = "is not a trace of a GPU (it has no deviceProperties): give a trace_*.json of a GPU"
    for found in elements(path, "deviceProperties", missing):
        return found
    raise UsageError(f"{path} {missing}")


def timeline(*paths: Path) -> Picture:
    """The first milliseconds of profiled steps on the GPU, a panel for each trace: launches of the host above, kernels below."""
    device = _device(paths[0])["name"]
    panels = {path.name.split(".")[0].replace("_", ", "): _window(path) for path in paths}
    busy = {name: f"the GPU is busy {tables.format_number(panel['busy'])}% of it" for name, panel in panels.items()}
    said = [f"{name}: a step has {panel['kernels']:,} kernels and copies; {busy[name]}" for name, panel in panels.items()]
    description = f"Launches of the host and kernels of one {device} over {WINDOW_US / 1e3:g} ms. {'; '.join(said)}"

    def draw() -> "Figure":
        figure = plots.new(WIDTH, 0.6 + 1.5 * len(panels))
        for axes, (name, panel) in zip(figure.subplots(len(panels), 1, squeeze=False).flat, panels.items(), strict=True):
            for row, (place, shade) in enumerate((("gpu", plots.VERMILION), ("host", plots.SKY))):
                intervals = [(start / 1e3, length / 1e3) for start, length in panel[place]]
                axes.broken_barh(intervals, (row - 0.35, 0.7), color=shade, linewidth=0)
            axes.vlines([launch / 1e3 for launch in panel["launches"]], 0.65, 1.35, color=plots.BLACK, linewidth=0.5)
            if not panel["launches"]:
                ahead = f"no launch: the host launched these steps before, the first {panel['delay_us'] / 1e3:.1f} ms ahead"
                axes.text(WINDOW_US / 2e3, 1, ahead, ha="center", va="center")
            axes.set_yticks([0, 1], ["GPU: kernels", "host: operators\nand launches (|)"])
            axes.set(xlim=(0, WINDOW_US / 1e3), ylim=(-0.5, 1.5))
            step = f"{panel['kernels']:,} kernels and copies in {tables.format_number(panel['step_ms'])} ms"
            axes.set_title(f"{name}: a step has {step}; {busy[name]}")
        axes.set_xlabel("ms")
        figure.suptitle(f"Two profiled steps on one {device}: waiting for the host, and busy")
        return figure

    return Picture(f"timeline-{paths[0].parents[1].name}", panels, description, draw)


def _window(path: Path) -> dict[str, Any]:
    """The content of a trace's timeline, in us from the first kernel of the profiled steps.

    It has launches (their starts), host and gpu (intervals in which an operator or a kernel runs), delay_us (from the launch of
    the first kernel to its start), and of a median step kernels (with copies and fills), step_ms and busy (%).
    """
    trace, kernels = gpu_trace(path)
    first = kernels.sort_values("start_us").iloc[0]
    launches = sorted(set((kernels.start_us - kernels.launch_delay_us - first.start_us).round(1)))
    return {
        "launches": [launch for launch in launches if 0 <= launch <= WINDOW_US],
        "host": _covered(trace.operators.start_us - first.start_us, trace.operators.cpu_us),
        "gpu": _covered(trace.kernels.start_us - first.start_us, trace.kernels.duration_us),
        "delay_us": round(float(first.launch_delay_us), 1),
        "kernels": int(median(kernels.groupby("step").size())),
        "step_ms": round(median(trace.step_us()) / 1e3, 3),
        "busy": round(100 * trace.device_busy_us() / sum(trace.step_us()), 1),
    }


def _covered(starts: pandas.Series, durations: pandas.Series) -> list[list[float]]:
    """[start, length] of each interval of the window that one or more events cover."""
    seen = zip(starts.clip(lower=0.0), (starts + durations).clip(upper=WINDOW_US), strict=True)
    return [[round(start, 1), round(end - start, 1)] for start, end in communication.union(seen)]


def causal_tiles() -> Picture:
    """The scores of causal attention in tiles: those that a flash kernel skips, computes, and computes with a mask."""
    first = np.arange(0, LENGTH, TILE)
    last = first + TILE - 1
    skipped, masked = first > last[:, None], last > first[:, None]  # [query, key]
    kinds = np.where(skipped, 2, np.where(masked, 1, 0))
    counts = dict(zip(("whole", "masked", "skipped"), np.bincount(kinds.flat).tolist(), strict=True))
    description = (
        f"The {LENGTH} x {LENGTH} scores of causal attention in tiles of {TILE} x {TILE}. A flash kernel computes "
        f"{counts['whole']} tiles below the diagonal and {counts['masked']} with a mask on it, and skips {counts['skipped']} "
        "above it. Eager attention computes all of them and writes them to memory"
    )

    def draw() -> "Figure":
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch

        figure = plots.new(WIDTH, 4.2)
        eager, flash = figure.subplots(1, 2)
        colours, edges = [plots.GREEN, plots.ORANGE, "white"], np.arange(0, LENGTH + 1, TILE)
        hatched: dict[str, Any] = {"facecolor": "none", "edgecolor": "0.2", "hatch": "//"}
        eager.set_facecolor(plots.GREEN)
        eager.fill([0, LENGTH, LENGTH], [0, 0, LENGTH], linewidth=0, **hatched)
        flash.pcolormesh(edges, edges, kinds, cmap=ListedColormap(colours), edgecolor="0.4", linewidth=0.7)
        for axes in (eager, flash):
            axes.set(xlim=(0, LENGTH), ylim=(LENGTH, 0), aspect="equal", xlabel="key position", ylabel="query position")
            axes.set(xticks=edges[::2], yticks=edges[::2])
        eager.set_title("Eager: every score is written to memory")
        flash.set_title(f"Flash: {counts['whole'] + counts['masked']} of {kinds.size} tiles, kept on chip")
        labels = ("computed", "computed with a mask", "skipped")
        handles = [Patch(facecolor=shade, edgecolor="0.4", label=label) for shade, label in zip(colours, labels, strict=True)]
        handles.append(Patch(label="computed, then masked out", **hatched))
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
        return figure

    return Picture("causal-tiles", [LENGTH, TILE, counts], description, draw)
