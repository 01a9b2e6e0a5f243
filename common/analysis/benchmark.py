"""Tables and figures of a benchmark, from benchmark.json alone (written by `common.benchmark`, which says what is in it).

A figure of a cell is the median over its repeats. Ratios are against v1, or against the first model where v1 was not measured:
above 1 a model is faster, or needs less memory. The range beside a speed-up is that of the repeats, each against the same
repeat of the other: how well it is known.
"""

from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common.analysis import plots, tables
from common.errors import RunError
from common.files import read_json, write_text

SCHEMA = "tiny-llama-benchmark/1"
METRICS = ("throughput", "memory", "accuracy")
COLOURS = (plots.BLACK, plots.BLUE, plots.SKY, plots.VERMILION, plots.GREEN, plots.ORANGE, plots.PURPLE)
MARKERS = "osD^v<>"

Measured = dict[str, Any]
Table = tuple[list[str], list[list[object]]]
Key = tuple[str, int, int]  # model, B, S


class Figures(NamedTuple):
    """Of one cell: medians over the repeats, in ms, tokens/s and MiB, and the median of each repeat."""

    ms: float
    p20: float
    p80: float
    tokens_per_second: float
    peak_mib: float
    repeats: list[float]


def analyze(path: Path, folder: Path) -> str:
    """Reads benchmark.json and writes benchmark.csv, .md and .png into `folder`.

    Returns:
        The tables for the terminal.

    Raises:
        UsageError: the file is not of schema tiny-llama-benchmark/1.
        RunError: nothing in it was measured.
    """
    measured = read_json(path, SCHEMA)
    entries = measured["cells"] + measured["accuracy"]
    if all(entry["status"] != "ok" for entry in entries):
        raise RunError(f"nothing was measured; the first: {entries[0]['model']}, {reason(entries[0])}")
    kinds = ["csv", "md", "png"] if figures(measured) else ["md"]
    write_text(folder / "benchmark.md", "\n\n".join(report(measured, "png" in kinds)) + "\n")
    if figures(measured):
        write_text(folder / "benchmark.csv", _csv(measured))
        plot(measured, folder / "benchmark.png")
    parts = [conditions(measured)]
    for title, table, note in sections(measured):
        parts.append(f"{title}:\n{tables.text(*table)}" + (f"\n{note}" if note else ""))
    written = ", ".join(str(folder / f"benchmark.{kind}") for kind in ("json", *kinds))
    return "\n\n".join([*parts, *filter(None, ["\n".join(problems(measured))]), f"written: {written}"])


def figures(measured: Measured) -> dict[Key, Figures]:
    """Those of every cell that was measured to the end."""
    found = {}
    for cell in measured["cells"]:
        if cell["status"] != "ok":
            continue
        ms, p20, p80 = (median(run["step_ms"][name] for run in cell["runs"]) for name in ("median", "p20", "p80"))
        tokens = cell["batch_size"] * cell["sequence_length"]
        peak = median(run["peak_mib"] for run in cell["runs"])
        repeats = [run["step_ms"]["median"] for run in cell["runs"]]
        found[_key(cell)] = Figures(ms, p20, p80, tokens / ms * 1e3, peak, repeats)
    return found


def _key(entry: dict[str, Any]) -> Key:
    return entry["model"], entry["batch_size"], entry["sequence_length"]


def reference(measured: Measured) -> str:
    """The model that ratios are against."""
    return "v1" if "v1" in measured["models"] else measured["models"][0]


def reason(entry: dict[str, Any]) -> str:
    return f"{entry['status']}: {entry['reason']}" if entry["reason"] else entry["status"]


def problems(measured: Measured) -> list[str]:
    """A line for each cell that was not measured, and one if the run did not come to its end."""
    entries = [("", cell) for cell in measured["cells"]] + [(", accuracy", entry) for entry in measured["accuracy"]]
    interrupted = ["The run was interrupted: cells are missing, or lack repeats."] if measured["status"] == "interrupted" else []
    return interrupted + [
        f"{entry['model']}, B {entry['batch_size']}, S {entry['sequence_length']}{what}: {reason(entry)}"
        for what, entry in entries
        if entry["status"] != "ok"
    ]


# -------------------------------------------------------------------------------------------------------------- tables


