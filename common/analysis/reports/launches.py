"""What a table of kernels says about launches: how many, how long, how many of them short, and how busy they keep the GPU.

The table is the same whichever profiler saw the kernels (`kernel_table`), and `load` makes it from any of their files
(`kernel_files`, which lists them).
"""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.analysis.output import tables
from common.analysis.profiles import kernel_names, load_kernels
from common.analysis.profiles.kernel_table import ONE_BY_ONE, Kernels
from common.files import writable_file, write_text

if TYPE_CHECKING:
    import pandas


SHORT_NS = 10_000  # a launch costs the host some us: below this, the GPU may be waiting for the next one


class Row(NamedTuple):
    """All calls of one kernel; min_ns and max_ns of one call are None where the source has only sums."""

    name: str
    category: str
    calls: int
    total_ns: float
    mean_ns: float
    min_ns: float | None
    max_ns: float | None
    share: float  # of the time of all kernels, 0 to 1


def summary(kernels: Kernels) -> list[Row]:
    """A row per kernel name, the longest total first."""
    grouped = kernels.table.groupby(["name", "category"], sort=False)
    added = grouped.agg(calls=("calls", "sum"), total=("duration_ns", "sum"), low=("min_ns", "min"), high=("max_ns", "max"))
    whole = added.total.sum() or 1.0
    rows = [
        Row(*key, int(calls), total, total / calls, None if low != low else low, None if high != high else high, total / whole)
        for key, calls, total, low, high in zip(added.index, added.calls, added.total, added.low, added.high, strict=True)
    ]
    return sorted(rows, key=lambda row: -row.total_ns)


class Gaps(NamedTuple):
    """From the first start to the last end: window_ns = busy_ns (at least one kernel runs) + the sum of idle_ns."""

    window_ns: float
    busy_ns: float
    idle_ns: "Any"  # numpy array: each time between kernels in which none runs, in order


def gaps(kernels: Kernels) -> Gaps | None:
    """Time between consecutive kernels; None without starts, or where counters were collected, kernel by kernel.

    Kernels that overlap, on several queues, streams or devices in one file, count once: busy is the union of their intervals.
    """
    import numpy

    table = kernels.table.sort_values("start_ns")
    if table.start_ns.isna().any() or ONE_BY_ONE in kernels.notes:
        return None
    starts = table.start_ns.to_numpy()
    ends = numpy.maximum.accumulate(starts + table.duration_ns.to_numpy())
    between = starts[1:] - ends[:-1]
    idle, window = between[between > 0], ends[-1] - starts[0]
    return Gaps(float(window), float(window - idle.sum()), idle)


def text(kernels: Kernels, rows: list[Row], top: int) -> str:
    """What was read, how many launches, how long and how busy, how many are short, and the `top` first of `rows`."""
    on_cpu, table = kernels.are_operators, kernels.table
    calls, total = int(table.calls.sum()), table.duration_ns.sum()
    per_step = f", {calls / kernels.steps:,.0f} a step (steps: {kernels.steps})" if kernels.steps else ""
    kinds = [f"{kind} {count:,}" for kind, count in table.groupby("category", sort=False).calls.sum().items()]
    facts = [
        ("source", f"{kernels.source}, {kernels.path}"),
        *(("note", note) for note in kernels.notes),
        ("operator calls" if on_cpu else "launches", f"{calls:,}{per_step}" + (f"; {', '.join(kinds)}" if kinds[1:] else "")),
        ("distinct", f"{len(rows)} {'operators' if on_cpu else 'kernels'}"),
        ("total time", f"{total / 1e6:,.3f} ms"),
        ("busy", _busy(kernels)),
        (f"under {SHORT_NS / 1e3:.0f} us", _short(table, calls, total)),
    ]
    header = ["operator" if on_cpu else "kernel", "calls", "total us", "mean us", "min us", "max us", "share %"]
    body = [
        [kernel_names.short_name(row.name), row.calls, *(None if ns is None else ns / 1e3 for ns in row[3:7]), 100 * row.share]
        for row in rows[:top]
    ]
    lines = [f"{fact:<15} {figures}" for fact, figures in facts]
    return "\n".join([*lines, "", f"longest {len(body)} of {len(rows)}", tables.text(header, body)])


def _busy(kernels: Kernels) -> str:
    found = gaps(kernels)
    if found is None:
        why = "see the note" if ONE_BY_ONE in kernels.notes else "this source has sums, and no times at which kernels start"
        return f"left out: {why}"
    share = 100 * found.busy_ns / found.window_ns if found.window_ns else 100.0
    line = f"{share:.1f} % of {found.window_ns / 1e6:,.3f} ms from the first start to the last end; gaps: {len(found.idle_ns):,}"
    if not len(found.idle_ns):
        return line
    median, longest = statistics.median(found.idle_ns), max(found.idle_ns)
    return f"{line}, median {median / 1e3:,.1f} us, longest {longest / 1e3:,.1f} us"


def _short(table: "pandas.DataFrame", calls: int, total: float) -> str:
    """Calls under SHORT_NS. Where a row holds many calls, all count by their mean."""
    short = table[table.duration_ns < SHORT_NS * table.calls]
    count, time = int(short.calls.sum()), short.duration_ns.sum()
    by_mean = "" if (table.calls == 1).all() else ", by the mean of each kernel"
    shares = f"{100 * count / calls:.1f} % of them, {100 * time / (total or 1):.1f} % of the time"
    return f"{count:,}: {shares}{by_mean} (launch-bound candidates)"


def analyze(trace_file: Path, top: int, csv_out: Path | None) -> str:
    """The text for a terminal; writes every kernel into `csv_out`, with its full name and times in ns.

    Raises:
        UsageError: there are no kernels in `trace_file`, or `csv_out` cannot be written.
    """
    kernels = load_kernels.load(trace_file)
    rows = summary(kernels)
    result = text(kernels, rows, top)
    if csv_out is None:
        return result
    writable_file(csv_out, "--csv-out")
    write_text(csv_out, tables.csv_text(Row._fields, rows))
    return f"{result}\n\n{csv_out}"
