"""Pictures in the documents: SVG files in pictures/, drawn from the files in results/ that their marker names.

Versions of matplotlib draw the same figure with different bytes. So a picture holds a digest of the numbers that it shows, and is
out of date when these numbers have changed.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common.analysis.comparisons import ablation_effects
from common.analysis.formulas import flops, footprint
from common.analysis.output import plots, run_facts, tables
from common.analysis.profiles import chrome_trace, kernel_names
from common.analysis.reports import kernel_benchmark
from common.config import ModelConfig
from common.documents import architecture
from common.documents.result_tables import IDLE, find, headline, ratio, span_shares
from common.errors import UsageError
from common.records import study_files
from common.studies import scaling

import pandas

COLOURS = (plots.ORANGE, plots.SKY, plots.BLUE, plots.GREEN, plots.PURPLE, plots.VERMILION, plots.BLACK)  # of versions
GIB = 2**30
WIDTH = 9  # inches of a picture; with letters of 9 points, a slide of 1920 x 1080 shows none smaller than 18 points
STYLE: dict[Any, Any] = {  # matplotlib's parameters
    "font.size": 9, "axes.titleweight": "normal", **dict.fromkeys(("axes.titlesize", "figure.titlesize"), 10),
    **dict.fromkeys(("axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 9),
    "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip
BOX = {"facecolor": "white", "linewidth": 0, "pad": 0.5}  # behind a label that a line would cross
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
    draw: Callable[[], "plots.Figure"]

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.numbers).encode()).hexdigest()[:16]

    def drawn(self) -> str:
        """The content of the SVG file."""
        import matplotlib

        with matplotlib.rc_context(STYLE):
            drawing = plots.svg(self.draw(), self.name, self.description)
        return drawing.replace("<svg ", f'<svg xmlns="http://www.w3.org/2000/svg" data-digest="{self.digest()}" ', 1) + "\n"

    def is_current(self, path: Path) -> bool:
        return path.is_file() and f'data-digest="{self.digest()}"' in path.read_text(encoding="utf-8")[:2000]


def described(parts: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """The numbers of each part as text: "a: x 1%, y 2%; b: ..."."""

    def numbers(row: Mapping[str, float]) -> str:
        return ", ".join(f"{name} {tables.format_number(value)}{unit}" for name, value in row.items())

    return "; ".join(f"{part}: {numbers(row)}" for part, row in parts.items())


def ladder(folder: Path) -> Picture:
    """How many times faster than the first version every version and peer is in bf16, a panel for each preset.

    A dot is the quotient of the medians, and a line its range over the processes.
    """
    found, models = headline(folder)
    panels = {
        case.title(): {name: ratio(case.times(models[0]), case.times(name)) for name in models if case.times(name)}
        for case in found
    }
    device = run_facts.device(found[0].studies[0])
    best = [(case.preset, case.fastest(), *map(tables.format_number, panels[case.title()][case.fastest()])) for case in found]
    said = ["{}: {} {}x ({} to {})".format(*each) for each in best]
    description = f"Speed-up over {models[0]} of all versions and peers in bf16, one {device}. The fastest: {', '.join(said)}"

    def draw() -> "plots.Figure":
        figure = plots.new(WIDTH, 0.9 + 0.25 * len(models))
        places = figure.subplots(1, len(panels), sharey=True, squeeze=False).flat
        for axes, (title, panel) in zip(places, panels.items(), strict=True):
            most = max(high for _, _, high in panel.values())
            for row, name in enumerate(models):
                axes.axhline(row, color="0.92", linewidth=1, zorder=0)
                if name in panel:
                    faster, *ends = panel[name]
                    axes.plot(ends, [row, row], color=colour(name), linewidth=2)
                    axes.plot(faster, row, "o", color=colour(name))
                    end, aside, side = (ends[1], 4, "left") if ends[1] < 0.7 * most else (ends[0], -4, "right")
                    how: dict[str, Any] = {"textcoords": "offset points", "va": "center", "ha": side, "bbox": BOX}
                    axes.annotate(f"{tables.format_number(faster)}x", (end, row), (aside, 0), **how)
            axes.axvline(1, color="0.5", linestyle=":", linewidth=1, zorder=0)
            axes.set_yticks(range(len(models)), models)
            axes.set(xlim=(0, 1.05 * most), ylim=(len(models) - 0.5, -0.5), title=title.replace(", bf16, ", "\n"))
        figure.supxlabel(f"times as fast as {models[0]}; dot: medians, line: range over processes", fontsize=STYLE["font.size"])
        figure.suptitle(f"Speed-up of one training step over {models[0]}, bf16, one {device}")
        return figure

    return Picture(f"ladder-{folder.name}", panels, description, draw)


def colour(model: str) -> str:
    """One colour for each version, with and without torch.compile, and grey for the peers; after seven versions they repeat."""
    version = re.fullmatch(r"v(\d+)(-.*)?", model)
    return COLOURS[(int(version[1]) - 1) % len(COLOURS)] if version else "0.7"


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
    said: list[str] = []
    panels: dict[str, dict[str, Any]] = {}
    found, (model, *_) = headline(folder)
    for case in (case for case in found if case.preset in ("medium", "large")):
        config, preset = ModelConfig.model_validate(case.studies[0]["model"]), case.preset
        peak = median(run["peak_mib"] for run in case.cells[model]["runs"]) / 2**10
        areas, kept = held(config, *case.shape), footprint.activations(config, *case.shape, "cuda")
        panels[preset] = {"shape": case.shape, "peak": peak, "model": model, "areas": areas}
        stays = {name: max(areas[name]) for name in ("weights", "AdamW's moments", "gradients")} | {"activations": kept["total"]}
        sizes = described({preset: {name: size / GIB for name, size in stays.items()}}, " GiB")
        share, highest = tables.format_number(100 * kept["scores"] / kept["total"]), tables.format_number(peak)
        said.append(f"{sizes} (of them scores {share}%), measured peak {highest} GiB")
    if not panels:
        raise UsageError(f"{folder}: no benchmark of medium or large in bf16: measure them with results/measure_versions.sh")
    device = run_facts.device(found[0].studies[0])
    description = f"Memory over one training step of {model} in bf16, by formula. {'; '.join(said)} on one {device}"

    def draw() -> "plots.Figure":
        figure = plots.new(WIDTH, 3.9)
        for axes, (preset, panel) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels.items(), strict=True):
            moments = range(len(panel["areas"]["weights"]))
            areas = [[size / GIB for size in panel["areas"][name]] for name in HELD]
            axes.stackplot(moments, areas, labels=list(HELD), colors=list(HELD.values()), linewidth=0)
            axes.axhline(panel["peak"], color=plots.BLACK, linestyle="--", linewidth=1, label="measured peak")
            turn = len(moments) / 2 - 1
            axes.axvline(turn, color="0.3", linestyle=":", linewidth=0.8)
            parts = ["forward,\nlayer by layer", "backward,\nlast layer first", "AdamW"]
            axes.set_xticks([turn / 2, 1.5 * turn, moments[-1]], parts)
            axes.set(xlim=(0, moments[-1]), ylim=(0, 1.1 * panel["peak"]), ylabel="GiB")
            axes.set_title(f"{preset}, {' x '.join(map(str, panel['shape']))} tokens")
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside right center")
        figure.suptitle(f"Memory over one step of {model} in bf16: areas by formula, the line measured on one {device}")
        return figure

    return Picture(f"memory-{folder.name}", panels, description, draw)


def step_spans(*folders: Path) -> Picture:
    """The share of each span in a profiled step of Version 1, a bar for each run that has a profile."""
    panels = {}
    for run, shares in span_shares(*folders).items():
        panels[run] = {span: round(shares[span], 1) for span in SPANS if span in shares and span != "other"}
        panels[run]["other"] = round(sum(shares.values()) - sum(panels[run].values()), 1)
    description = f"Where a profiled step of Version 1 goes, by span, in % of its time. {described(panels, '%')}"

    def draw() -> "plots.Figure":
        figure = plots.new(WIDTH, 0.9 + 0.42 * len(panels))
        axes = figure.add_subplot()
        begins = [0.0] * len(panels)
        for span, shade in SPANS.items():
            shares = [max(0.0, panel.get(span, 0.0)) for panel in panels.values()]
            bars = axes.barh(list(panels), shares, left=begins, color=shade, label=span)
            axes.bar_label(bars, [f"{share:.0f}" if share >= 5 else "" for share in shares], label_type="center")
            begins = [begin + share for begin, share in zip(begins, shares, strict=True)]
        axes.invert_yaxis()
        axes.set(xlim=(0, 100), xlabel="% of a profiled step of Version 1 in fp32")
        figure.legend(loc="outside upper center", ncols=len(SPANS))
        return figure

    return Picture("step-spans", panels, description, draw)


def gpu_trace(path: Path) -> tuple[chrome_trace.Trace, pandas.DataFrame]:
    """A trace, and the kernels of its profiled steps. UsageError: no kernel ran in a profiled step."""
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
    panels: dict[str, dict[str, Any]] = {}
    for path in paths:
        name, size = path.name.split(".")[0].rsplit("_", 1)
        _, kernels = gpu_trace(path)
        step = kernels[kernels.step == kernels.step.min()].sort_values("start_us")
        kinds = [kernel_names.kind(kernel) for kernel in step.name]
        layer = _second_layer(kinds, architecture.preset(size)[0].num_layers)
        panels[name.replace("_compile", ", compiled")] = {
            "layer": [(kind, round(us, 2)) for kind, us in zip(kinds[layer], step.duration_us[layer], strict=True)],
            "step": {kind: kinds.count(kind) for kind in KINDS if kind in kinds},
        }
    totals = {version: sum(panel["step"].values()) for version, panel in panels.items()}
    said = [
        f"{version}: {len(panel['layer'])} in a layer's forward pass, {totals[version]:,} with copies in a step"
        for version, panel in panels.items()
    ]

    def draw() -> "plots.Figure":
        figure = plots.new(WIDTH, 1.2 + 0.5 * len(panels))
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[2, 1])
        longest = 0.0
        for version, panel in panels.items():
            end = 0.0
            for kind, us in panel["layer"]:
                left.barh(version, us, 0.6, left=end, color=KINDS[kind], edgecolor="white", linewidth=0.8)
                end += us
            longest = max(longest, end)
            left.text(end, version, f" {len(panel['layer'])} kernels", va="center")
            right.text(totals[version], version, f" {totals[version]:,}", va="center")
        ends = [0] * len(panels)
        for kind in [kind for kind in KINDS if any(kind in panel["step"] for panel in panels.values())]:
            number = [panel["step"].get(kind, 0) for panel in panels.values()]
            right.barh(list(panels), number, 0.6, left=ends, color=KINDS[kind], label=kind)
            ends = [end + more for end, more in zip(ends, number, strict=True)]
        left.invert_yaxis()
        left.set_xlim(0, 1.15 * longest)
        right.set_xlim(0, 1.15 * max(ends))
        left.set_title("One layer, forward: kernels end to end, us")
        right.set_title("Kernels and copies in a step")
        figure.suptitle(f"The versions at {size} in bf16")
        figure.legend(loc="outside lower center", ncols=len(KINDS))
        return figure

    description = f"Kernels at {size} in bf16. {'; '.join(said)}"
    return Picture(f"layer-kernels-{paths[0].parents[1].name}", panels, description, draw)


def _second_layer(kinds: list[str], layers: int) -> slice:
    """The place of the second layer: the shortest sequence with a matrix product that repeats once for each layer.

    Kinds are compared and not names, because torch.compile gives kernels of the first layers names of their own.

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
    rows: list[tuple[str, float, float]] = []
    for on, name in enumerate(["none", *(f"+ {fusion}" for fusion in ablation_effects.FUSIONS.values())]):
        combination = found[tuple(i < on for i in range(len(ablation_effects.FUSIONS)))]
        launches = combination["launches_per_step"]
        assert launches is not None, path
        rows.append((name, launches, combination["step_ms"]["median"]))
    model = tables.letters(ModelConfig.model_validate(study["model"]).model_dump())
    device, compute = run_facts.device(study), study["precision"]["compute"]
    said = [f"{name}: {count:,.0f} kernels, {tables.format_number(ms)} ms" for name, count, ms in rows]
    description = (
        f"Fusions of {study['version']} switched on one after another, {compute}, {model}, one {device}. {'; '.join(said)}"
    )

    def draw() -> "plots.Figure":
        figure = plots.new(WIDTH, 2.4)
        names, *columns = zip(*rows, strict=True)
        titles = (f"{study['counted']} in a step", "ms a step")
        for axes, title, values in zip(figure.subplots(1, 2, sharey=True), titles, columns, strict=True):
            bars = axes.barh(names, values, color=[plots.ORANGE, *[plots.SKY] * 3, plots.BLUE])
            axes.bar_label(bars, [tables.format_number(value) for value in values], padding=3)
            axes.set(xlim=(0, 1.15 * max(values)), title=title)
        axes.invert_yaxis()
        size = path.stem.split("_")[2]
        figure.suptitle(f"{study['version']} at {size}: fusions switched on one after another; {compute}, one {device}")
        return figure

    return Picture(f"fusions-{path.parent.name}", rows, description, draw)


