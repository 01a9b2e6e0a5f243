"""Memory over the profiled steps, and the allocations that are alive at the peak.

They come from the allocator's events in a trace. Memory that was allocated before the profile began
(weights, and the optimizer state after the first step) appears only in the total of a GPU's
allocator; on a CPU the total starts at zero.
"""

from collections import defaultdict

from tracepage.readers.trace import Trace
from tracepage.show import plots, tables
from tracepage.show.report import PAGE_INCHES, Report

import numpy
import pandas
from matplotlib.figure import Figure

EARLIER = "allocated before the profile"
COLOURS = {
    EARLIER: "0.75",
    "forward": plots.SKY,
    "backward": plots.VERMILION,
    "optimizer": plots.GREEN,
    "other": plots.PURPLE,
}
# in the figure; of more events, the one with the largest total in each interval is drawn
POINTS = 1500
MIB = 2**20
HOW_TO_READ = (
    "In the forward pass memory climbs, because each layer keeps tensors for its backward pass. In the backward pass it falls "
    "while gradients take their place. The optimizer adds its state in the first step, and temporary tensors in each step. "
    "On a CPU the count starts at zero with the profile."
)


def _alive(
    trace: Trace,
) -> tuple[pandas.DataFrame, list[dict[str, int]], dict[tuple[str, str], int]]:
    """Follows the allocations of the device: the GPU's where there are any, else the CPU's.

    Returns the events, the bytes alive after each event by the phase that allocated them, and at
    the peak by (span, phase).
    """
    on_gpu = trace.memory[trace.memory.device == "gpu"]
    events = on_gpu if len(on_gpu) else trace.memory
    alive: dict[int | str, tuple[str, str, int]] = {}  # by address
    by_phase = dict.fromkeys(COLOURS, 0)
    steps = []
    at_peak: dict[tuple[str, str], int] = defaultdict(int)
    first_peak = events.total_bytes.to_numpy().argmax()
    columns = (events[name] for name in ("bytes", "address", "total_bytes", "span", "phase"))
    for i, (size, address, total, span, phase) in enumerate(zip(*columns, strict=True)):
        if size > 0:
            alive[address] = (span, phase, size)
            by_phase[phase] += size
        elif address in alive:
            _, phase, size = alive.pop(address)
            by_phase[phase] -= size
        steps.append(by_phase | {EARLIER: max(0, total - sum(by_phase.values()))})
        if i == first_peak:
            for span, phase, size in alive.values():
                at_peak[span, phase] += size
    return events, steps, at_peak


def at_peak(trace: Trace) -> tuple[int, list[tuple[str, str, int]]]:
    """Bytes at the peak, and (span, phase, bytes) of the allocations alive then, the largest first."""
    events, _, added = _alive(trace)
    peak = int(events.total_bytes.max())
    rows = [(span, phase, size) for (span, phase), size in added.items()]
    if (earlier := peak - sum(added.values())) > 0:
        rows.append((EARLIER, "", earlier))
    return peak, sorted(rows, key=lambda row: -row[2])


def figure(trace: Trace) -> Figure:
    """Areas of the allocated MiB over time, stacked by the phase that allocated them."""
    events, steps, _ = _alive(trace)
    begin = events.time_ns.min()
    unit, factor = tables.time_unit((events.time_ns.max() - begin) / 1e6)
    times = (events.time_ns.to_numpy() - begin) / 1e6 * factor
    totals = events.total_bytes
    bins = (times / (times[-1] or 1) * (POINTS - 1)).astype(int)
    kept = totals.reset_index(drop=True).groupby(bins).idxmax()
    names = [name for name in COLOURS if any(step[name] for step in steps)]
    areas = numpy.array([[steps[i][name] for i in kept] for name in names]) / MIB
    result = plots.new(PAGE_INCHES, 3.4)
    axes = result.add_subplot()
    axes.stackplot(
        times[kept], areas, labels=names, colors=[COLOURS[name] for name in names], step="post"
    )
    for start in trace.steps.start_ns:
        axes.axvline((start - begin) / 1e6 * factor, color="0.3", linewidth=0.8, linestyle=":")
    axes.set(
        xlabel=f"{unit} since the first event (dotted: a step begins)",
        ylabel="allocated, MiB",
        xlim=(0, times[-1] or 1),
    )
    axes.set_ylim(0, 1.05 * totals.max() / MIB)
    result.legend(
        loc="outside upper center", ncols=3, fontsize=8, title="allocated in", title_fontsize=8
    )
    return result


def add_peak(result: Report, trace: Trace) -> None:
    """Adds memory over time, and the allocations alive at the peak."""
    peak, rows = at_peak(trace)
    result.text(HOW_TO_READ)
    result.figure(
        lambda: figure(trace),
        "memory",
        "Allocated memory over the profiled steps, by the phase that allocated it",
    )
    table = [
        [span, phase, round(size / MIB, 4), round(100 * size / (peak or 1), 4)]
        for span, phase, size in rows
    ]
    title = f"Alive at the peak of {tables.format_number(peak / MIB)} MiB"
    result.table(["allocated in", "phase", "MiB", "% of peak"], table, title)
