"""CSV files of profilers: rows of one length, and columns of numbers that can be."""

import csv
import io
from pathlib import Path

from tracepage import files
from tracepage.errors import UsageError
from tracepage.terminal import shortened

import numpy
import pandas


def read_rows(path: Path, text: str) -> list[list[str]]:
    """Header and rows of a CSV table, all of one length, without blank lines and ncu's messages,
    which begin with `==`.
    """
    try:
        lines = list(csv.reader(io.StringIO(text, newline=None)))
    except csv.Error as error:
        raise UsageError(f"{path} is cut off or damaged: {error}") from error
    rows = [row for row in lines if row and not row[0].startswith("==")]
    for number, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            raise UsageError(
                f"{path} is cut off or damaged: row {number} has {len(row)} fields, "
                f"the header {len(rows[0])}"
            )
    return rows


def read_frame(path: Path) -> pandas.DataFrame:
    """A CSV file; every cell is text."""
    header, *body = read_rows(path, files.read_text(path)) or [[]]
    return pandas.DataFrame(body, columns=header)


def numbers(path: Path, frame: pandas.DataFrame, column: str, gaps: bool = False) -> pandas.Series:
    """A column of `read_frame(path)` as numbers: times, counts and rates, none of which is
    negative; with `gaps` a cell may be empty or no number, and becomes NaN.
    """
    if column not in frame:
        raise UsageError(f"{path} is damaged: it has no column {column}")
    series = pandas.to_numeric(frame[column], errors="coerce")
    # A file of rocprof-compute has 2,000 columns: pandas would take seconds for the comparisons.
    values = series.to_numpy()
    fits = ((values >= 0) & (values < float("inf"))) | (gaps & numpy.isnan(values))
    if not fits.all():
        row = int(fits.argmin())
        problem = "is negative" if values[row] < 0 else "is not a number"
        cell = shortened(str(frame[column].iloc[row]), 60)
        raise UsageError(f"{path} is damaged: {column} in row {row + 2} {problem}: {cell!r}")
    return series
