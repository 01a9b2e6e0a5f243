"""The pictures of CONCEPTS.md and its table of a GPU's sizes.

The pictures are a roofline, the timelines of a step that waits and of one that is busy, and the tiles of attention.
"""

import re
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from common.analysis.formulas import flops, operators
from common.analysis.formulas.peaks import datasheet
from common.analysis.output import plots, run_facts, tables
from common.analysis.profiles.json_elements import elements
from common.config import ModelConfig
from common.documents.architecture import preset
from common.documents.pictures import Picture, colour, gpu_trace, shape, steps
from common.errors import UsageError

import numpy as np
import pandas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = "medium"  # the preset whose operations the roofline shows
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


# ------------------------------------------------------------------------------------------------------------------ roofline


def intensities(config: ModelConfig, batch_size: int, sequence_length: int) -> dict[str, float]:
    """FLOP/byte of operations of an eager forward pass under bf16 autocast on a GPU, and of AdamW, by formula.

    The residual stream, the softmax and AdamW are in float32, all other tensors in bf16.
    """
    tokens, hidden, ffn = batch_size * sequence_length, config.hidden_size, config.intermediate_size
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    wide, half = "float", "c10::BFloat16"
    keys, queries = [batch_size * heads, head_dim, sequence_length], [batch_size * heads, sequence_length, head_dim]
    calls: dict[str, tuple[str, list[Any], list[str]]] = {
        "residual addition": ("add", [[tokens, hidden]] * 2, [wide, half]),
        "AdamW": ("_fused_adamw_", [[[flops.parameters(config)["total"]]]], ["TensorList"]),
        "softmax": ("_softmax", [[batch_size, heads, sequence_length, sequence_length]], [wide]),
        "silu": ("silu", [[tokens, ffn]], [half]),
        "scores q k^T": ("bmm", [queries, keys], [half] * 2),
        "flash attention": (
            "_flash_attention_forward",
            [[batch_size, sequence_length, count, head_dim] for count in (heads, kv_heads, kv_heads)], [half] * 3,
        ),
        "K, V projections": ("mm", [[tokens, hidden], [hidden, kv_heads * head_dim]], [half] * 2),
        "Q, output projections": ("mm", [[tokens, hidden], [hidden, hidden]], [half] * 2),
        "feed-forward projections": ("mm", [[tokens, hidden], [hidden, ffn]], [half] * 2),
    }  # fmt: skip
    found = {}
    for name, (operator, shapes, types) in calls.items():
        cost = operators.cost(f"aten::{operator}", shapes, types)
        assert cost, name  # every operator above has a formula
        found[name] = cost[0] / cost[1]
    return found


def roofline(folder: Path) -> Picture:
    """The data sheet's roof in bf16 with operations by formula, and the rates that steps reach, from peaks_<preset>_bf16.json.

    Raises:
        UsageError: the data sheet of the device is not in `peaks`.
    """
    rates = {}
    for name, study, times in steps(folder):
        work = flops.training_step(ModelConfig.model_validate(study["model"]), *shape(study))["total"]
        rates[name] = {model: work / ms / 1e9 for model, ms in times.items() if VERSION.fullmatch(model)}  # TFLOP/s
    device = run_facts.device(study)
    peaks = datasheet(device)
    if not peaks:
        raise UsageError(f"{folder}: the data sheet of {device} is not in common/analysis/formulas/peaks.py")
    peak, bandwidth = peaks["bf16"] / 1e12, peaks["bandwidth"] / 1e12
    intensity = intensities(*preset(SHOWN))
    memory, compute = ([name for name in intensity if (intensity[name] < peak / bandwidth) == side] for side in (True, False))
    edges = {
        name: [tables.format_number(100 * edge(each.values()) / peak) for edge in (min, max)] for name, each in rates.items()
    }
    description = (
        f"Roofline of one {device} in bf16 with the operations of a layer; memory-bound: {', '.join(memory)}; compute-bound: "
        f"{', '.join(compute)}. Of the peak, whole steps of the versions reach: "
        f"{', '.join(f'{name} {low} to {high}%' for name, (low, high) in edges.items())}"
    )

    def draw() -> "Figure":
        figure = plots.new(11, 5)
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[2.3, 1])
        _roof(left, peak, bandwidth, intensity)
        _steps(right, peak, rates)
        figure.suptitle(f"What the data sheet of one {device} allows in bf16, and what training steps reach")
        return figure

    return Picture(f"roofline-{folder.name}", [peak, bandwidth, intensity, rates], description, draw)


