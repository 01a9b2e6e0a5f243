"""The report on a benchmark.json: its conditions, tables, and what could not be measured.

A time or a peak of a cell is the median over its repeats. Ratios are against the first model. Above
1 a model is faster, or needs less memory.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from tracepage.errors import RunError
from tracepage.records import study_files
from tracepage.records.study_files import Benchmark
from tracepage.show import run_facts, tables
from tracepage.show.report import Report

import pandas

SHAPE = {"model": "model", "batch_size": "B", "sequence_length": "S"}  # key: head in tables
STATE = {"clock_mhz": "MHz", "watts": "W", "celsius": "C"}  # the same, of the GPU
COLUMNS = (
    *SHAPE,
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
Row = dict[str, Any]  # by the names in COLUMNS and of further columns
Rows = dict[tuple[str, int, int], Row]  # by model, batch size and sequence length


def place(cell: Mapping[str, Any]) -> str:
    """A cell by name, such as "v1, B 8, S 128"."""
    return f"{cell['model']}, B {cell['batch_size']}, S {cell['sequence_length']}"


def reason(cell: Mapping[str, Any]) -> str:
    """Why a cell was not measured, in one line."""
    return f"{cell['status']}: {cell['reason']}" if cell["reason"] else cell["status"]


def render_benchmark(path: Path) -> Report:
    """The report on a benchmark.json, as .csv, .json and .md.

    RunError: nothing was measured. UsageError: as `study_files.read_benchmark`.
    """
    measured = study_files.read_benchmark(path)
    cells: list[Any] = [*measured["cells"], *measured["accuracy"]]
    if all(cell["status"] != "ok" for cell in cells):
        raise RunError(f"nothing was measured; the first: {place(cells[0])}, {reason(cells[0])}")
    rows = results(measured)
    report = Report("Benchmark")
    report.json("benchmark", measured)
    add_conditions(report, measured)
    timed = [row for row in rows.values() if row["ms"]]
    if timed:
        report.csv("benchmark", COLUMNS, [list(map(row.get, COLUMNS)) for row in rows.values()])
    add_tables(report, measured, rows)
    missing = []
    if measured["status"] == "interrupted":
        missing.append(("The run was interrupted", "cells are missing, or lack repeats"))
    for cell in cells:
        if cell["status"] != "ok":
            name = place(cell) if "runs" in cell else f"{place(cell)}, accuracy"
            missing.append((name, reason(cell)))
    if missing:
        report.section("Not measured")
        report.facts(missing)
    return report


def add_conditions(report: Report, measured: Benchmark) -> None:
    """Adds what was measured where, and the versions that ran without their kernels."""
    conditions = [run_facts.describe(measured | {"training": {}}, "batch_size", "sequence_length")]
    if measured["packages"]:
        packages = [f"{name} {version}" for name, version in measured["packages"].items()]
        conditions.append(", ".join(packages))
    report.text(
        f"{'; '.join(conditions)}. Numbers are medians. Processes of each cell: "
        f"{measured['repeats']}; timed steps in each: {duration(measured)}.",
        f"Made by `{measured['command']}` on {measured['date']}.",
    )
    host = run_facts.host([measured])
    if host:
        report.text(f"{host[0].upper()}{host[1:]}.")
    without = {}
    for cell in measured["cells"]:
        for run in cell["runs"]:
            if "no_kernels" in run:
                without[cell["model"]] = run["no_kernels"]
    if without:
        why = next(iter(without.values()))
        report.text(
            f"No Triton kernels in {', '.join(without)}: {why}. PyTorch's operations were measured "
            "in their place."
        )


def duration(measured: Benchmark) -> str:
    """How many steps each process timed, or for how long."""
    seconds = measured.get("timed_seconds")
    if not seconds:
        return str(measured["steps"])
    load = measured.get("load_seconds", 0)
    return f"at least {measured['steps']} and {seconds:g} s, after {load:g} s of load"


def add_tables(report: Report, measured: Benchmark, rows: Rows) -> None:
    """Adds a section for each metric that was asked for."""
    metrics = measured["metrics"]
    first = measured["models"][0]
    heads = [*SHAPE.values()]
    if "throughput" in metrics:
        report.section(f"Throughput (and speed-up against {first})", "throughput")
        header = ["ms/step", "p20 to p80", "ms/step of each process", "tokens/s", "speed-up"]
        numbers = table_rows(rows, "ms", "spread", "processes", "tokens_per_second", "speedup")
        report.table(heads + header, numbers)
        noise = {place(row).replace(",", ""): row for row in rows.values() if row["ms"]}
        report.text(*run_facts.noise(noise))
        header, states = tables.filled([*heads, *STATE.values()], table_rows(rows, *STATE))
        if len(header) > len(heads):
            report.section("GPU during the timed steps", "state")
            report.table(header, states)
    if "memory" in metrics:
        kinds = [run["kind"] for cell in measured["cells"] for run in cell["runs"]]
        kind = kinds[0] if kinds else ""
        report.section(f"Peak memory of the timed steps, {kind} (and {first} / model)", "memory")
        report.table(heads + ["peak MiB", "ratio"], table_rows(rows, "peak_mib", "memory_ratio"))
    if "energy" in metrics:
        report.section("Energy")
        header = ["ms/step", "J/step", "mJ/token"]
        report.table(heads + header, table_rows(rows, "ms", "joules", "mj_per_token"))
    if "accuracy" in metrics:
        report.section("Accuracy")
        columns = ("model", "logits_error", "gradient_error", "gradient")
        errors = []
        for cell in measured["accuracy"]:
            by_seed = cell.get("gradients_together", [])
            middle = median(by_seed) if by_seed else None
            if cell["status"] == "ok":
                errors.append([*map(cell.get, columns), middle, len(by_seed) or None])
        header = ["model", "error of the logits", "largest of a gradient", "which is of"]
        report.table([*header, "all gradients together", "seeds"], errors)
        report.text(
            f"At B {measured['batch_sizes'][0]}, S {measured['sequence_lengths'][0]} only: the "
            "largest difference over the largest element, of all seeds, against the first version "
            "in float64. The gradients together are one vector: the length of the difference over "
            "its own, the median of the seeds. The first version's own errors are rounding."
        )


def results(measured: Benchmark) -> Rows:
    """COLUMNS (None if not measured), and columns that only tables show."""
    rows: Rows = {}
    for cell in measured["cells"]:
        row: Row = {name: cell.get(name) for name in COLUMNS}
        if cell["status"] == "ok":
            runs = pandas.DataFrame([{**run, **run["step_ms"]} for run in cell["runs"]])
            medians: dict[Any, float] = runs.median(numeric_only=True).dropna().to_dict()
            row |= medians
            tokens = row["batch_size"] * row["sequence_length"]
            row |= {
                "ms": row["median"],
                "repeats": len(runs),
                "spread": tables.spread(row),
                "processes": ", ".join(f"{ms:.4g}" for ms in runs["median"]),
                "tokens_per_second": tokens / row["median"] * 1e3,
            }
            if "joules" in row:
                row["mj_per_token"] = 1e3 * row["joules"] / tokens
        rows[row["model"], row["batch_size"], row["sequence_length"]] = row
    for (_, batch_size, length), row in rows.items():
        base = rows[measured["models"][0], batch_size, length]
        if base["ms"] and row["ms"]:
            row["speedup"] = base["ms"] / row["ms"]
            row["memory_ratio"] = base["peak_mib"] / row["peak_mib"]
    return rows


def table_rows(rows: Rows, *names: str) -> list[list[Any]]:
    """The shape of each measured cell, and its numbers of these names."""
    return [list(map(row.get, (*SHAPE, *names))) for row in rows.values() if row["ms"]]