def kernel_rates(path: Path) -> Picture:
    """The share of a copy's rate that each contender of a kernel benchmark reaches, at the largest shape.

    Every contender is given the bytes of the fused kernel, so what it moves beyond them lowers its share.
    """
    measured = study_files.read_kernels(path)
    size = max((row["sequence_length"], row["hidden_size"]) for row in measured["rows"])
    rows = [row for row in measured["rows"] if (row["sequence_length"], row["hidden_size"]) == size]
    shares: dict[str, dict[str, float]] = {}
    for row in sorted(rows, key=lambda row: row["contender"] == "kernel"):
        shares.setdefault(row["operation"], {})[row["contender"]] = round(kernel_benchmark.share(row, measured), 1)
    shape = f"{rows[0]['batch_size']} x {size[0]} tokens, D = {size[1]:,}"
    device = run_facts.device(measured)
    description = (
        f"Bytes that a fused kernel moves, over the time of each contender, in % of the rate of a copy; {shape}, one {device}. "
        f"{described(shares, '%')}"
    )

    def draw() -> "plots.Figure":
        figure = plots.new(WIDTH, 3)
        axes = figure.add_subplot()
        contenders = list(dict.fromkeys(name for each in shares.values() for name in each))
        width = 0.8 / len(contenders)
        for number, contender in enumerate(contenders):
            places = [i + width * (number - (len(contenders) - 1) / 2) for i in range(len(shares))]
            values = [each.get(contender, 0.0) for each in shares.values()]
            bars = axes.bar(places, values, width, label=contender, color=kernel_benchmark.COLOURS[contender])
            axes.bar_label(bars, fmt="%.0f", padding=2, bbox=BOX)
        axes.axhline(100, color="0.3", linestyle="--", linewidth=1, zorder=0)
        axes.set_xticks(range(len(shares)), list(shares))
        axes.set(ylabel="% of the rate of a copy", ylim=(0, 120))
        figure.legend(loc="outside right center")
        figure.suptitle(f"Forward and backward, {shape}, {measured['precision']['compute']}, one {device}")
        return figure

    return Picture(f"kernel-rates-{path.parent.name}", shares, description, draw)