def _roof(axes: "Axes", peak: float, bandwidth: float, work: dict[str, float]) -> None:
    ridge, low, high = peak / bandwidth, min(work.values()) / 30, 60 * max(work.values())
    axes.fill_between([low, ridge], 1e-3, 4 * peak, color=plots.SKY, alpha=0.12, linewidth=0)
    axes.fill_between([ridge, high], 1e-3, 4 * peak, color=plots.ORANGE, alpha=0.12, linewidth=0)
    axes.plot([low, ridge, high], [low * bandwidth, peak, peak], color=plots.BLACK)
    numbers = [tables.format_number(number) for number in (bandwidth, peak, ridge)]
    axes.text(low * 1.3, 2 * peak, f"memory-bound\nroof: intensity x {numbers[0]} TB/s", va="center")
    axes.text(high / 1.2, 2 * peak, f"compute-bound\nroof: {numbers[1]} TFLOP/s", va="center", ha="right")
    axes.annotate(f"ridge point\n{numbers[2]} FLOP/byte", (ridge, 0.45), (-4, 0), textcoords="offset points", ha="right")
    axes.axvline(ridge, color="0.5", linestyle=":", linewidth=1)
    under_flat, before = 3.0 ** sum(intensity >= ridge for intensity in work.values()), 0.0
    for name, intensity in sorted(work.items(), key=lambda item: item[1]):
        height, near = min(peak, intensity * bandwidth), intensity < 1.8 * before
        axes.plot(intensity, height, "o", color=plots.VERMILION)
        place, side = ((8, -8), "left") if near else ((-8, 2), "right")
        if intensity >= ridge:  # labels in steps, so that none is on the line of another
            axes.vlines(intensity, peak / under_flat, peak, color=plots.VERMILION, linewidth=0.7)
            height, place, side = peak / under_flat, (3, 0), "left"
            under_flat /= 3
        axes.annotate(name, (intensity, height), place, textcoords="offset points", ha=side)
        before = intensity
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(0.3, 4 * peak))
    axes.set(xlabel="arithmetic intensity, FLOP/byte", ylabel="TFLOP/s", title=f"Operations at {SHOWN}: highest rate by formula")


def _steps(axes: "Axes", peak: float, rates: dict[str, dict[str, float]]) -> None:
    for column, each in enumerate(rates.values()):
        for number, (name, rate) in enumerate(each.items()):
            place = column + 0.18 * (number - (len(each) - 1) / 2)
            axes.plot(place, rate, "s", color=colour(name), markersize=7, label=None if column else name)
    axes.axhline(peak, color=plots.BLACK)
    axes.set_xticks(range(len(rates)), list(rates))
    axes.set_xlim(-0.6, len(rates) - 0.4)
    axes.grid(True, axis="y", color="0.9")
    shares = axes.secondary_yaxis("right", functions=(partial(np.multiply, 100 / peak), partial(np.multiply, peak / 100)))
    shares.set_ylabel("MFU, %")
    shares.yaxis.set_major_formatter("{x:g}")
    axes.legend(loc="lower right")
    axes.set_title("Whole steps: measured rate")


# ----------------------------------------------------------------------------------------------------------------- timelines


def chip(path: Path) -> str:
    """A row per size of the GPU that a trace was recorded on, as the trace gives it."""
    device = _device(path)
    return tables.markdown(["", device["name"]], [[label, device[key] / unit] for key, (label, unit) in CHIP.items()])


def _device(path: Path) -> dict[str, Any]:
    """The properties of the first GPU of a trace.

    Raises:
        UsageError: the trace names none.
    """
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
        figure = plots.new(11, 0.6 + 1.5 * len(panels))
        for axes, (name, panel) in zip(figure.subplots(len(panels), 1, squeeze=False).flat, panels.items(), strict=True):
            _rows(axes, panel)
            step = f"{panel['kernels']:,} kernels and copies in {tables.format_number(panel['step_ms'])} ms"
            axes.set_title(f"{name}: a step has {step}; {busy[name]}")
        axes.set_xlabel("ms")
        figure.suptitle(f"Two profiled steps on one {device}: waiting for the host, and busy")
        return figure

    return Picture(f"timeline-{paths[0].parents[1].name}", panels, description, draw)


def _window(path: Path) -> dict[str, Any]:
    """The content of a trace's timeline, in us from the first kernel of the profiled steps.

    Returns:
        launches (their starts), host and gpu (intervals in which an operator or a kernel runs), delay_us (from the launch of
        the first kernel to its start), and of a median step kernels (with copies and fills), step_ms and busy (%).

    Raises:
        UsageError: no kernel ran in a profiled step.
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
    covered: list[list[float]] = []
    for start, end in sorted(zip(starts, starts + durations, strict=True)):
        start, end = max(0.0, start), min(WINDOW_US, end)
        if covered and start <= sum(covered[-1]):
            covered[-1][1] = max(covered[-1][1], end - covered[-1][0])
        elif start < end:
            covered.append([start, end - start])
    return [[round(number, 1) for number in interval] for interval in covered]


def _rows(axes: "Axes", panel: dict[str, Any]) -> None:
    for row, (name, shade) in enumerate((("gpu", plots.VERMILION), ("host", plots.SKY))):
        intervals = [(start / 1e3, length / 1e3) for start, length in panel[name]]
        axes.broken_barh(intervals, (row - 0.35, 0.7), color=shade, linewidth=0)
    axes.vlines([launch / 1e3 for launch in panel["launches"]], 0.65, 1.35, color=plots.BLACK, linewidth=0.5)
    if not panel["launches"]:
        ahead = f"no launch: the host launched these steps before, the first {panel['delay_us'] / 1e3:.1f} ms ahead"
        axes.text(WINDOW_US / 2e3, 1, ahead, ha="center", va="center")
    axes.set_yticks([0, 1], ["GPU: kernels", "host: operators\nand launches (|)"])
    axes.set(xlim=(0, WINDOW_US / 1e3), ylim=(-0.5, 1.5))


# ----------------------------------------------------------------------------------------------------------- attention tiles


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

        figure = plots.new(9, 4.7)
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
