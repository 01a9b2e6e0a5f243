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
from tracepage.readers.chrome_trace import CLOCK_ERROR_US, Trace, busy
from tracepage.records.step_profile import Profile
from tracepage.show import tables
from tracepage.show.report import Report
from tracepage.views import profile_summary

import numpy
import pandas

ROWS = 30  # in the table of kernels
HOW_TO_READ = (
    "The critical path goes back from the kernel that ends last, each time to the one that ended last before the start. "
    "`us on path` leaves out what overlaps the kernel before."
)


def step(trace: Trace) -> pandas.DataFrame | None:
    """The step whose time from the first start to the last end is the median; None if no kernel ran
    in any.
    """
    ran = trace.kernels[trace.kernels.step >= 0]
    if ran.empty:
        return None
    grouped = ran.assign(end_us=ran.start_us + ran.duration_us).groupby("step")
    windows = (grouped.end_us.max() - grouped.start_us.min()).sort_values()
    return measure(ran[ran.step == windows.index[(len(windows) - 1) // 2]])


def measure(kernels: pandas.DataFrame) -> pandas.DataFrame:
    """These rows of `Trace.kernels`, the kernels, copies and fills of a step, in order of start,
    with start_us from the first start, and: end_us, on_path, path_us (its time on the path less
    what overlaps the kernel before; 0 beside the path), gap_us (before it on the path, else 0).
    """
    kernels = kernels.sort_values(["start_us", "duration_us"], kind="stable").reset_index(drop=True)
    kernels["start_us"] -= kernels.start_us.iloc[0]
    kernels["end_us"] = kernels.start_us + kernels.duration_us
    starts = kernels.start_us.to_numpy()
    ends = kernels.end_us.to_numpy()
    path = critical_path(kernels)
    before = [starts[path[0]], *ends[path[:-1]]]
    kernels["on_path"] = False
    kernels["path_us"] = 0.0
    kernels["gap_us"] = 0.0
    kernels.loc[path, "on_path"] = True
    kernels.loc[path, "path_us"] = ends[path] - numpy.maximum(starts[path], before)
    kernels.loc[path, "gap_us"] = numpy.maximum(0.0, starts[path] - before)
    return kernels


def critical_path(kernels: pandas.DataFrame) -> list[int]:
    """Positions of the kernels on the critical path, from the first to the last; start_us, end_us
    and stream are read.
    """
    starts = kernels.start_us.to_numpy()
    ends = kernels.end_us.to_numpy()
    streams = kernels.stream.to_numpy()
    path = [int(ends.argmax())]
    while True:
        last = path[-1]
        on_stream = (streams == streams[last]) & (ends < ends[last])
        before = (starts < starts[last]) & (on_stream | (ends <= starts[last] + CLOCK_ERROR_US))
        if not before.any():
            return path[::-1]
        path.append(int(numpy.where(before, ends, -numpy.inf).argmax()))


def summary(kernels: pandas.DataFrame) -> dict[str, float]:
    """Numbers of a step (of `measure`) by their labels, in the order in which they are read."""
    window = float(kernels.end_us.max())
    busy_us = busy(kernels.start_us.to_numpy(), kernels.end_us.to_numpy())
    return {
        "from the first start to the last end, us": window,
        "kernels, copies and fills": len(kernels),
        "streams": kernels.stream.nunique(),
        "on the critical path": int(kernels.on_path.sum()),
        "their time, us": float(kernels.path_us.sum()),
        "gaps between them, us": float(kernels.gap_us.sum()),
        "no kernel runs, us": window - busy_us,
        "busy, %": 100 * busy_us / window if window else 100.0,
        "sum of all kernels, us": float(kernels.duration_us.sum()),
    }


def kernel_table(kernels: pandas.DataFrame) -> tables.Table:
    """Header and a row per kernel and phase, the longest on the critical path first, then those
    that are not on it.
    """
    rows: list[list[Any]] = []
    for key, own in kernels.groupby(["name", "phase"], sort=False):
        name, phase = map(str, key)
        spans = own.groupby("span").duration_us.sum().sort_values(ascending=False).index
        rows.append(
            [
                kernel_names.short_name(name),
                phase,
                ", ".join(spans),
                len(own),
                int(own.on_path.sum()),
                float(own.duration_us.sum()),
                float(own.path_us.sum()),
                float(own.gap_us.sum()),
            ]
        )
    header = ["kernel", "phase", "span", "launches", "on path", "us", "us on path", "gaps us"]
    return header, sorted(rows, key=lambda row: (-row[6], -row[5]))


def report(path: Path, profile: Profile, sort_by: str | None = None) -> Report:
    """Conditions, summary and kernels of a step; the summary of the profile instead where no kernel
    of a GPU ran. The trace lies beside the profile at `path`; `sort_by` is as in
    `profile_summary.report`.
    """
    result = Report("Critical path of a training step")
    trace = graph_replays.load(path.parent / profile["trace"])
    measured = step(trace)
    if measured is None:
        result.text("No kernel of a GPU ran in this profile, so it has no critical path.")
        profile_summary.add_section(result, path, profile, sort_by)
        return result
    result.text(f"{profile_summary.conditions(profile)}. Command: `{profile['run']['command']}`")
    result.table(["quantity", "of the step"], summary(measured).items())
    header, rows = kernel_table(measured)
    title = f"Kernels of the step, {min(ROWS, len(rows))} of {len(rows)}, those longest on the critical path first"
    result.table(header, rows, title, code=["kernel"], least=["launches", "phase"], top=ROWS)
    result.text(HOW_TO_READ)
    return result