def sections(measured: Measured) -> list[tuple[str, Table, str]]:
    """Title, table and a note for each metric that was asked for."""
    against, found = reference(measured), []
    if "throughput" in measured["metrics"]:
        found.append((f"Tokens/s (and speed-up against {against})", throughput_table(measured), ""))
        found.append(("Step time", step_table(measured), ""))
    if "memory" in measured["metrics"]:
        kind = next((run["kind"] for cell in measured["cells"] for run in cell["runs"]), "")
        note = {
            "GPU allocator": "Peak of PyTorch's allocator over the timed steps: weights, gradients, optimizer state, activations "
            "and temporary tensors, without the CUDA context.",
            "process RSS": "Peak resident memory of the whole process over the timed steps, with the interpreter, PyTorch and "
            "what the model imports.",
        }.get(kind, "")
        found.append((f"Peak MiB, {kind} (and {against} / model)", memory_table(measured), note))
    if scaling_table(measured)[1]:
        found.append(("Growth from the smallest to the largest", scaling_table(measured), ""))
    if "accuracy" in measured["metrics"]:
        note = (
            f"At B {measured['batch_sizes'][0]}, S {measured['sequence_lengths'][0]} only. Loss: after "
            f"{measured['accuracy_steps']} steps from the same weights on the same batches of the synthetic source. Errors: "
            "largest difference over largest element, against Version 1 in float64; v1's own are those of the number format."
        )
        found.append(("Accuracy", accuracy_table(measured), note))
    return found


def _by_shape(measured: Measured, value: Any, better: Any) -> Table:
    """A row a shape, a column a model: the value, and its ratio against the reference."""
    found, against = figures(measured), reference(measured)
    status = {_key(cell): cell["status"] for cell in measured["cells"]}
    rows: list[list[object]] = []
    for length in measured["sequence_lengths"]:
        for size in measured["batch_sizes"]:
            row, base = [size, length], found.get((against, size, length))
            for model in measured["models"]:
                own = found.get((model, size, length))
                if own is None:
                    row.append(status[model, size, length])
                else:
                    ratio = f" ({better(base, own):.2f}x)" if base and model != against else ""
                    row.append(f"{value(own):,.0f}{ratio}")
            rows.append(row)
    return ["B", "S", *measured["models"]], rows


def throughput_table(measured: Measured) -> Table:
    """Tokens/s, and the speed-up."""
    return _by_shape(measured, lambda own: own.tokens_per_second, lambda base, own: base.ms / own.ms)


def memory_table(measured: Measured) -> Table:
    """Peak MiB, and how many times less than the reference."""
    return _by_shape(measured, lambda own: own.peak_mib, lambda base, own: base.peak_mib / own.peak_mib)


def step_table(measured: Measured) -> Table:
    """A row a cell: ms per step, and how well the speed-up is known."""
    found, against = figures(measured), reference(measured)
    rows: list[list[object]] = []
    for (model, size, length), own in found.items():
        base, speedup = found.get((against, size, length)), [None, ""]
        if base and model != against:
            ratios = [theirs / ours for theirs, ours in zip(base.repeats, own.repeats, strict=False)]
            speedup = [base.ms / own.ms, f"{min(ratios):.3g} to {max(ratios):.3g}" if len(ratios) > 1 else ""]
        rows.append([model, size, length, own.ms, f"{tables.figure(own.p20)} to {tables.figure(own.p80)}", *speedup])
    return ["model", "B", "S", "ms/step", "p20 to p80", "speed-up", "over the repeats"], rows


def scaling_table(measured: Measured) -> Table:
    """How time, throughput and memory grow from the smallest batch size to the largest, and the same for the sequence length."""
    found = figures(measured)
    sizes, lengths = measured["batch_sizes"], measured["sequence_lengths"]
    paths = [(f"B {sizes[0]} to {sizes[-1]}", f"S {s}", (sizes[0], s), (sizes[-1], s)) for s in lengths if len(sizes) > 1]
    paths += [
        (f"S {lengths[0]} to {lengths[-1]}", f"B {b}", (b, lengths[0]), (b, lengths[-1])) for b in sizes if len(lengths) > 1
    ]
    rows: list[list[object]] = []
    for model in measured["models"]:
        for growing, fixed, small, large in paths:
            before, after = found.get((model, *small)), found.get((model, *large))
            if before and after:
                tokens = large[0] * large[1] / (small[0] * small[1])
                rows.append([
                    model, growing, fixed, tokens, after.ms / before.ms, after.tokens_per_second / before.tokens_per_second,
                    after.peak_mib / before.peak_mib,
                ])  # fmt: skip
    return ["model", "growing", "at", "tokens x", "time x", "tokens/s x", "peak memory x"], rows


