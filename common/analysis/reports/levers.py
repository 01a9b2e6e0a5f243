"""The report on Version 4's levers, from the JSON file that version4_ultra_fused/benchmark_levers.py writes."""

from pathlib import Path

from common import files
from common.analysis.output.report import Report
from common.records.kernel_files import Lever, Levers


def analyze(path: Path) -> Report:
    """The report on a levers.json."""
    return report(files.read(path, Levers)["rows"])


def report(rows: list[Lever]) -> Report:
    """A row for each way to do a lever's work, a column for each preset: the median in microseconds; then every spread."""
    cells: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        cells.setdefault((row["lever"], row["way"]), {})[row["preset"] or "own sizes"] = row["us"]["median"]
    columns = list(dict.fromkeys(column for found in cells.values() for column in found))
    result = Report("Levers")
    result.section("Medians")
    result.table(
        ["lever", "way", *(f"{column}, us" for column in columns)],
        [[*key, *map(found.get, columns)] for key, found in cells.items()],
    )
    result.section("Spread")
    result.table(
        ["preset", "lever", "way", "us", "p20", "p80"],
        [[row["preset"], row["lever"], row["way"], *(row["us"][key] for key in ("median", "p20", "p80"))] for row in rows],
    )  # fmt: skip
    return result
