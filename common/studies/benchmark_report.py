"""The report on a benchmark: its conditions, tables, a figure, and what could not be measured.

A time or a peak of a cell is the median over its repeats. Ratios are against the baseline, which is the first version by its
folder, or against the first model where the baseline was not measured. Above 1 a model is faster, or needs less memory. A
speed-up is the median of those in each repeat, against the same repeat of the other model: a load that comes and goes changes
both. Its range is that of the repeats.
"""

import math
from pathlib import Path
from statistics import median
from typing import Any

from common.analysis.output import plots, run_facts, tables
from common.analysis.output.report import Report
from common.analysis.output.tables import Table
from common.records import study_files
from common.records.study_files import Benchmark
from common.studies import job_runner, known_models
from common.studies.benchmark import place

COLUMNS = ("model", "batch_size", "sequence_length", "status", "ms", "p20", "p80", "repeats", "tokens_per_second", "speedup",
           "peak_mib", "memory_ratio")  # fmt: skip
MEMORY = {
    "GPU allocator": "Peak of PyTorch's allocator over the timed steps: weights, gradients, optimizer state, activations and "
    "temporary tensors, without the CUDA context.",
    "process RSS": "Peak resident memory of the whole process over the timed steps, with the interpreter, PyTorch and what the "
    "model imports.",
}
Row = dict[str, Any]  # by the names in COLUMNS, `times` and `speedups`


def analyze(path: Path) -> Report:
    """The report on a benchmark.json, as .csv, .html, .json, .md and .png. Errors of `read`; RunError: nothing was measured."""
    measured = study_files.read_benchmark(path)
    against, found = reference(measured), results(measured)
    entries: list[Any] = [*measured["cells"], *measured["accuracy"]]
    job_runner.require_measured(entries, place)
    where = run_facts.describe(measured | {"training": {}}, "batch_size", "sequence_length")
    packages = ", ".join(f"{name} {version}" for name, version in measured["packages"].items())
    conditions = "; ".join(filter(None, [where, packages]))
    timed = {place(row).replace(",", ""): row | {"median": row["ms"]} for row in found.values() if row["ms"]}
    runs = [(cell["model"], run) for cell in measured["cells"] for run in cell["runs"]]
    report = Report("Benchmark")
    report.json("benchmark", measured)
    report.text(
        f"{conditions}. Numbers are medians, a speed-up is the median of those in each repeat. Processes of each cell: "
        f"{measured['repeats']}; timed steps in each: {measured['steps']}.",
        f"Made by `{measured['command']}` on {measured['date']}.",
    )
    if without := {model: run["no_kernels"] for model, run in runs if "no_kernels" in run}:
        reason = next(iter(without.values()))
        report.text(f"No Triton kernels in {', '.join(without)}: {reason}. PyTorch's operations were measured in their place.")
    if timed:
        report.figure(lambda: figure(measured, conditions), "benchmark", "Throughput and peak memory")
        report.csv("benchmark", COLUMNS, [[row[name] for name in COLUMNS] for row in found.values()])
    if "throughput" in measured["metrics"]:
        report.section(f"Tokens/s (and speed-up against {against})", "throughput")
        report.table(*by_shape(measured, "tokens_per_second", "speedup"))
        report.section("Step time")
        report.table(*step_table(measured))
        report.text(*run_facts.noise(timed))
    if "memory" in measured["metrics"]:
        kind = next((run["kind"] for _, run in runs), "")
        report.section(f"Peak MiB, {kind} (and {against} / model)", "memory")
        report.table(*by_shape(measured, "peak_mib", "memory_ratio"))
        report.text(MEMORY.get(kind, ""))
    if "accuracy" in measured["metrics"]:
        baseline = next(iter(known_models.version_scripts()))
        report.section("Accuracy")
        report.table(*accuracy_table(measured))
        report.text(
            f"At B {measured['batch_sizes'][0]}, S {measured['sequence_lengths'][0]} only. Loss: after "
            f"{measured['accuracy_steps']} steps from the same weights on the same batches of the synthetic source. Errors: the "
            f"largest difference over the largest element, against {baseline} in float64; {baseline}'s own errors are rounding."
        )
    missing = [entry for entry in entries if entry["status"] != "ok"]
    facts = [(place(entry) + ", accuracy" * ("runs" not in entry), job_runner.reason(entry)) for entry in missing]
    job_runner.not_measured(report, measured, facts)
    return report


def reference(measured: Benchmark) -> str:
    """The model that ratios are against."""
    baseline = next(iter(known_models.version_scripts()))
    return baseline if baseline in measured["models"] else measured["models"][0]


