"""Pictures in the documents: SVG files in pictures/, drawn from the files in results/ that their marker names.

Versions of matplotlib draw the same figure with different bytes. So a picture holds a digest of the numbers that it shows, and is
out of date when these numbers have changed.
"""

import hashlib
import json
import re
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from common.analysis.comparisons import ablation_effects
from common.analysis.formulas import flops, footprint
from common.analysis.output import plots, tables
from common.analysis.profiles import chrome_trace, kernel_names
from common.analysis.reports import kernel_benchmark
from common.config import ModelConfig
from common.documents import architecture
from common.documents.result_tables import IDLE, find, span_shares
from common.errors import UsageError
from common.records import benchmark_file, kernel_benchmark_file, scaling_file
from common.studies.scaling import scaling_results

import pandas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = ("medium", "large")  # the presets whose memory is shown
GIB = 2**30
HELD = {  # what holds memory in a step
    "weights": plots.BLUE, "AdamW's moments": plots.SKY, "scores [B, H, S, S]": plots.ORANGE, "other activations": plots.GREEN,
    "gradients": plots.VERMILION,
}  # fmt: skip
SPANS = {
    "attention": plots.SKY, "mlp": plots.ORANGE, "norm": plots.PURPLE, "loss": plots.GREEN, "optimizer": plots.VERMILION,
    "other": "0.6", IDLE: "0.88",
}  # fmt: skip
KINDS = {
    "matrix products": plots.BLUE, "attention": plots.GREEN, "reductions": plots.PURPLE, "elementwise": plots.ORANGE,
    "copies": plots.VERMILION, "other": "0.6",
}  # fmt: skip


class Picture(NamedTuple):
    """A picture: its numbers, a description for readers who cannot see it, and the function that draws it."""

    name: str
    numbers: Any  # as JSON holds them
    description: str
    draw: Callable[[], "Figure"]

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.numbers).encode()).hexdigest()[:16]

    def drawn(self) -> str:
        """The content of the SVG file."""
        drawing = plots.svg(self.draw(), self.name, self.description)
        return drawing.replace("<svg ", f'<svg xmlns="http://www.w3.org/2000/svg" data-digest="{self.digest()}" ', 1) + "\n"

    def is_current(self, path: Path) -> bool:
        return path.is_file() and f'data-digest="{self.digest()}"' in path.read_text(encoding="utf-8")[:2000]


