"""Kernel launches in a table of kernels: their number, their times, how many are short, and how
busy they keep the GPU.

The table is the same for every profiler (`kernel_table`); `load_kernels` lists the files that it
can come from.
"""

from pathlib import Path
from typing import NamedTuple

from tracepage.files import writable_file, write_text
from tracepage.readers import kernel_names, load_kernels
from tracepage.readers.chrome_trace import CLOCK_ERROR_US, pauses
from tracepage.readers.kernel_table import SERIALIZED_NOTE, Kernels
from tracepage.show import tables
from tracepage.show.report import Report

import numpy
import pandas

IDLE = 50  # % of a step in which no kernel runs, from which launches limit it
# a launch costs the host some us: the GPU may wait for the launch after a kernel that is shorter
# than this
SHORT_NS = 10_000


def summary(kernels: Kernels) -> pandas.DataFrame:
    """All calls of each kernel, the longest total first; `share` is of the time of all kernels, 0
    to 1.
    """
    added = kernels.table.groupby(["name", "category"], sort=False, as_index=False)[
        ["calls", "duration_ns"]
    ].sum()
    added = added.rename(columns={"duration_ns": "total_ns"}).sort_values(
        "total_ns", ascending=False, kind="stable"
    )
    return added.assign(
        mean_ns=added.total_ns / added.calls, share=added.total_ns / (added.total_ns.sum() or 1.0)
    )


class Gaps(NamedTuple):
    """The window from the first start to the last end: window_ns = busy_ns + the sum of idle_ns."""

    window_ns: float
    busy_ns: float  # at least one kernel runs
    # each interval in which no kernel runs and which the clock can tell from none, in order
    idle_ns: numpy.ndarray


def gaps(kernels: Kernels) -> Gaps | None:
    """Time between consecutive kernels; None without start times, or where counters were collected
    kernel by kernel.

    Kernels that overlap (on several queues, streams or devices in one file) count once: the busy
    time is the union of their intervals.
    """
    table = kernels.table
    if table.start_ns.isna().any() or SERIALIZED_NOTE in kernels.notes:
        return None
    starts = table.start_ns.to_numpy()
    ends = (table.start_ns + table.duration_ns).to_numpy()
    between = pauses(starts, ends)
    window = ends.max() - starts.min()
    idle = between[between > 1e3 * CLOCK_ERROR_US]
    return Gaps(float(window), float(window - idle.sum()), idle)


def idle_percent(kernels: Kernels) -> float | None:
    """The share of the time from the first kernel to the last in which none runs; None on a CPU, or
    where not known.
    """
    found = None if kernels.are_operators else gaps(kernels)
    return 100 * (1 - found.busy_ns / found.window_ns) if found and found.window_ns else None


def verdict(kernels: Kernels, idle: float | None, advice: str) -> str:
    """What limits a step, and the most that mending it gains (Amdahl's law).

    Args:
        idle: the % of the step in which no kernel runs; None where the file does not tell.
        advice: how the program of this file could wait less, as a sentence without its full stop.
    """
    if idle is not None and idle >= IDLE:
        most = f": at most {100 / (100 - idle):.1f} times as fast" if idle < 100 else ""
        slowed = "It idles less without the profiler, which slows the host."
        return f"Limited by launches: the GPU is idle for {idle:.0f} % of the step. {advice}{most}. {slowed}"
    table = kernels.table
    device, what = ("CPU", "operators") if kernels.are_operators else ("GPU", "kernels")
    ns = table.duration_ns.groupby(table.name.map(kernel_names.kind)).sum()
    share = 100 * ns.max() / (ns.sum() or 1)
    busy = "" if idle is None else f"; the GPU is idle for {idle:.0f} % of the step"
    return (
        f"Limited by the {device}'s work: {share:.0f} % of the {what}' time is {ns.idxmax()}{busy}."
    )