def scaling_efficiency(folder: Path) -> Picture:
    """Efficiency in weak scaling over GPUs, a panel for each preset, from scaling_<preset>_<precision>.json."""
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for preset, precision, path in find(folder, "scaling_{preset}_{precision}.json", "measure_scaling.sh"):
        study = study_files.read_scaling(path)
        panel = panels.setdefault(f"{preset}, {precision}", {})
        for row in scaling.results(study):
            if row["scaling"] == "weak" and row["parallel"] and row["efficiency"]:
                line = panel.setdefault(f"{row['model']}, {row['parallel']}", {1: 100.0})
                line[row["processes"]] = round(100 * row["efficiency"], 1)
    panels = {title: panel for title, panel in panels.items() if panel}
    if not panels:
        raise UsageError(f"{folder}: no scaling_*.json has an efficiency on several GPUs")
    device = study["device"]["name"] if study["device"] else ""
    least = min(value for panel in panels.values() for points in panel.values() for value in points.values())
    said = [
        f"{title}: " + "; ".join(f"{name} {points[max(points)]:.0f}% on {max(points)}" for name, points in panel.items())
        for title, panel in panels.items()
    ]
    description = f"Efficiency of training on several {device}, each with the same batch as one. {'. '.join(said)}"

    def draw() -> "plots.Figure":
        figure = plots.new(WIDTH, 3.8)
        figure.suptitle(f"Throughput over that of as many single GPUs, {device}")
        for axes, (title, panel) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels.items(), strict=True):
            for number, (name, points) in enumerate(panel.items()):
                aside = 1.03 ** (number - (len(panel) - 1) / 2)  # so that no line hides another
                line = [(count * aside, share) for count, share in sorted(points.items())]
                axes.plot(*zip(*line, strict=True), label=name, **plots.style(number))
            counts = sorted({count for points in panel.values() for count in points})
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, counts, minor=False)
            axes.axhline(100, color="0.5", linestyle=":", linewidth=1)
            axes.set_yticks(range(min(85, 5 * int(least // 5)), 106, 5))
            axes.set(title=title, xlabel="GPUs", ylabel="efficiency, %")
            axes.legend(loc="lower left", ncols=2)
        return figure

    return Picture(f"scaling-efficiency-{folder.name}", panels, description, draw)