def accuracy_table(measured: Measured) -> Table:
    """Loss, its difference to the reference's, and errors against float64."""
    good = {entry["model"]: entry for entry in measured["accuracy"] if entry["status"] == "ok"}
    base, rows = good.get(reference(measured)), []
    for model, entry in good.items():
        difference = f"{entry['loss'] - base['loss']:+.1e}" if base else ""
        errors = [f"{entry['logits_error']:.1e}", f"{entry['gradient_error']:.1e}", entry["gradient"]]
        rows.append([model, f"{entry['loss']:.5f}", difference, *errors])
    header = ["model", "loss", f"minus {reference(measured)}'s", "error of the logits", "largest of a gradient", "which is of"]
    return header, rows


# --------------------------------------------------------------------------------------------------------------- files


def conditions(measured: Measured) -> str:
    device = measured["device"]
    packages = "".join(f", {name} {version}" for name, version in measured["packages"].items())
    threads = f", {device['threads']} threads" if device.get("threads") else ""
    return (
        f"{device['name']}{threads}, {measured['precision']['compute']}, torch {measured['environment']['torch']}{packages}; "
        f"{tables.letters(measured['model'])}. Figures are medians; processes a cell: {measured['repeats']}, "
        f"timed steps in each: {measured['steps']}."
    )


def report(measured: Measured, with_plot: bool) -> list[str]:
    """The paragraphs of the Markdown report."""
    parts = ["# Benchmark", conditions(measured), f"Made by `{measured['command']}` on {measured['date']}."]
    parts += ["![Throughput and peak memory over the batch size](benchmark.png)"] if with_plot else []
    for title, table, note in sections(measured):
        parts += [f"## {title}", tables.markdown(*table).strip()] + ([note] if note else [])
    missing = problems(measured)
    return parts + (["## Not measured", "\n".join(f"- {line}" for line in missing)] if missing else [])


def _csv(measured: Measured) -> str:
    found, against = figures(measured), reference(measured)
    header = [
        "model", "batch_size", "sequence_length", "status", "ms", "p20", "p80", "repeats", "tokens_per_second", "speedup",
        "peak_mib", "memory_ratio",
    ]  # fmt: skip
    rows = []
    for cell in measured["cells"]:
        own, base = found.get(_key(cell)), found.get((against, *_key(cell)[1:]))
        row = [*own[:3], len(own.repeats), own.tokens_per_second] if own else 5 * [None]
        ratios = (base.ms / own.ms, base.peak_mib / own.peak_mib) if own and base else (None, None)
        rows.append([*_key(cell), cell["status"], *row, ratios[0], own.peak_mib if own else None, ratios[1]])
    return tables.csv_text(header, rows)


def plot(measured: Measured, path: Path) -> None:
    """Above throughput, below peak memory, over the batch size; a column for each sequence length."""
    found, lengths, sizes = figures(measured), measured["sequence_lengths"], measured["batch_sizes"]
    wanted = [
        (name, unit, field)
        for name, unit, field in (("throughput", "tokens/s", "tokens_per_second"), ("memory", "peak MiB", "peak_mib"))
        if name in measured["metrics"]
    ]
    figure = plots.new(1.5 + 4 * len(lengths), 0.8 + 3.6 * len(wanted))
    figure.suptitle(f"Benchmark: {measured['precision']['compute']}, {measured['device']['name']}")
    grid = figure.subplots(len(wanted), len(lengths), squeeze=False, sharex=True, sharey="row")
    for row, (_, unit, field) in zip(grid, wanted, strict=True):
        for axes, length in zip(row, lengths, strict=True):
            for i, model in enumerate(measured["models"]):
                points = [(b, getattr(found[model, b, length], field)) for b in sizes if (model, b, length) in found]
                if points:
                    style = dict(color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], label=model)
                    axes.plot(*zip(*points, strict=True), **style)
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.set(title=f"sequence length {length}", xlabel="batch size", ylabel=unit)
            axes.grid(True, color="0.9")
        row[0].set_ylim(0, 1.1 * max(getattr(own, field) for own in found.values()))  # of the whole row
    grid[0][0].legend()
    plots.save(figure, path)