def ladder(folder: Path) -> Picture:
    """The step time of every version and peer in bf16, a panel for each preset, from peers_<preset>_bf16.json."""
    panels = {}
    for preset, precision, path in find(folder, "peers_{preset}_{precision}.json"):
        if precision == "bf16":
            study = benchmark_file.read(path)
            times = {c["model"]: [run["step_ms"]["median"] for run in c["runs"]] for c in study["cells"] if c["status"] == "ok"}
            panels[f"{preset}, {study['batch_sizes'][0]} x {study['sequence_lengths'][0]} tokens"] = {
                model: median(runs) for model, runs in times.items()
            }
    best = [f"{title.split(',')[0]} {tables.format_number(min(times.values()))} ms" for title, times in panels.items()]
    device = study["device"]["name"]
    description = f"Step time of all versions and peers on one {device} in bf16; the fastest of each preset: {', '.join(best)}"

    def draw() -> "Figure":
        figure = plots.new(11, 1.0 + 0.3 * max(map(len, panels.values())) * -(-len(panels) // 2))
        figure.suptitle(f"One training step, ms (logarithmic), bf16, one {device}", fontsize=11)
        grid = figure.subplots(-(-len(panels) // 2), 2, squeeze=False).flat
        for axes, (title, times) in zip(grid, panels.items(), strict=False):
            names = sorted(times, key=times.get, reverse=True)
            colours = [colour(name) for name in names]
            bars = axes.barh(names, [times[name] for name in names], color=colours)
            axes.bar_label(bars, [tables.format_number(times[name]) for name in names], padding=3, fontsize=8)
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter("")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set_xlim(min(times.values()) / 2, 2.2 * max(times.values()))
            axes.set_title(title, fontsize=10)
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
        return figure

    return Picture(f"ladder-{folder.name}", panels, description, draw)


def colour(model: str) -> str:
    """One colour for each version, with and without torch.compile, and grey for the peers."""
    version = re.fullmatch(r"v(\d+)(-.*)?", model)
    return (plots.ORANGE, plots.SKY, plots.BLUE, plots.GREEN)[int(version[1]) - 1] if version else "0.7"


# ------------------------------------------------------------------------------------------------------------------- memory


def held(config: ModelConfig, batch_size: int, sequence_length: int) -> dict[str, list[float]]:
    """Bytes of each of HELD over one step of Version 1 under bf16 autocast on a GPU, by the formulas of `footprint`.

    The moments are before the step, after the embedding, after each layer forward, after the loss, and then after each of them
    backward, the loss first; the last is after AdamW, when the gradients are released. Temporary tensors are not counted.
    """
    kept = footprint.activations(config, batch_size, sequence_length, "cuda")
    stays, counted = footprint.states(config), flops.parameters(config)
    ends = kept["embed"], kept["loss"] + kept["norm"] / (2 * config.num_layers + 1)  # the last norm belongs to no layer
    layer = (kept["total"] - kept["scores"] - sum(ends)) / config.num_layers
    scores = kept["scores"] / config.num_layers
    forward = [(0.0, ends[0]), *[(scores, layer)] * config.num_layers, (0.0, ends[1])]
    both = [(0.0, 0.0), *forward, *((-first, -second) for first, second in reversed(forward)), (0.0, 0.0)]
    tied = footprint.FLOAT * counted["embedding"]  # the head is the embedding
    written = [tied, *[(stays["gradients"] - tied) / config.num_layers] * config.num_layers, 0.0]
    gradients = [0.0] * (len(forward) + 1) + list(accumulate(written)) + [0.0]
    constant = {"weights": stays["weights"], "AdamW's moments": stays["adamw"]}
    areas = {name: [float(value)] * len(both) for name, value in constant.items()}
    for name, column in (("scores [B, H, S, S]", 0), ("other activations", 1)):
        areas[name] = list(accumulate(step[column] for step in both))
    return areas | {"gradients": gradients}


def memory(folder: Path) -> Picture:
    """Memory over a step of the first version by formula, and its measured peak, from peers_<preset>_bf16.json."""
    panels, said = {}, []
    for name, _, path in find(folder, "peers_{preset}_bf16.json"):
        if name in SHOWN:
            study = benchmark_file.read(path)
            config, shape = ModelConfig(**study["model"]), (study["batch_sizes"][0], study["sequence_lengths"][0])
            first = next(cell for cell in study["cells"] if cell["status"] == "ok")
            peak = median(run["peak_mib"] for run in first["runs"]) / 2**10
            areas = held(config, *shape)
            panels[name] = {"shape": shape, "peak": peak, "model": first["model"], "areas": areas}
            kept = footprint.activations(config, *shape, "cuda")
            stays = {"weights": areas["weights"][0], "AdamW's moments": areas["AdamW's moments"][0]}
            stays |= {"gradients": max(areas["gradients"]), "activations": kept["total"]}
            sizes = ", ".join(f"{part} {tables.format_number(size / GIB)} GiB" for part, size in stays.items())
            share = tables.format_number(100 * kept["scores"] / kept["total"])
            said.append(f"{name}: {sizes} (of them scores {share}%), measured peak {tables.format_number(peak)} GiB")
    device = study["device"]["name"]
    description = f"Memory over one training step of {first['model']} in bf16, by formula. {'; '.join(said)} on one {device}"

    def draw() -> "Figure":
        figure = plots.new(11, 3.8)
        for axes, (name, panel) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels.items(), strict=True):
            _areas(axes, panel)
            axes.set_title(f"{name}, {' x '.join(map(str, panel['shape']))} tokens", fontsize=10)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside right center", fontsize=8)
        title = f"Memory over one step of {first['model']} in bf16: areas by formula, the line measured on one {device}"
        figure.suptitle(title, fontsize=11)
        return figure

    return Picture(f"memory-{folder.name}", panels, description, draw)


def _areas(axes: "Axes", panel: dict[str, Any]) -> None:
    moments = range(len(panel["areas"]["weights"]))
    areas = [[size / GIB for size in panel["areas"][name]] for name in HELD]
    axes.stackplot(moments, areas, labels=list(HELD), colors=list(HELD.values()), linewidth=0)
    axes.axhline(panel["peak"], color=plots.BLACK, linestyle="--", linewidth=1, label="measured peak")
    turn = len(moments) / 2 - 1
    axes.axvline(turn, color="0.3", linestyle=":", linewidth=0.8)
    axes.set_xticks([turn / 2, 1.5 * turn, moments[-1]], ["forward,\nlayer by layer", "backward,\nlast layer first", "AdamW"])
    axes.tick_params(labelsize=8)
    axes.set_ylabel("GiB", fontsize=9)
    axes.set(xlim=(0, moments[-1]), ylim=(0, 1.1 * panel["peak"]))
    axes.spines[["top", "right"]].set_visible(False)


# ------------------------------------------------------------------------------------------------------------------ kernels


def step_spans(*folders: Path) -> Picture:
    """The share of each span in a profiled step of Version 1, a bar for each run that has a profile."""
    panels = {}
    for run, shares in span_shares(*folders).items():
        panels[run] = {span: round(shares[span], 1) for span in SPANS if span in shares and span != "other"}
        panels[run]["other"] = round(sum(shares.values()) - sum(panels[run].values()), 1)
    said = [
        f"{run}: {', '.join(f'{span} {tables.format_number(share)}%' for span, share in shares.items())}"
        for run, shares in panels.items()
    ]
    description = f"Where a profiled step of Version 1 goes, by span, in % of its time. {'; '.join(said)}"

    def draw() -> "Figure":
        figure = plots.new(11, 0.9 + 0.42 * len(panels))
        axes = figure.add_subplot()
        for run, shares in panels.items():
            begin = 0.0
            for span in SPANS:
                share = max(0.0, shares.get(span, 0.0))
                axes.barh(run, share, left=begin, color=SPANS[span])
                if share >= 5:
                    axes.text(begin + share / 2, run, f"{share:.0f}", fontsize=8, ha="center", va="center")
                begin += share
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("% of the step", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        from matplotlib.patches import Patch

        handles = [Patch(color=shade, label=span) for span, shade in SPANS.items()]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(SPANS), fontsize=8)
        return figure

    return Picture("step-spans", panels, description, draw)


def gpu_trace(path: Path) -> tuple[chrome_trace.Trace, pandas.DataFrame]:
    """A trace, and the kernels of its profiled steps.

    Raises:
        UsageError: no kernel ran in a profiled step.
    """
    trace = chrome_trace.load(path)
    kernels = trace.kernels[trace.kernels.step >= 0]
    if kernels.empty:
        raise UsageError(f"{path} has no kernels of a GPU: give a trace_*.json of a GPU")
    return trace, kernels


def layer_kernels(*paths: Path) -> Picture:
    """The kernels of one layer's forward pass end to end, and those of a step by kind, a row for each trace.

    It is the second layer of the first profiled step. From the compiled Version 2 on, a layer's first kernel also adds the result
    of the layer before. The first layer has nothing to add, and torch.compile puts the embedding into its first kernel.
    """
    panels = {}
    for path in paths:
        version, size = path.name.split(".")[0].rsplit("_", 1)
        _, kernels = gpu_trace(path)
        step = kernels[kernels.step == kernels.step.min()].sort_values("start_us")
        kinds = [kernel_names.kind(name) for name in step.name]
        layer = _second_layer(kinds, architecture.preset(size)[0].num_layers)
        times = [round(time, 2) for time in step.duration_us[layer]]
        panels[version.replace("_compile", ", compiled")] = {
            "layer": list(zip(kinds[layer], times, strict=True)),
            "step": {kind: kinds.count(kind) for kind in KINDS if kind in kinds},
        }
    counts = {version: (len(panel["layer"]), sum(panel["step"].values())) for version, panel in panels.items()}
    said = [
        f"{version}: {layer} in a layer's forward pass, {step:,} with copies in a step"
        for version, (layer, step) in counts.items()
    ]
    description = f"Kernels at {size} in bf16. {'; '.join(said)}"

    def draw() -> "Figure":
        figure = plots.new(11, 1.4 + 0.6 * len(panels))
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[2, 1])
        for row, (version, panel) in enumerate(reversed(panels.items())):
            layer, step = counts[version]
            starts = [0.0, *accumulate(time for _, time in panel["layer"])]
            spans = list(zip(starts, (time for _, time in panel["layer"]), strict=False))
            colours = [KINDS[kind] for kind, _ in panel["layer"]]
            left.broken_barh(spans, (row - 0.3, 0.6), color=colours, edgecolor="white", linewidth=0.8)
            left.text(starts[-1], row, f" {layer} kernels", fontsize=8, va="center")
            begin = 0
            for kind, number in panel["step"].items():
                right.barh(row, number, 0.6, left=begin, color=KINDS[kind])
                begin += number
            right.text(begin, row, f" {step:,}", fontsize=8, va="center")
        left.set_yticks(range(len(panels)), list(panels)[::-1])
        left.set_xlim(0, 1.15 * max(sum(time for _, time in panel["layer"]) for panel in panels.values()))
        right.set_xlim(0, 1.15 * max(step for _, step in counts.values()))
        left.set_title("One layer, forward: kernels end to end, us, without the gaps", fontsize=10)
        right.set_title("Kernels and copies in a whole step", fontsize=10)
        for axes in (left, right):
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
        shown = [kind for kind in KINDS if any(kind in panel["step"] for panel in panels.values())]
        from matplotlib.patches import Patch

        handles = [Patch(color=KINDS[kind], label=kind) for kind in shown]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(shown), fontsize=8)
        return figure

    return Picture(f"layer-kernels-{paths[0].parents[1].name}", panels, description, draw)


def _second_layer(kinds: list[str], layers: int) -> slice:
    """The place of the second layer: the shortest sequence with a matrix product that repeats once for each layer.

    Kinds are compared and not names, because torch.compile gives kernels of the first layers names of their own.

    Raises:
        UsageError: there is none.
    """
    for length in range(1, len(kinds) // layers + 1):
        same = 0
        for i, (kind, later) in enumerate(zip(kinds, kinds[length:], strict=False)):
            same = same + 1 if kind == later else 0
            second = i + 1 - same + length
            if same == (layers - 1) * length and "matrix products" in kinds[second : second + length]:
                return slice(second, second + length)
    raise UsageError(f"no sequence of kernels repeats once for each of {layers} layers")


def fusions(path: Path) -> Picture:
    """Kernels and time of a step as the fusions of an ablation are switched on one after another."""
    study = ablation_effects.read(path)
    found = {tuple(c["fusions"].values()): c for c in study["combinations"]}
    rows = []
    for on in range(len(ablation_effects.FUSIONS) + 1):
        combination = found[tuple(i < on for i in range(len(ablation_effects.FUSIONS)))]
        name = f"+ {list(ablation_effects.FUSIONS.values())[on - 1]}" if on else "none"
        rows.append([name, combination["launches_per_step"], combination["step_ms"]["median"]])
    model = tables.letters(study["model"])
    device, compute = study["device"]["name"], study["precision"]["compute"]
    said = [f"{name}: {count:,.0f} kernels, {tables.format_number(ms)} ms" for name, count, ms in rows]
    description = (
        f"Fusions of {study['version']} switched on one after another, {compute}, {model}, one {device}. {'; '.join(said)}"
    )

    def draw() -> "Figure":
        figure = plots.new(11, 2.4)
        titles = (f"{study['counted']} in a step", "ms a step")
        for column, (axes, title) in enumerate(zip(figure.subplots(1, 2, sharey=True), titles, strict=True), 1):
            values = [row[column] for row in rows]
            bars = axes.barh([row[0] for row in rows], values, color=[plots.ORANGE, *[plots.SKY] * 3, plots.BLUE])
            axes.bar_label(bars, [tables.format_number(value) for value in values], padding=3, fontsize=8)
            axes.set_xlim(0, 1.15 * max(values))
            axes.set_title(title, fontsize=10)
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
        axes.invert_yaxis()
        figure.suptitle(f"{study['version']}, fusions switched on one after another; {compute}, one {device}", fontsize=11)
        return figure

    return Picture(f"fusions-{path.parent.name}", rows, description, draw)


def kernel_rates(path: Path) -> Picture:
    """The share of a copy's rate that each contender of a kernel benchmark reaches, at the largest shape.

    Every contender is given the bytes of the fused kernel, so what it moves beyond them lowers its share.
    """
    measured = kernel_benchmark_file.read(path)
    size = max((row["sequence_length"], row["hidden_size"]) for row in measured["rows"])
    rows = [row for row in measured["rows"] if (row["sequence_length"], row["hidden_size"]) == size]
    shares: dict[str, dict[str, float]] = {}
    for row in rows:
        shares.setdefault(row["operation"], {})[row["contender"]] = round(kernel_benchmark.share(row, measured), 1)
    shares = {name: dict(sorted(each.items(), key=lambda item: item[0] == "kernel")) for name, each in shares.items()}
    shape = f"{rows[0]['batch_size']} x {size[0]} tokens, D = {size[1]:,}"
    device = measured["device"]["name"]
    said = [
        f"{operation}: {', '.join(f'{name} {tables.format_number(share)}%' for name, share in each.items())}"
        for operation, each in shares.items()
    ]
    description = (
        f"Bytes that a fused kernel moves, over the time of each contender, in % of the rate of a copy; {shape}, one {device}. "
        f"{'; '.join(said)}"
    )

    def draw() -> "Figure":
        figure = plots.new(11, 3)
        axes = figure.add_subplot()
        contenders = list(dict.fromkeys(name for each in shares.values() for name in each))
        width = 0.8 / len(contenders)
        for number, contender in enumerate(contenders):
            places = [i + width * (number - (len(contenders) - 1) / 2) for i in range(len(shares))]
            values = [each.get(contender, 0.0) for each in shares.values()]
            bars = axes.bar(places, values, width, label=contender, color=kernel_benchmark.COLOURS[contender])
            axes.bar_label(bars, [f"{value:.0f}" for value in values], padding=2, fontsize=8)
        axes.axhline(100, color="0.3", linestyle="--", linewidth=1)
        axes.set_xticks(range(len(shares)), shares)
        axes.set_ylabel("% of the rate of a copy", fontsize=9)
        axes.set_ylim(0, 120)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside right center", fontsize=8)
        figure.suptitle(f"Forward and backward, {shape}, {measured['precision']['compute']}, one {device}", fontsize=11)
        return figure

    return Picture(f"kernel-rates-{path.parent.name}", shares, description, draw)


def scaling_efficiency(folder: Path) -> Picture:
    """Efficiency in weak scaling over GPUs, a panel for each preset, from scaling_<preset>_<precision>.json."""
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for preset, precision, path in find(folder, "scaling_{preset}_{precision}.json", "measure_scaling.sh"):
        study = scaling_file.read(path)
        panel = panels.setdefault(f"{preset}, {precision}", {})
        for row in scaling_results.results(study):
            if row["scaling"] == "weak" and row["parallel"] and row["efficiency"]:
                line = panel.setdefault(f"{row['model']}, {row['parallel']}", {1: 100.0})
                line[row["processes"]] = round(100 * row["efficiency"], 1)
    device = study["device"]["name"] if study["device"] else ""
    least = min(value for panel in panels.values() for points in panel.values() for value in points.values())
    said = [
        f"{title}: " + "; ".join(f"{name} {points[max(points)]:.0f}% on {max(points)}" for name, points in panel.items())
        for title, panel in panels.items()
    ]
    description = f"Efficiency of training on several {device}, each with the same batch as one. {'. '.join(said)}"

    def draw() -> "Figure":
        figure = plots.new(1.5 + 4.5 * len(panels), 3.4)
        figure.suptitle(f"Throughput over that of as many single GPUs, {device}", fontsize=11)
        for axes, (title, panel) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels.items(), strict=True):
            for number, (name, points) in enumerate(panel.items()):
                axes.plot(*zip(*sorted(points.items()), strict=True), label=name, **plots.style(number))
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.set(title=title, xlabel="GPUs", ylabel="efficiency, %", ylim=(10 * (least // 10) - 10, 105))
            axes.spines[["top", "right"]].set_visible(False)
        handles = axes.get_legend_handles_labels()
        figure.legend(*handles, loc="outside right center", fontsize=8)
        return figure

    return Picture(f"scaling-efficiency-{folder.name}", panels, description, draw)
