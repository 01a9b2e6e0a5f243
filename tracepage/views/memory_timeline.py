"""Memory over the profiled steps, and the allocations that are alive at the peak.

They come from the allocator's events in a trace. Memory that was allocated before the profile began
(weights, and the optimizer state after the first step) appears only in the total of a GPU's
allocator; on a CPU the total starts at zero.
"""

from tracepage.readers.trace import Trace
from tracepage.show import plots, tables
from tracepage.show.plots import MIB
from tracepage.show.report import Report

import pandas
from matplotlib.figure import Figure

EARLIER = "allocated before the profile"
PHASES = [EARLIER, "forward", "backward", "optimizer", "other"]
HOW_TO_READ = (
    "In the forward pass memory climbs, because each layer keeps tensors for its backward pass. In "
    "the backward pass it falls while gradients take their place. The optimizer adds its state in "
    "the first step, and temporary tensors in each step. On a CPU the count starts at zero with "
    "the profile."
)


def followed(trace: Trace) -> pandas.DataFrame:
    """The allocations of the device: the GPU's where there are any, else the CPU's.

    An event that frees memory has the span and the phase of the event that allocated it, or the
    phase EARLIER.
    """
    on_gpu = trace.memory[trace.memory.device == "gpu"]
    events = (on_gpu if len(on_gpu) else trace.memory).reset_index(drop=True)
    owners = {}  # span and phase by address
    places = []
    columns = (events[name] for name in ("bytes", "address", "span", "phase"))
    for size, address, span, phase in zip(*columns, strict=True):
        if size > 0:
            owners[address] = (span, phase)
            places.append((span, phase))
        else:
            places.append(owners.pop(address, ("", EARLIER)))
    events[["span", "phase"]] = places
    return events


def alive_by_phase(events: pandas.DataFrame) -> pandas.DataFrame:
    """Bytes alive after each event, a column for each phase that allocated them."""
    changes = events.pivot(columns="phase", values="bytes").reindex(columns=PHASES)
    alive = changes.fillna(0).cumsum()
    known = alive.drop(columns=EARLIER).sum(axis=1)
    return alive.assign(**{EARLIER: (events.total_bytes - known).clip(lower=0)})


def at_peak(events: pandas.DataFrame) -> tuple[int, list[tuple[str, str, int]]]:
    """Bytes at the peak, and (span, phase, bytes) of the allocations alive then, largest first."""
    peak = int(events.total_bytes.max())
    before = events[: events.total_bytes.argmax() + 1]
    before = before[before.phase != EARLIER]
    alive = before.groupby(["span", "phase"], sort=False, as_index=False).bytes.sum()
    alive = alive[alive.bytes > 0]
    rows = list(alive.itertuples(index=False, name=None))
    earlier = peak - int(alive.bytes.sum())
    if earlier > 0:
        rows.append((EARLIER, "", earlier))
    return peak, sorted(rows, key=lambda row: -row[2])


def draw_areas(trace: Trace, events: pandas.DataFrame) -> Figure:
    """Areas of the allocated MiB over time, stacked by the phase that allocated them."""
    begin = events.time_ns.min()
    unit, factor = tables.time_unit((events.time_ns.max() - begin) / 1e6)
    times = (events.time_ns - begin) / 1e6 * factor
    figure = plots.memory(times, alive_by_phase(events), events.total_bytes)
    [axes] = figure.axes
    for start in trace.steps.start_ns:
        axes.axvline((start - begin) / 1e6 * factor, color="0.3", linewidth=0.8, linestyle=":")
    axes.set_xlabel(f"{unit} since the first event (dotted: a step begins)")
    return figure


def add_peak(report: Report, trace: Trace) -> None:
    """Adds memory over time, and the allocations alive at the peak."""
    events = followed(trace)
    peak, rows = at_peak(events)
    report.text(HOW_TO_READ)
    report.figure(
        lambda: draw_areas(trace, events),
        "memory",
        "Allocated memory over the profiled steps, by the phase that allocated it",
    )
    table = []
    for span, phase, size in rows:
        table.append([span, phase, round(size / MIB, 4), round(100 * size / (peak or 1), 4)])
    title = f"Alive at the peak of {tables.format_number(peak / MIB)} MiB"
    report.table(["allocated in", "phase", "MiB", "% of peak"], table, title)
