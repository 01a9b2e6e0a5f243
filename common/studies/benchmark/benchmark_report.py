"""The report on a benchmark: its conditions, its tables, a figure, and what could not be measured."""

import math
from pathlib import Path

from common.analysis.output import plots, run_facts
from common.analysis.output.report import Report
from common.errors import RunError
from common.records import study_files
from common.studies import job_runner, known_models
from common.studies.benchmark import benchmark_results
from common.studies.benchmark.benchmark_results import place

MEMORY = {
    "GPU allocator": "Peak of PyTorch's allocator over the timed steps: weights, gradients, optimizer state, activations and "
    "temporary tensors, without the CUDA context.",
    "process RSS": "Peak resident memory of the whole process over the timed steps, with the interpreter, PyTorch and what the "
    "model imports.",
}


def analyze(path: Path) -> Report:
    """The report on a benchmark.json, as .csv, .html, .json, .md and .png. Errors of `read`; RunError: nothing was measured."""
    measured = study_files.read_benchmark(path)
    against = benchmark_results.reference(measured)
    entries: list[study_files.Entry] = [*measured["cells"], *measured["accuracy"]]
    found = benchmark_results.results(measured).values()
    if all(entry["status"] != "ok" for entry in entries):
        raise RunError(f"nothing was measured; the first: {entries[0]['model']}, {job_runner.reason(entries[0])}")
    where = run_facts.describe(measured | {"training": {}}, "batch_size", "sequence_length")
    packages = ", ".join(f"{name} {version}" for name, version in measured["packages"].items())
    conditions = "; ".join(filter(None, [where, packages]))
    timed = {place(cell).replace(",", ""): cell | {"median": cell["ms"]} for cell in found if cell["ms"]}
    report = Report("Benchmark")
    report.json("benchmark", measured)
    report.text(
        f"{conditions}. Numbers are medians, a speed-up is the median of those in each repeat. Processes of each cell: "
        f"{measured['repeats']}; timed steps in each: {measured['steps']}.",
        f"Made by `{measured['command']}` on {measured['date']}.",
    )
    runs = [(cell["model"], run) for cell in measured["cells"] for run in cell["runs"]]
    if without := {model: run["no_kernels"] for model, run in runs if "no_kernels" in run}:
        reason = next(iter(without.values()))
        report.text(f"No Triton kernels in {', '.join(without)}: {reason}. PyTorch's operations were measured in their place.")
    if timed:
        report.figure(lambda: figure(measured, conditions), "benchmark", "Throughput and peak memory")
        report.csv("benchmark", benchmark_results.COLUMNS, [[cell[name] for name in benchmark_results.COLUMNS] for cell in found])
    if "throughput" in measured["metrics"]:
        report.section(f"Tokens/s (and speed-up against {against})", "throughput")
        report.table(*benchmark_results.throughput_table(measured))
        report.section("Step time")
        report.table(*benchmark_results.step_table(measured))
        report.text(*benchmark_results.disagreements(measured), *run_facts.noise(timed))
    if "memory" in measured["metrics"]:
        kind = next((run["kind"] for _, run in runs), "")
        report.section(f"Peak MiB, {kind} (and {against} / model)", "memory")
        report.table(*benchmark_results.memory_table(measured))
        report.text(MEMORY.get(kind, ""))
    if timed and benchmark_results.scaling_table(measured)[1]:
        report.section("Growth from the smallest to the largest", "growth")
        report.table(*benchmark_results.scaling_table(measured))
    if "accuracy" in measured["metrics"]:
        baseline = next(iter(known_models.version_scripts()))
        report.section("Accuracy")
        report.table(*benchmark_results.accuracy_table(measured))
        report.text(
            f"At B {measured['batch_sizes'][0]}, S {measured['sequence_lengths'][0]} only. Loss: after "
            f"{measured['accuracy_steps']} steps from the same weights on the same batches of the synthetic source. Errors: the "
            f"largest difference over the largest element, against {baseline} in float64; {baseline}'s own errors are rounding."
        )
    missing = [entry for entry in entries if entry["status"] != "ok"]
    facts = [(place(entry) + ", accuracy" * ("runs" not in entry), job_runner.reason(entry)) for entry in missing]
    job_runner.not_measured(report, measured, facts)
    return report


def figure(measured: study_files.Benchmark, title: str) -> "plots.Figure":
    """Throughput above peak memory, over the batch size, or in bars if there is one; a column for each sequence length."""
    found, lengths, sizes = benchmark_results.results(measured), measured["sequence_lengths"], measured["batch_sizes"]
    models, styles = measured["models"], [plots.style(i) for i in range(len(measured["models"]))]
    fields = {"throughput": ("tokens/s", "tokens_per_second"), "memory": ("peak MiB", "peak_mib")}
    wanted = [labels for metric, labels in fields.items() if metric in measured["metrics"]]
    result = plots.new(1.5 + 4 * len(lengths), 1.2 + 3.6 * len(wanted))
    result.suptitle(f"Benchmark: {title}".replace("; ", "\n"), fontsize=10)
    grid = result.subplots(len(wanted), len(lengths), squeeze=False, sharex=True, sharey="row")
    for row, (unit, field) in zip(grid, wanted, strict=True):
        for axes, length in zip(row, lengths, strict=True):
            curves = [[found[model, size, length][field] or math.nan for size in sizes] for model in models]
            if len(sizes) == 1:
                axes.bar(models, [value for [value] in curves], color=[style["color"] for style in styles])
                axes.tick_params("x", rotation=90)
            else:
                for model, values, style in zip(models, curves, styles, strict=True):
                    axes.plot(sizes, values, label=model, **style)
                axes.set_xscale("log", base=2)
                axes.set_xticks(sizes, map(str, sizes))
                axes.minorticks_off()
            at = f"batch size {sizes[0]}" if len(sizes) == 1 else "batch size"
            axes.set(title=f"sequence length {length}", xlabel=at, ylabel=unit)
            axes.yaxis.set_major_formatter("{x:,.0f}")
            axes.label_outer()
            axes.grid(True, color="0.9", axis="y" if len(sizes) == 1 else "both")
            axes.set_axisbelow(True)
        row[0].set_ylim(0, 1.1 * max(cell[field] or 0 for cell in found.values()))  # of the whole row
    if len(sizes) > 1:
        result.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=min(len(models), 4))
    return result