def report(kernels: Kernels, top: int) -> Report:
    """Source, launches, busy share and short launches, and a table of the `top` kernels that take
    longest.
    """
    what = "operator" if kernels.are_operators else "kernel"
    table = kernels.table
    rows = summary(kernels)
    calls = int(table.calls.sum())
    kinds = table.groupby("category", sort=False).calls.sum()
    per_step = (
        f", {calls / kernels.steps:,.0f} a step (steps: {kernels.steps})" if kernels.steps else ""
    )
    by_kind = (
        "; " + ", ".join(f"{kind} {count:,}" for kind, count in kinds.items())
        if len(kinds) > 1
        else ""
    )
    result = Report("Kernel launches")
    unknown = kernel_names.unknown(dict(zip(rows.name, rows.total_ns, strict=True)))
    result.facts(
        [
            ("source", f"{kernels.source}, {kernels.path}"),
            *(("note", note) for note in kernels.notes),
            (
                "operator calls" if kernels.are_operators else "launches",
                f"{calls:,}{per_step}{by_kind}",
            ),
            ("total time", _time(table.duration_ns.sum())),
            ("busy", _busy(gaps(kernels))),
            (f"under {_time(SHORT_NS)}", _short(kernels)),
            *([("of no known kind", unknown)] if unknown and not kernels.are_operators else []),
        ]
    )
    title = f"{what.capitalize()}s that take longest, {min(top, len(rows))} of {len(rows)}"
    result.table(*kernel_rows(rows, what), title, code=[what], top=top)
    return result


def kernel_rows(rows: pandas.DataFrame, what: str, steps: int = 1) -> tables.Table:
    """Header and rows of a `summary` of kernels or operators (`what`); calls and total time are
    divided by `steps`.
    """
    totals = rows.total_ns / steps
    (whole, per_whole), (single, per_single) = (
        tables.time_unit(ns.max() / 1e6) for ns in (totals, rows.mean_ns)
    )
    names = map(kernel_names.short_name, rows.name)
    columns = (
        names,
        rows.calls / steps,
        totals / 1e6 * per_whole,
        rows.mean_ns / 1e6 * per_single,
        100 * rows.share,
    )
    return [what, "calls", f"total {whole}", f"mean {single}", "share %"], [
        list(row) for row in zip(*columns, strict=True)
    ]


def _time(ns: float) -> str:
    return tables.format_time(ns / 1e6)


def _busy(found: Gaps | None) -> str:
    if found is None:
        return "left out: this source has no times of one launch after the other"
    share = 100 * found.busy_ns / found.window_ns if found.window_ns else 100.0
    line = f"{share:.1f} % of {_time(found.window_ns)} from the first start to the last end; gaps: {len(found.idle_ns):,}"
    if len(found.idle_ns):
        line += f", median {_time(float(numpy.median(found.idle_ns)))}, longest {_time(max(found.idle_ns))}"
    return line


def _short(kernels: Kernels) -> str:
    """Calls under SHORT_NS. Where a row holds many calls, their mean decides for all of them."""
    table = kernels.table
    short = table[table.duration_ns < SHORT_NS * table.calls]
    count = int(short.calls.sum())
    time = short.duration_ns.sum()
    by_mean = "" if (table.calls == 1).all() else ", by the mean of each row"
    shares = f"{100 * count / table.calls.sum():.1f} % of them, {100 * time / (table.duration_ns.sum() or 1):.1f} % of the time"
    return f"{count:,}: {shares}{by_mean} (launch-bound candidates)"


def analyze(trace_file: Path, top: int, csv_out: Path | None) -> str:
    """The text for a terminal; writes every kernel into `csv_out`, with its full name and times in
    ns.
    """
    kernels = load_kernels.load(trace_file)
    if csv_out:
        writable_file(csv_out, "--csv-out", (kernels.path,))
    text = report(kernels, top).terminal()
    if csv_out is None:
        return text
    write_text(csv_out, summary(kernels).to_csv(index=False))
    return f"{text}\n\nwritten: {csv_out}"
