"""The table of kernels that the reader of every file makes, and helpers to read CSV files."""

import csv
import io
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tracepage import files
from tracepage.errors import UsageError
from tracepage.terminal import counted, shortened

import numpy
import pandas

COLUMNS = ("name", "category", "start_ns", "duration_ns", "calls", "span", "phase")
COPY = re.compile(r"Memcpy|__amd_rocclr_copyBuffer")
FILL = re.compile(r"Memset|__amd_rocclr_fillBuffer")
SERIALIZED_NOTE = "counters are collected kernel by kernel, so the time between kernels is the profiler's: no busy share"


@dataclass(frozen=True)
class Kernels:
    """The kernels in one file: a row per launch, or per kernel name where the source has only sums
    (`start_ns` is NaN then).

    Columns of `table`: name (in full), category (`kernel`, `memcpy`, `memset` or `operator`),
    start_ns (after the first start in the file), duration_ns (of all calls of the row), calls, span
    and phase (empty where the source has no spans). Counters of ncu are in ns, byte, byte/s and hz,
    without prefixes.
    """

    table: pandas.DataFrame
    # a column per counter of the source, rows as in `table`; no columns where it has none
    counters: pandas.DataFrame
    source: str  # a key of `load_kernels.READERS`
    path: Path  # the file that was read
    steps: int | None = None  # of training that the rows come from; None if the source does not say
    notes: tuple[str, ...] = ()  # caveats, for a reader of the numbers

    @property
    def are_operators(self) -> bool:
        return bool((self.table.category == "operator").any())


def build(
    source: str,
    path: Path,
    columns: Mapping[str, Iterable],
    counters: pandas.DataFrame | None = None,
    **rest,
) -> Kernels:
    """Fills in the columns of COLUMNS that a source leaves out; name and duration_ns are needed,
    and start_ns counts from any origin. A row is one call by default. UsageError: nothing takes any
    time.
    """
    table = pandas.DataFrame(
        {"calls": 1, "start_ns": float("nan"), "span": "", "phase": ""}
        | {name: list(values) for name, values in columns.items()}
    )
    if len(table) and not table.duration_ns.any():
        raise UsageError(
            f"{path} holds no durations: all of its {counted(len(table), 'row')} take no time"
        )
    # before it becomes float: nanoseconds of a clock can exceed a double
    table["start_ns"] -= table.start_ns.min()
    if "category" not in table:
        table["category"] = [category(name) for name in table.name]
    types = {"start_ns": float, "duration_ns": float, "calls": int}
    counters = pandas.DataFrame(index=table.index) if counters is None else counters
    return Kernels(table[list(COLUMNS)].astype(types), counters, source, path, **rest)


def several_gpus(count: int, counted: str = "GPUs") -> tuple[str, ...]:
    """The note on a source with launches of so many GPUs, if it has those of several."""
    note = f"it has launches of {count} {counted}: busy is the time in which any of them is, and a gap one of all"
    return (note,) if count > 1 else ()


def category(name: str) -> str:
    """`memcpy`, `memset` or `kernel`; some sources list copies and fills among the kernels."""
    return "memcpy" if COPY.match(name) else "memset" if FILL.match(name) else "kernel"


def rows(path: Path, text: str) -> list[list[str]]:
    """Header and rows of a CSV table, all of one length, without blank lines and ncu's messages,
    which begin with `==`.
    """
    try:
        found = [
            row
            for row in csv.reader(io.StringIO(text, newline=None))
            if row and not row[0].startswith("==")
        ]
    except csv.Error as error:
        raise UsageError(f"{path} is cut off or damaged: {error}") from error
    for number, row in enumerate(found, 1):
        if len(row) != len(found[0]):
            raise UsageError(
                f"{path} is cut off or damaged: row {number} has {len(row)} fields, the header {len(found[0])}"
            )
    return found


def read_frame(path: Path) -> pandas.DataFrame:
    """A CSV file; every cell is text."""
    header, *body = rows(path, files.read_text(path)) or [[]]
    return pandas.DataFrame(body, columns=header)


def numbers(path: Path, frame: pandas.DataFrame, column: str, gaps: bool = False) -> pandas.Series:
    """A column of `read_frame(path)` as numbers: times, counts and rates, none of which is
    negative; with `gaps` a cell may be empty or no number, and becomes NaN.
    """
    if column not in frame:
        raise UsageError(f"{path} is damaged: it has no column {column}")
    found = pandas.to_numeric(frame[column], errors="coerce")
    # a file of rocprof-compute has 2,000 columns: pandas would take seconds for the comparisons
    values = found.to_numpy()
    fits = ((values >= 0) & (values < float("inf"))) | (gaps & numpy.isnan(values))
    if not fits.all():
        row = int(fits.argmin())
        problem = "is negative" if found.iloc[row] < 0 else "is not a number"
        cell = shortened(str(frame[column].iloc[row]), 60)
        raise UsageError(f"{path} is damaged: {column} in row {row + 2} {problem}: {cell!r}")
    return found
