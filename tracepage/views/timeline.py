"""The events of a trace as the page of a run draws them: a track for each thread of the host and
each stream of a GPU, and first one of the GPU's waits, by cause.

A timeline is plain JSON, times in ns since its first event:

    tracks     name, and the events in order of start: six numbers each (start less the one before,
               duration, and positions in names, groups and details; the last is the delay since a
               kernel's launch, an operator's self time, or the duration of the whole wait that
               this is a piece of; -1: none)
    names, groups, details        what these positions stand for; the colour of an event is that of
                                  its group
    steps      name, start and end of each profiled step
    begin      the first event's time in the trace
    left_out   how many events there were beyond EVENTS: the shortest of the host
"""

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from tracepage.causes import rank_waits
from tracepage.causes.host_time import copy_cause
from tracepage.causes.rank_waits import Job
from tracepage.causes.waits import single_waits
from tracepage.readers.kernel_names import communication_or, kind, short_name
from tracepage.readers.source import Source
from tracepage.readers.trace import Trace
from tracepage.readers.trace_events import Event
from tracepage.show import step_causes
from tracepage.show.rank_sections import WAITING
from tracepage.span_names import FORWARD_SPANS, SPANS

import numpy
import pandas

EVENTS = 50_000
STRETCH_NS = 10_000  # Pauses between kernels that are shorter are not drawn in the page of ranks.
WAITS = "GPU waits, by cause"
NOT_COUNTED = "not counted"  # Kernels of an earlier step that still run when the first one begins.
STREAMS = 8  # A GPU with more has one track: each branch of a graph can have several.


class Bar(NamedTuple):
    """An event as it is drawn; times in ns."""

    track: str
    start: int
    duration: int
    name: str
    group: str
    detail: tuple[Hashable, ...] = ()  # Pairs of a label and a value.
    beside: int = -1  # A kernel's delay, an operator's self time, or a whole wait.
    on_device: bool = False


def spanned(trace: Trace) -> bool:
    """Whether the model's spans are in the trace."""
    calls = trace.kernels if len(trace.kernels) else trace.operators
    return bool(calls.span.isin(FORWARD_SPANS).any())


def draw_trace(trace: Trace, gaps: pandas.DataFrame) -> dict[str, Any]:
    """The profiled steps, or all of a trace without steps; groups are spans or, where there are
    none, kinds of work. `gaps` are those of `StepCauses`.
    """
    stepped = len(trace.steps) > 0
    with_spans = spanned(trace)
    kernels = trace.kernels
    if stepped:
        ends = kernels.start_ns + kernels.duration_ns
        late = (ends > trace.steps.start_ns.min()) & (kernels.start_ns < trace.step_times()[0][0])
        kernels = kernels[late | (kernels.step >= 0)]
    forward = {event.thread for event in trace.host if event.phase == "forward"}
    streams = kernels.stream.nunique()
    host = [
        event for event in trace.host if event.kind != "memory" and (event.step >= 0 or not stepped)
    ]
    count = len(gaps) + len(kernels) + len(host)
    if len(gaps):
        gaps = gaps.assign(whole_ns=single_waits(gaps).duration_ns.transform("sum"))
    # A bar for each of millions of events would take longer than the rest of the page.
    gaps = gaps.iloc[_longest(gaps.duration_ns, EVENTS)]
    kernels = kernels.iloc[_longest(kernels.duration_ns, EVENTS)]
    durations = pandas.Series([event.duration for event in host])
    bars = [_wait(gap) for gap in gaps.itertuples()]
    for place in _longest(durations, EVENTS - len(gaps) - len(kernels)):
        event = host[place]
        track = f"host, thread {event.thread[1]}"
        if event.thread not in forward:
            track += " (backward)"
        bars.append(_host_bar(track, event, with_spans))
    names = trace.operators.name.to_numpy()
    shapes = trace.operators.input_shapes.to_numpy()
    delays = kernels.launch_delay_ns.fillna(-1).astype(int)
    rows: Iterable[Any] = kernels.itertuples()
    for kernel, delay in zip(rows, delays, strict=True):
        group = copy_cause(kernel.name).replace("_", " ")
        group = group or _group(kernel.name, kernel.span, with_spans)
        if stepped and kernel.step < 0:
            group = NOT_COUNTED
        track = f"GPU, {streams} streams" if streams > STREAMS else f"GPU, stream {kernel.stream}"
        operator: tuple[Any, Any] = ("", "")
        if kernel.operators:
            operator = (names[kernel.operators[0]], shapes[kernel.operators[0]])
        bars.append(
            Bar(
                track,
                kernel.start_ns,
                kernel.duration_ns,
                short_name(kernel.name),
                group,
                _detail(kernel.name, kernel.span, kernel.phase, *operator),
                delay,
                on_device=True,
            )
        )
    steps = [(f"step {number}", *times) for number, times in enumerate(trace.step_times(), 1)]
    return from_bars(bars, steps) | {"left_out": max(count - EVENTS, 0)}


