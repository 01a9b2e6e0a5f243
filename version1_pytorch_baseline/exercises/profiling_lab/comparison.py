"""Records of `lab.py measure` side by side, as text and as a page with pictures."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tracepage.errors import UsageError
from tracepage.show import plots, run_facts
from tracepage.show.report import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def times(record: dict[str, Any], part: str) -> dict[str, float]:
    """The milliseconds of each measurement in a part."""
    if part == "components":
        return {result["name"]: result["time_ms"] for result in record[part]["pytorch"]}
    return {
        f"S {row['seq_len']}, {way}": ms for row in record[part] for way, ms in row["ms"].items()
    }


def report(records: Sequence[dict[str, Any]], parts: Sequence[str]) -> Report:
    """A table and pictures of each part that all records have. UsageError: their sizes differ."""
    if any(record["sizes"] != records[0]["sizes"] for record in records):
        raise UsageError(
            "the records are of different sizes (--batch-size, --seq-len, ...): measure them alike"
        )
    result = Report("Profiling lab")
    facts = [
        f"{run_facts.device(record)}, {record['precision']}, torch {record['environment']['torch']}"
        for record in records
    ]
    numbers = [str(number) for number in range(1, 1 + len(records))]
    result.facts([*zip(numbers, facts, strict=True)])
    for part in parts:
        if not all(record[part] for record in records):
            continue
        columns = [times(record, part) for record in records]
        names = [name for name in columns[0] if all(name in column for column in columns)]
        body = [
            [name, *(column[name] for column in columns), columns[0][name] / columns[-1][name]]
            for name in names
        ]
        result.section(part)
        result.table([part, *(f"{number}, ms" for number in numbers), f"1 / {numbers[-1]}"], body)
        for number, fact, column in zip(numbers, facts, columns, strict=True):
            result.figure(
                functools.partial(bars, column), f"{part}_{number}", f"{part} of {fact}, in ms"
            )
    return result


def bars(milliseconds: dict[str, float]) -> "Figure":
    """A bar for each measurement, on a logarithmic scale."""
    figure = plots.new(7, 0.6 + 0.25 * len(milliseconds))
    axes = figure.subplots()
    axes.barh(list(milliseconds), list(milliseconds.values()), color=plots.BLUE)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("ms")
    return figure
