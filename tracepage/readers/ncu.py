"""Reads kernels from the output of NVIDIA's Nsight Compute (`ncu --csv`), in either of its forms:

    details (default)   a row per launch and metric: name, unit and value of the metric are columns
    --page raw          a row per launch, a column per metric, and a row of units below the header

Output of the profiled program and messages of ncu (`==PROF== ...`) may stand above the table, and
messages below it. Numbers are written as the locale does: 1,234.5 or 1.234,5 or 1'234.5 or 1 234,5.
"""

import re
from operator import itemgetter
from pathlib import Path

from tracepage import files
from tracepage.errors import UsageError
from tracepage.readers.csv_table import read_rows
from tracepage.readers.source import SERIALIZED_NOTE, Source, make_source

import pandas

HEADER = re.compile(r'^("?ID"?,)?"?Process ID"?,.*"?Kernel Name"?,.*$', re.MULTILINE)
LAUNCH_COLUMNS = ("Process ID", "ID", "Kernel Name")
METRIC_COLUMNS = ("Metric Name", "Metric Unit", "Metric Value")
# Columns of the raw page that identify a launch.
NOT_METRICS = {*LAUNCH_COLUMNS, "Context", "Stream", "Device", "CC"}
NANOSECONDS = {
    "ns": 1,
    "nsecond": 1,
    "us": 1e3,
    "usecond": 1e3,
    "ms": 1e6,
    "msecond": 1e6,
    "s": 1e9,
    "second": 1e9,
}
PREFIX = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
DECIMAL_COMMA = re.compile(
    r"-?(\d{1,3}(\.\d{3})+,\d+|\d{1,3}(\.\d{3}){2,}|\d+,(\d{1,2}|\d{4,})|0\d*,\d+)"
)
# Apostrophes, and spaces of any width, between groups of digits; one of another encoding than UTF-8
# was read as U+FFFD. The file's commas and points are then decimal.
GROUP = re.compile(r"['\u2019\u02bc\ufffd\s]")
GROUPED = re.compile(rf"-?\d{{1,3}}({GROUP.pattern}\d{{3}})+([.,]\d+)?")
SWAP = str.maketrans(",.", ".,")
CLOCK_NOTE = (
    "ncu fixes the clocks and flushes the caches by default: its times can be longer than in a run"
)

Value = tuple[tuple[str, ...], str, str, str]  # launch, metric, unit, text


def read_ncu(path: Path) -> Source:
    text = files.read_text(path)
    table = HEADER.search(text)
    assert table, "what `load_kernels` takes for a file of ncu has a header"
    header, *body = read_rows(path, text[table.start() :])
    details = "Metric Name" in header
    needed = LAUNCH_COLUMNS + METRIC_COLUMNS if details else LAUNCH_COLUMNS
    missing = [name for name in needed if name not in header]
    if missing:
        raise UsageError(
            f"{path} has no column {missing[0]!r}: export it again with ncu --page raw --csv"
        )
    values = _details(header, body) if details else _raw(path, header, body)
    # In `12 (3; 9)` the value of each instance follows the total.
    totals = [text.split(" (")[0] for *_, text in values]
    if any(map(GROUPED.fullmatch, totals)):
        totals = [GROUP.sub("", text).replace(",", ".") for text in totals]
    elif any(map(DECIMAL_COMMA.fullmatch, totals)):
        totals = [text.translate(SWAP) for text in totals]
    launches: dict[tuple[str, ...], dict[str, float]] = {}  # In the order of the file.
    for (launch, metric, unit, _), text in zip(values, totals, strict=True):
        value, base = _in_base_unit(text, unit)
        if base and "__" not in metric:  # `Memory Throughput` is in % and in byte/s.
            metric = f"{metric} ({base})"
        launches.setdefault(launch, {})[metric] = value
    counters = pandas.DataFrame(list(launches.values())).dropna(axis="columns", how="all")
    columns = counters.filter(regex=r"^Duration \(ns\)$|^gpu__time_duration\.").columns
    durations = counters[columns[0]] if len(columns) else pandas.Series([float("nan")])
    if launches and durations.isna().any():
        raise UsageError(
            f"{path} has launches without a duration: add gpu__time_duration.sum to ncu --metrics"
        )
    if launches and (durations < 0).any():
        raise UsageError(f"{path} is damaged: it has a negative {columns[0]}")
    calls = {
        "name": [name for *_, name in launches],
        "duration_ns": durations[: len(launches)],
    }
    return make_source("ncu", path, calls, counters=counters, notes=(SERIALIZED_NOTE, CLOCK_NOTE))


def _details(header: list[str], body: list[list[str]]) -> list[Value]:
    """The value in each row but those of ncu's advice, which have no metric."""
    launch = itemgetter(*map(header.index, LAUNCH_COLUMNS))
    of_metric = itemgetter(*map(header.index, METRIC_COLUMNS))
    return [(launch(row), *of_metric(row)) for row in body if of_metric(row)[0]]


def _raw(path: Path, header: list[str], body: list[list[str]]) -> list[Value]:
    """The value in each cell; the row below the header holds the units."""
    launch = itemgetter(*map(header.index, LAUNCH_COLUMNS))
    if body and launch(body[0])[1]:
        raise UsageError(
            f"{path} has no row of units below its header: "
            "export it again with ncu --page raw --csv"
        )
    metrics = [column for column, name in enumerate(header) if name not in NOT_METRICS]
    return [
        (launch(row), header[column], body[0][column], row[column])
        for row in body[1:]
        for column in metrics
    ]


def _in_base_unit(text: str, unit: str) -> tuple[float, str]:
    """A metric, written as `1,234.5`, in its base unit, and that unit; NaN for text."""
    factor = NANOSECONDS.get(unit, 1.0)
    base = "ns" if unit in NANOSECONDS else unit
    if unit[:1] in PREFIX:
        base = unit[1:]
        factor = PREFIX[unit[:1]]
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        number = float("nan")
    return number * factor, base.replace("/second", "/s")
