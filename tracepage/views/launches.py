"""Kernel launches in a table of calls: their number, their times, how many are short, and how busy
they keep the GPU.

The table is the same for every profiler (`Source.table`); `load_kernels` lists the files that it
can come from.
"""

from pathlib import Path
from typing import NamedTuple

from tracepage.files import writable_file, write_text
from tracepage.readers import kernel_names, load_kernels
from tracepage.readers.source import SERIALIZED_NOTE, Source
from tracepage.readers.trace import CLOCK_ERROR_NS, pauses
from tracepage.show import step_causes, tables
from tracepage.show.report import Report

import numpy
import pandas

# A launch costs the host some us: the GPU may wait for the launch after a kernel that is shorter
# than this.
SHORT_NS = 10_000


def summary(source: Source) -> pandas.DataFrame:
    """All calls of each kernel, the longest total first; `share` is of the time of all kernels, 0
    to 1.
    """
    calls = source.table.groupby(["name", "category"], sort=False, as_index=False)
    rows = calls[["calls", "duration_ns"]].sum().rename(columns={"duration_ns": "total_ns"})
    rows = rows.sort_values("total_ns", ascending=False, kind="stable")
    rows["mean_ns"] = rows.total_ns / rows.calls
    rows["share"] = rows.total_ns / (rows.total_ns.sum() or 1.0)
    return rows


class Gaps(NamedTuple):
    """The window from the first start to the last end: window_ns = busy_ns + the sum of idle_ns."""

    window_ns: float
    busy_ns: float  # At least one kernel runs.
    # Each interval in which no kernel runs and which the clock can tell from none, in order.
    idle_ns: numpy.ndarray


def gaps(source: Source) -> Gaps | None:
    """Time between consecutive kernels; None without start times, or where counters were collected
    kernel by kernel.

    Kernels that overlap (on several queues, streams or devices in one file) count once: the busy
    time is the union of their intervals.
    """
    table = source.table
    if table.start_ns.isna().any() or SERIALIZED_NOTE in source.notes:
        return None
    starts = table.start_ns.to_numpy()
    ends = starts + table.duration_ns.to_numpy()
    between = pauses(starts, ends)
    idle = between[between > CLOCK_ERROR_NS]
    window = float(ends.max() - starts.min())
    return Gaps(window, float(window - idle.sum()), idle)


def launch_report(source: Source, top: int, verdict: str = "") -> Report:
    """Verdict, source, launches, busy share and short launches, and a table of the `top` kernels
    that take longest.
    """
    table = source.table
    rows = summary(source)
    calls = int(table.calls.sum())
    launches = f"{calls:,}"
    if source.steps:
        launches += f", {calls / source.steps:,.0f} a step (steps: {source.steps})"
    kinds = table.groupby("category", sort=False).calls.sum()
    if len(kinds) > 1:
        launches += f"; {', '.join(f'{kind} {count:,}' for kind, count in kinds.items())}"
    unknown = kernel_names.unknown(dict(zip(rows.name, rows.total_ns, strict=True)))
    facts = [
        ("source", f"{source.kind}, {source.path}"),
        *(("note", note) for note in source.notes),
        ("operator calls" if source.are_operators else "launches", launches),
        ("total time", _total(table)),
        ("busy", _busy(gaps(source))),
        (f"under {_time(SHORT_NS)}", _short(table)),
    ]
    if unknown and not source.are_operators:
        facts.append(("of no known kind", unknown))
    report = Report("Kernel launches")
    if verdict:
        report.verdict(verdict)
    report.facts(facts)
    label = "operator" if source.are_operators else "kernel"
    title = f"{label.capitalize()}s that take longest"
    report.table(*kernel_rows(rows, label), title, code=[label], top=top)
    return report


def kernel_rows(rows: pandas.DataFrame, label: str, steps: int = 1) -> tables.Table:
    """Header and rows of a `summary` of kernels or operators (`label`); calls and total time are
    divided by `steps`.
    """
    totals = rows.total_ns / steps
    whole, per_whole = tables.time_unit(totals.max() / 1e6)
    single, per_single = tables.time_unit(rows.mean_ns.max() / 1e6)
    columns = {
        label: rows.name.map(kernel_names.short_name),
        "calls": rows.calls / steps,
        f"total {whole}": totals / 1e6 * per_whole,
        f"mean {single}": rows.mean_ns / 1e6 * per_single,
        "share %": 100 * rows.share,
    }
    return tables.of_frame(pandas.DataFrame(columns))


def _time(ns: float) -> str:
    return tables.format_time(ns / 1e6)


def _total(table: pandas.DataFrame) -> str:
    """The time of all calls, and the median of one where each is a row of its own."""
    total = _time(table.duration_ns.sum())
    if (table.calls == 1).all():
        total += f"; median of one {_time(table.duration_ns.median())}"
    return total


def _busy(times: Gaps | None) -> str:
    if times is None:
        return "left out: this source has no times of one launch after the other"
    share = 100 * times.busy_ns / times.window_ns if times.window_ns else 100.0
    line = (
        f"{share:.1f} % of {_time(times.window_ns)} "
        f"from first start to last end, with copies; gaps: {len(times.idle_ns):,}"
    )
    if len(times.idle_ns):
        median = _time(float(numpy.median(times.idle_ns)))
        line += f", median {median}, longest {_time(max(times.idle_ns))}"
    return line


def _short(table: pandas.DataFrame) -> str:
    """Calls under SHORT_NS. Where a row holds many calls, their mean decides for all of them."""
    short = table[table.duration_ns < SHORT_NS * table.calls]
    count = int(short.calls.sum())
    of_calls = 100 * count / table.calls.sum()
    of_time = 100 * short.duration_ns.sum() / (table.duration_ns.sum() or 1)
    by_mean = "" if (table.calls == 1).all() else ", by the mean of each row"
    candidates = "" if (table.category == "operator").any() else " (launch-bound candidates)"
    return f"{count:,}: {of_calls:.1f} % of them, {of_time:.1f} % of the time{by_mean}{candidates}"


def write_launches(trace_file: Path, top: int, csv_out: Path | None) -> str:
    """The text for a terminal; writes every kernel into `csv_out`, with its full name and times in
    ns.
    """
    source = load_kernels.load(trace_file)
    if csv_out:
        writable_file(csv_out, "--csv-out", (source.path,))
    verdict = step_causes.attribute(source).verdict["sentence"]
    text = launch_report(source, top, verdict).terminal()
    if csv_out is None:
        return text
    write_text(csv_out, summary(source).to_csv(index=False))
    return f"{text}\n\nwritten: {csv_out}"
