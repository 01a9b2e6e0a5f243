"""The critical path of a training step on a GPU: the kernels that its time consists of, and the
gaps between them.

A step with branches runs kernels side by side, so the sum of their times is not its time. The
critical path is one chain of kernels and gaps from the first kernel to the end of the step. A
shorter kernel on it can make the step shorter; one beside it cannot. A trace has no dependencies,
so the path follows from times. It starts at the kernel that ends last and goes back. The
predecessor of a kernel is the one that ended last before it started, or one that started before it
on its stream and overlaps it a little. Where two kernels end at nearly the same time, the real
dependency may be on the other one.

All numbers are of one step, the one of median time among those that were profiled. Kernels of a
captured step have the spans of the eager step (`graph_replays`).
"""

from pathlib import Path
from typing import Any

from tracepage.readers import graph_replays, kernel_names
from tracepage.readers.trace import CLOCK_ERROR_NS, Trace, busy
from tracepage.records.step_profile import Profile
from tracepage.show import tables
from tracepage.show.report import Report
from tracepage.views import profile_summary

import numpy
import pandas

ROWS = 30  # in the table of kernels
HOW_TO_READ = (
    "The critical path goes back from the kernel that ends last, each time to the one that ended "
    "last before the start. `us on path` leaves out what overlaps the kernel before."
)


def step(trace: Trace) -> pandas.DataFrame | None:
    """The step whose time from the first start to the last end is the median; None if no kernel ran
    in any.
    """
    ran = trace.kernels[trace.kernels.step >= 0]
    if ran.empty:
        return None
    grouped = ran.assign(end_ns=ran.start_ns + ran.duration_ns).groupby("step")
    windows = (grouped.end_ns.max() - grouped.start_ns.min()).sort_values()
    return measure(ran[ran.step == windows.index[(len(windows) - 1) // 2]])


def measure(kernels: pandas.DataFrame) -> pandas.DataFrame:
    """These rows of `Trace.kernels`, the kernels, copies and fills of a step, in order of start,
    with start_ns from the first start, and: end_ns, on_path, path_ns (its time on the path less
    what overlaps the kernel before; 0 beside the path), gap_ns (before it on the path, else 0).
    """
    kernels = kernels.sort_values(["start_ns", "duration_ns"], kind="stable").reset_index(drop=True)
    kernels["start_ns"] -= kernels.start_ns.iloc[0]
    kernels["end_ns"] = kernels.start_ns + kernels.duration_ns
    starts = kernels.start_ns.to_numpy()
    ends = kernels.end_ns.to_numpy()
    path = critical_path(kernels)
    before = [starts[path[0]], *ends[path[:-1]]]
    kernels["on_path"] = False
    kernels["path_ns"] = 0
    kernels["gap_ns"] = 0
    kernels.loc[path, "on_path"] = True
    kernels.loc[path, "path_ns"] = ends[path] - numpy.maximum(starts[path], before)
    kernels.loc[path, "gap_ns"] = numpy.maximum(0, starts[path] - before)
    return kernels


def critical_path(kernels: pandas.DataFrame) -> list[int]:
    """Positions of the kernels on the critical path, from the first to the last; start_ns, end_ns
    and stream are read.
    """
    starts = kernels.start_ns.to_numpy()
    ends = kernels.end_ns.to_numpy()
    streams = kernels.stream.to_numpy()
    path = [int(ends.argmax())]
    while True:
        last = path[-1]
        on_stream = (streams == streams[last]) & (ends < ends[last])
        before = (starts < starts[last]) & (on_stream | (ends <= starts[last] + CLOCK_ERROR_NS))
        if not before.any():
            return path[::-1]
        path.append(int(numpy.where(before, ends, -numpy.inf).argmax()))


def summary(kernels: pandas.DataFrame) -> dict[str, float]:
    """Numbers of a step (of `measure`) by their labels, in the order in which they are read."""
    window = int(kernels.end_ns.max())
    busy_ns = busy(kernels.start_ns.to_numpy(), kernels.end_ns.to_numpy())
    return {
        "from the first start to the last end, us": window / 1e3,
        "kernels, copies and fills": len(kernels),
        "streams": kernels.stream.nunique(),
        "on the critical path": int(kernels.on_path.sum()),
        "their time, us": kernels.path_ns.sum() / 1e3,
        "gaps between them, us": kernels.gap_ns.sum() / 1e3,
        "no kernel runs, us": (window - busy_ns) / 1e3,
        "busy, %": 100 * busy_ns / window if window else 100.0,
        "sum of all kernels, us": kernels.duration_ns.sum() / 1e3,
    }


def kernel_table(kernels: pandas.DataFrame) -> tables.Table:
    """Header and a row per kernel and phase, the longest on the critical path first, then those
    that are not on it.
    """
    rows: list[list[Any]] = []
    for key, calls in kernels.groupby(["name", "phase"], sort=False):
        name, phase = map(str, key)
        spans = calls.groupby("span").duration_ns.sum().sort_values(ascending=False).index
        times = calls[["duration_ns", "path_ns", "gap_ns"]].sum() / 1e3
        place = [kernel_names.short_name(name), phase, ", ".join(spans)]
        rows.append([*place, len(calls), int(calls.on_path.sum()), *times])
    header = ["kernel", "phase", "span", "launches", "on path", "us", "us on path", "gaps us"]
    return header, sorted(rows, key=lambda row: (-row[6], -row[5]))


def critical_path_report(path: Path, profile: Profile, sort_by: str | None = None) -> Report:
    """Conditions, summary and kernels of a step; the summary of the profile instead where no kernel
    of a GPU ran. The trace lies beside the profile at `path`; `sort_by` is as in
    `profile_summary.summary_report`.
    """
    report = Report("Critical path of a training step")
    kernels = step(graph_replays.load(path.parent / profile["trace"]))
    if kernels is None:
        report.text("No kernel of a GPU ran in this profile, so it has no critical path.")
        profile_summary.add_section(report, path, profile, sort_by)
        return report
    report.text(f"{profile_summary.conditions(profile)}. Command: `{profile['run']['command']}`")
    report.table(["quantity", "of the step"], summary(kernels).items())
    title = "Kernels of the step, those longest on the critical path first"
    table = kernel_table(kernels)
    report.table(*table, title, code=["kernel"], least=["launches", "phase"], top=ROWS)
    report.text(HOW_TO_READ)
    return report