def results(measured: Benchmark) -> dict[tuple[str, int, int], Row]:
    """COLUMNS (None if not measured), and ms and speed-up of each repeat (`times`, `speedups`), by model, batch size, length."""
    found: dict[tuple[str, int, int], Row] = {}
    for cell in measured["cells"]:
        row: Row = dict.fromkeys(COLUMNS) | {name: value for name, value in cell.items() if name in COLUMNS}
        if cell["status"] == "ok":
            row |= job_runner.medians(cell)
            row["tokens_per_second"] = row["batch_size"] * row["sequence_length"] / row["ms"] * 1e3
            row["times"] = [run["step_ms"]["median"] for run in cell["runs"]]
        found[row["model"], row["batch_size"], row["sequence_length"]] = row
    for (_, size, length), row in found.items():
        base = found.get((reference(measured), size, length))
        if base and base["ms"] and row["ms"]:
            row["speedups"] = [theirs / ours for theirs, ours in zip(base["times"], row["times"], strict=False)]
            row |= {"speedup": median(row["speedups"]), "memory_ratio": base["peak_mib"] / row["peak_mib"]}
    return found


def by_shape(measured: Benchmark, value: str, ratio: str) -> Table:
    """A row for each shape, a column for each model: the value, and its ratio against the reference."""
    found, against, rows = results(measured), reference(measured), []

    def shown(cell: Row | None) -> str:
        if not cell or not cell[value]:
            return cell["status"] if cell else ""
        beside = f" ({cell[ratio]:.2f}x)" if cell[ratio] and cell["model"] != against else ""
        return f"{cell[value]:,.0f}{beside}"

    for length in measured["sequence_lengths"]:
        for size in measured["batch_sizes"]:
            rows.append([size, length, *(shown(found.get((model, size, length))) for model in measured["models"])])
    return ["B", "S", *measured["models"]], rows


def step_table(measured: Benchmark) -> Table:
    """A row for each measured cell: the time of a step, and the range of its speed-up over the repeats."""
    found, rows = [row for row in results(measured).values() if row["ms"]], []
    unit, factor = tables.time_unit(max((row["ms"] for row in found), default=1))
    for row in found:
        ratios = row.get("speedups", []) if row["model"] != reference(measured) else []
        ends = f"{min(ratios):.3g} to {max(ratios):.3g}" if len(ratios) > 1 else ""
        place = [row["model"], row["batch_size"], row["sequence_length"]]
        rows.append([*place, factor * row["ms"], tables.spread(row, factor), row["speedup"] if ratios else None, ends])
    return ["model", "B", "S", f"{unit}/step", "p20 to p80", "speed-up", "over the repeats"], rows


def accuracy_table(measured: Benchmark) -> Table:
    """The loss, its difference to the reference's, and the errors against float64."""
    good = {entry["model"]: entry for entry in measured["accuracy"] if entry["status"] == "ok"}
    against, rows = reference(measured), []
    for model, entry in good.items():
        difference = f"{entry['loss'] - good[against]['loss']:+.1e}" if against in good else ""
        values = [entry["logits_error"], entry["gradient_error"], entry["gradient"]]
        rows.append([model, f"{entry['loss']:.5f}", difference, *values])
    return ["model", "loss", f"minus {against}'s", "error of the logits", "largest of a gradient", "which is of"], rows


def figure(measured: Benchmark, title: str) -> "plots.Figure":
    """Throughput above peak memory, over the batch size, or in bars if there is one; a column for each sequence length."""
    found, lengths, sizes = results(measured), measured["sequence_lengths"], measured["batch_sizes"]
    fields = {"throughput": ("tokens/s", "tokens_per_second"), "memory": ("peak MiB", "peak_mib")}
    wanted = [labels for metric, labels in fields.items() if metric in measured["metrics"]]
    result = plots.new(1.5 + 4 * len(lengths), 1.2 + 3.6 * len(wanted))
    result.suptitle(f"Benchmark: {title}".replace("; ", "\n"), fontsize=10)
    grid = result.subplots(len(wanted), len(lengths), squeeze=False, sharex=True, sharey="row")
    for row, (unit, field) in zip(grid, wanted, strict=True):
        for axes, length in zip(row, lengths, strict=True):
            for i, model in enumerate(measured["models"]):
                values = [found.get((model, size, length), {}).get(field) or math.nan for size in sizes]
                if len(sizes) == 1:
                    axes.bar(model, values, color=plots.style(i)["color"])
                else:
                    axes.plot(sizes, values, label=model, **plots.style(i))
            if len(sizes) == 1:
                axes.tick_params("x", rotation=90)
            else:
                axes.set_xscale("log", base=2)
                axes.set_xticks(sizes, map(str, sizes))
            at = f"batch size {sizes[0]}" if len(sizes) == 1 else "batch size"
            axes.set(title=f"sequence length {length}", xlabel=at, ylabel=unit)
            axes.yaxis.set_major_formatter("{x:,.0f}")
            axes.label_outer()
            axes.grid(True, color="0.9")
        row[0].set_ylim(0, 1.1 * max(cell[field] or 0 for cell in found.values()))  # of the whole row
    if len(sizes) > 1:
        result.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=min(len(measured["models"]), 4))
    return result
