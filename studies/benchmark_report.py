"""The report on a benchmark: its conditions, tables, and what could not be measured.

A time or a peak of a cell is the median over its repeats. Ratios are against the first model. Above
1 a model is faster, or needs less memory.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from studies.benchmark import place, reason
from tracepage.errors import RunError
from tracepage.records import study_files
from tracepage.records.study_files import Benchmark
from tracepage.show import run_facts, tables
from tracepage.show.report import Report

import pandas

COLUMNS = (
    "model",
    "batch_size",
    "sequence_length",
    "status",
    "ms",
    "p20",
    "p80",
    "repeats",
    "tokens_per_second",
    "speedup",
    "peak_mib",
    "memory_ratio",
)
# of a cell, with the heads in tables
SHAPE = {"model": "model", "batch_size": "B", "sequence_length": "S"}
Row = dict[str, Any]  # by the names in COLUMNS and of further columns


def analyze(path: Path) -> Report:
    """The report on a benchmark.json, as .csv, .json and .md. Errors of `read`; RunError: nothing
    was measured.
    """
    measured = study_files.read_benchmark(path)
    against = measured["models"][0]
    found = results(measured)
    entries: list[Any] = [*measured["cells"], *measured["accuracy"]]
    if all(entry["status"] != "ok" for entry in entries):
        raise RunError(
            f"nothing was measured; the first: {place(entries[0])}, {reason(entries[0])}"
        )
    where = run_facts.describe(measured | {"training": {}}, "batch_size", "sequence_length")
    packages = ", ".join(f"{name} {version}" for name, version in measured["packages"].items())
    conditions = "; ".join(filter(None, [where, packages]))
    timed = {
        place(row).replace(",", ""): row | {"median": row["ms"]}
        for row in found.values()
        if row["ms"]
    }
    runs = [(cell["model"], run) for cell in measured["cells"] for run in cell["runs"]]
    report = Report("Benchmark")
    report.json("benchmark", measured)
    report.text(
        f"{conditions}. Numbers are medians. Processes of each cell: {measured['repeats']}; timed steps in each: "
        f"{measured['steps']}.",
        f"Made by `{measured['command']}` on {measured['date']}.",
    )
    if without := {model: run["no_kernels"] for model, run in runs if "no_kernels" in run}:
        why = next(iter(without.values()))
        report.text(
            f"No Triton kernels in {', '.join(without)}: {why}. PyTorch's operations were measured in their place."
        )
    if timed:
        report.csv(
            "benchmark", COLUMNS, [[row[name] for name in COLUMNS] for row in found.values()]
        )
    if "throughput" in measured["metrics"]:
        report.section(f"Throughput (and speed-up against {against})", "throughput")
        names = ("ms", "spread", "processes", "tokens_per_second", "speedup")
        header = ["ms/step", "p20 to p80", "ms/step of each process", "tokens/s", "speed-up"]
        report.table([*SHAPE.values(), *header], rows(found, *names))
        report.text(*run_facts.noise(timed))
    if "memory" in measured["metrics"]:
        kind = next((run["kind"] for _, run in runs), "")
        report.section(f"Peak memory of the timed steps, {kind} (and {against} / model)", "memory")
        report.table(
            [*SHAPE.values(), "peak MiB", "ratio"], rows(found, "peak_mib", "memory_ratio")
        )
    if "energy" in measured["metrics"]:
        report.section("Energy")
        report.table(
            [*SHAPE.values(), "ms/step", "J/step", "mJ/token"],
            rows(found, "ms", "joules", "mj_per_token"),
        )
    if "accuracy" in measured["metrics"]:
        report.section("Accuracy")
        columns = ["model", "logits_error", "gradient_error", "gradient"]
        header = ["model", "error of the logits", "largest of a gradient", "which is of"]
        compared = [
            [entry.get(name) for name in columns]
            for entry in measured["accuracy"]
            if entry["status"] == "ok"
        ]
        report.table(header, compared)
        report.text(
            f"At B {measured['batch_sizes'][0]}, S {measured['sequence_lengths'][0]} only: the largest difference over the "
            "largest element, against the first version in float64. The first version's own errors are rounding."
        )
    missing = [entry for entry in entries if entry["status"] != "ok"]
    facts = [("The run was interrupted", "cells are missing, or lack repeats")] * (
        measured["status"] == "interrupted"
    )
    facts += [
        (place(entry) + ", accuracy" * ("runs" not in entry), reason(entry)) for entry in missing
    ]
    if facts:
        report.section("Not measured")
        report.facts(facts)
    return report


def results(measured: Benchmark) -> dict[tuple[str, int, int], Row]:
    """COLUMNS (None if not measured) and what only tables show, by model, batch size, length."""
    found: dict[tuple[str, int, int], Row] = {}
    for cell in measured["cells"]:
        row: Row = dict.fromkeys(COLUMNS) | {
            name: value for name, value in cell.items() if name in COLUMNS
        }
        if cell["status"] == "ok":
            steps = pandas.DataFrame([run["step_ms"] for run in cell["runs"]]).median()
            row |= {
                "ms": steps["median"],
                "p20": steps["p20"],
                "p80": steps["p80"],
                "repeats": len(cell["runs"]),
            }
            row["peak_mib"] = median(run["peak_mib"] for run in cell["runs"])
            row["spread"] = tables.spread(row)
            tokens = row["batch_size"] * row["sequence_length"]
            row["processes"] = ", ".join(f"{run['step_ms']['median']:.4g}" for run in cell["runs"])
            row["tokens_per_second"] = tokens / row["ms"] * 1e3
            if "energy" in measured["metrics"]:
                row["joules"] = median(run["joules"] for run in cell["runs"])
                row["mj_per_token"] = 1e3 * row["joules"] / tokens
        found[row["model"], row["batch_size"], row["sequence_length"]] = row
    for (_, size, length), row in found.items():
        base = found[measured["models"][0], size, length]
        if base["ms"] and row["ms"]:
            row |= {
                "speedup": base["ms"] / row["ms"],
                "memory_ratio": base["peak_mib"] / row["peak_mib"],
            }
    return found


def rows(found: Mapping[Any, Row], *names: str) -> list[list[Any]]:
    """The shape of each measured cell, and its numbers of these names."""
    return [[row[name] for name in (*SHAPE, *names)] for row in found.values() if row["ms"]]