def _longest(durations: pandas.Series, count: int) -> numpy.ndarray:
    """Places of the longest events, in order; of equal ones the last."""
    order = numpy.argsort(durations.astype(int), kind="stable")
    return numpy.sort(order[max(len(order) - count, 0) :])


def draw_ranks(job: Job) -> dict[str, Any]:
    """Two tracks for each rank on one clock: when it computes, and its collectives, each in two
    parts, of which the first waits for the last rank.
    """
    bars = []
    for number, rank in job.ranks.items():
        for start, end in rank_waits.stretches(rank.computing, STRETCH_NS) + job.clocks[number]:
            bars.append(_rank_bar(number, "computing", start, end - start, "computing"))
    calls: Iterable[Any] = job.collectives.itertuples()
    for call in calls:
        number = int(call.rank)
        arrived = call.start_ns + call.wait_ns
        wait = f"{call.name}, waits for rank {call.last}"
        bars.append(_rank_bar(number, wait, call.start_ns, call.wait_ns, WAITING))
        bars.append(_rank_bar(number, call.name, arrived, call.end_ns - arrived, "communication"))
    return from_bars([bar for bar in bars if bar.duration > 0])


def _rank_bar(number: int, name: str, start: float, duration: float, group: str) -> Bar:
    kind = "computing" if group == "computing" else "collectives"
    track = f"rank {number:>3}, {kind}"
    return Bar(track, int(start), int(duration), name, group, on_device=True)


def _wait(gap: Any) -> Bar:
    """A row of `StepCauses.gaps`, with `whole_ns`."""
    pairs = [("operator", gap.operator), ("span", gap.span), ("line", gap.line)]
    return Bar(
        WAITS,
        int(gap.start_ns),
        int(gap.duration_ns),
        step_causes.wait_name(gap),
        gap.cause.replace("_", " "),
        tuple(pair for pair in pairs if pair[1]),
        int(gap.whole_ns),
        on_device=True,
    )


def _host_bar(track: str, event: Event, with_spans: bool) -> Bar:
    place = (track, event.start, event.duration, event.name)
    if event.kind == "launch":
        return Bar(*place, "launch calls" if "Launch" in event.name else "runtime calls")
    if event.kind == "annotation":
        return Bar(*place, event.name if with_spans and event.name in SPANS else "other")
    span = event.span or ""
    detail = _detail("", span, event.phase or "", "", event.shapes)
    self_time = event.duration - event.children_ns
    return Bar(*place, _group(event.name, span, with_spans), detail, self_time)


def _group(name: str, span: str, with_spans: bool) -> str:
    return communication_or(name, span if with_spans else kind(name))


def _detail(name: str, span: str, phase: str, operator: str, shapes: str) -> tuple:
    pairs = [("span", span), ("phase", phase), ("operator", operator), ("shapes", shapes)]
    if name != short_name(name):
        pairs.append(("in full", name))
    return tuple(pair for pair in pairs if pair[1] not in ("", "[]"))


def draw_calls(source: Source) -> dict[str, Any]:
    """The launches of a profiler's table, by kind of work."""
    calls: Iterable[Any] = source.table.itertuples()
    bars = [
        Bar(
            "GPU",
            int(call.start_ns),
            int(call.duration_ns),
            short_name(call.name),
            kind(call.name),
            (("in full", call.name),),
            on_device=True,
        )
        for call in calls
    ]
    return from_bars(bars)


def draw_events(source: Source) -> dict[str, Any]:
    """All events of another program's trace, by category."""
    table = source.table[["track", "start_ns", "duration_ns", "name", "category", "detail"]]
    return from_bars([Bar(*event) for event in table.itertuples(index=False)])


def from_bars(bars: list[Bar], steps: Iterable[tuple[str, int, int]] = ()) -> dict[str, Any]:
    kept = sorted(bars, key=lambda bar: (bar.on_device, bar.duration))[-EVENTS:]
    kept.sort(
        key=lambda bar: (bar.track != WAITS, bar.on_device, bar.track, bar.start, -bar.duration)
    )
    begin = min((bar.start for bar in kept), default=0)
    names: dict[str, int] = {}
    groups: dict[str, int] = {}
    details: dict[Hashable, int] = {}
    tracks: dict[str, list[int]] = {}
    last: dict[str, int] = {}
    for bar in kept:
        tracks.setdefault(bar.track, []).extend(
            (
                bar.start - last.get(bar.track, begin),
                bar.duration,
                names.setdefault(bar.name, len(names)),
                groups.setdefault(bar.group, len(groups)),
                details.setdefault(bar.detail, len(details)),
                bar.beside,
            )
        )
        last[bar.track] = bar.start
    return {
        "tracks": [
            {"name": " ".join(name.split()), "events": events} for name, events in tracks.items()
        ],
        "names": list(names),
        "groups": list(groups),
        "details": list(details),
        "steps": [(name, start - begin, end - begin) for name, start, end in steps],
        "begin": begin,
        "left_out": len(bars) - len(kept),
    }
