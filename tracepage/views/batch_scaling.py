"""How a step grows with the batch size, from the profiles of runs that differ in nothing else.

Straight lines a + b B over the batch size B, by least squares, go through the step times and the
peaks of memory. Of time, a is what every step costs (issuing operations, the optimizer, Python),
and throughput tends to S / b. Of memory, a is weights, gradients and optimizer state, and b the
activations of one sample.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tracepage.errors import UsageError
from tracepage.records import run_record, step_profile
from tracepage.records.run_record import TimedRun
from tracepage.show import run_facts
from tracepage.show.report import Report
from tracepage.show.tables import format_number

import numpy

COLUMNS = ["B", "ms/step", "p20", "p80", "tokens/s", "peak MiB", "TFLOP/s", "MFU %"]
COLUMNS += ["% of measured GEMM"]


class Curve(NamedTuple):
    """A polynomial by its factors of x^0, x^1, ..., and the largest distance of a point from it.

    The distance is None where the polynomial goes through any such points.
    """

    factors: tuple[float, ...]
    residual: float | None


def fit(points: Sequence[tuple[float, float]], degree: int) -> Curve:
    """The polynomial through points (x, y) by least squares, rounded to a millionth."""
    x, y = numpy.array(points, dtype=float).T
    factors = numpy.polyfit(x, y, degree)
    residual = None
    if len(points) > degree + 1:
        residual = round(float(numpy.abs(y - numpy.polyval(factors, x)).max()), 6)
    return Curve(tuple(round(float(factor), 6) + 0.0 for factor in factors[::-1]), residual)


def render_batch_scaling(folders: Sequence[Path]) -> Report:
    """Compares the newest profile of each folder: a table (and CSV), and the fitted lines."""
    runs = read_sizes(folders)
    rows: list[dict[str, Any]] = [
        {**run_facts.columns(run), **run["step_ms"], "B": run["training"]["batch_size"]}
        for run in runs
    ]
    time = fit([(row["B"], row["ms/step"]) for row in rows], 1)
    memory = fit([(row["B"], row["peak MiB"]) for row in rows], 1)
    report = Report("Batch scaling")
    conditions = run_facts.describe(runs[0], "batch_size")
    report.text(f"{runs[0]['version']}, {conditions}. Step times are medians.")
    report.table(COLUMNS, [list(map(row.get, COLUMNS)) for row in rows], csv="batch_scaling")
    report.text(f"Step time: t(B) = {equation(time, 'ms')}.")
    report.text(f"Memory: m(B) = {equation(memory, 'MiB')}.")
    slope = time.factors[1]
    if slope > 0:
        tokens = runs[0]["training"]["sequence_length"] * run_record.processes(runs[0])
        limit = f"{tokens / slope * 1e3:,.0f} tokens/s"
        report.text(f"Throughput tends to S / b = {limit} on this line.")
    if time.residual is None or memory.residual is None:
        report.text(
            "A line fits any two points, so nothing shows whether it describes other batch sizes: "
            "add a third."
        )
    else:
        distances = f"{format_number(time.residual)} ms, {format_number(memory.residual)} MiB"
        report.text(f"Largest distance of a point from its line: {distances}.")
    report.text(*run_facts.doubts({f"B = {run['training']['batch_size']}": run for run in runs}))
    return report


def read_sizes(folders: Sequence[Path]) -> list[TimedRun]:
    """The run records of the newest profile in each of two folders or more, by batch size.

    UsageError: they differ in something else, or two have one batch size.
    """
    paths = [step_profile.find(folder) for folder in folders]
    records = [(path, step_profile.read(path)["run"]) for path in paths]
    runs = [run for _, run in records]
    first_path, first = records[0]
    for path, run in records[1:]:
        conditions = _conditions(first), _conditions(run)
        run_record.require_equal((first_path, path), conditions, "the batch size")
    if len({run["training"]["batch_size"] for run in runs}) != max(2, len(runs)):
        raise UsageError(
            "--profile-dirs: give two folders or more, with one profile for each batch size"
        )
    return sorted(runs, key=lambda run: run["training"]["batch_size"])


def _conditions(run: TimedRun) -> dict[str, Any]:
    conditions = {"version": run["version"]} | run_record.conditions(run, "batch size")
    return conditions | run.get("settings", {})


def equation(line: Curve, unit: str) -> str:
    """A straight line over B, as text."""
    fixed, slope = line.factors
    sign = "-" if slope < 0 else "+"
    return f"{format_number(fixed)} {unit} {sign} {format_number(abs(slope))} {unit} x B"
