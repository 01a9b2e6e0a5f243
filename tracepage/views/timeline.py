"""The events of a trace as the page of a run draws them: a track for each thread of the host and
each stream of a GPU.

A timeline is plain JSON, times in ns since its first event:

    tracks     name, and the events in order of start: six numbers each (start less the one before, duration, and positions in
               names, groups and details; the last is the delay since a kernel's launch, or an operator's self time; -1: none)
    names, groups, details        what these positions stand for; the colour of an event is that of its group
    steps      name, start and end of each profiled step
    left_out   how many events there were beyond EVENTS: the shortest of the host
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tracepage.errors import UsageError
from tracepage.readers import trace_events
from tracepage.readers.chrome_trace import Trace
from tracepage.readers.kernel_names import communication_or, kind, short_name
from tracepage.readers.kernel_table import Kernels
from tracepage.span_names import FORWARD_SPANS, SPANS

import pandas

EVENTS = 50_000
STREAMS = 8  # a GPU with more has one track: each branch of a graph can have several


class Event(NamedTuple):
    """Times in us; `detail` holds pairs of a label and a value."""

    track: str
    start: float
    duration: float
    name: str
    group: str
    detail: tuple[Hashable, ...] = ()
    beside: float = -1e-3  # a kernel's delay, or an operator's self time
    on_device: bool = False


def spanned(trace: Trace) -> bool:
    """Whether the model's spans are in the trace."""
    return bool(
        (trace.kernels if len(trace.kernels) else trace.operators).span.isin(FORWARD_SPANS).any()
    )


def of_trace(trace: Trace) -> dict[str, Any]:
    """The profiled steps, or all of a trace without steps; groups are spans or, where there are
    none, kinds of work.
    """
    stepped = len(trace.steps) > 0
    kernels = trace.kernels
    calls = trace.operators
    kernels = kernels[kernels.step >= 0] if stepped else kernels
    with_spans = spanned(trace)

    def group(name: str, span: str) -> str:
        return communication_or(name, span if with_spans else kind(name))

    def detail(name: str, span: str, phase: str, call: tuple[str, str]) -> tuple:
        pairs = [("span", span), ("phase", phase), *zip(("operator", "shapes"), call, strict=True)]
        pairs += [("in full", name)] * (name != short_name(name))
        return tuple(pair for pair in pairs if pair[1] not in ("", "[]"))

    found: list[Event] = []
    names = calls.name.to_numpy()
    shapes = calls.input_shapes.to_numpy()
    backward = {event.thread for event in trace.host if event.phase == "forward"}
    for event in trace.host:
        if (event.step < 0 and stepped) or event.kind == "memory":
            continue
        track = f"host, thread {event.thread[1]}" + (event.thread not in backward) * " (backward)"
        place = track, event.start, event.duration, event.name
        if event.kind == "operator":
            own = detail("", event.span or "", event.phase or "", ("", event.shapes))
            found.append(
                Event(
                    *place,
                    group(event.name, event.span or ""),
                    own,
                    event.duration - event.children_us,
                )
            )
        elif event.kind == "launch":
            found.append(Event(*place, "launch" if "Launch" in event.name else "runtime call"))
        else:
            found.append(
                Event(*place, event.name if with_spans and event.name in SPANS else "other")
            )
    streams = kernels.stream.nunique()
    for name, start, duration, stream, span, phase, delay, chain in zip(
        kernels.name,
        kernels.start_us,
        kernels.duration_us,
        kernels.stream,
        kernels.span,
        kernels.phase,
        kernels.launch_delay_us,
        kernels.operators,
        strict=True,
    ):
        own = detail(name, span, phase, (names[chain[0]], shapes[chain[0]]) if chain else ("", ""))
        beside = -1e-3 if delay != delay else delay
        track = f"GPU, {streams} streams" if streams > STREAMS else f"GPU, stream {stream}"
        found.append(
            Event(track, start, duration, short_name(name), group(name, span), own, beside, True)
        )
    return _timeline(
        found, [(f"step {number}", *times) for number, times in enumerate(trace.step_times(), 1)]
    )


def of_kernels(kernels: Kernels) -> dict[str, Any] | None:
    """The launches of a profiler's table, by kind of work; None where it has no times of launches."""
    table = kernels.table
    if table.start_ns.isna().any() or kernels.are_operators:
        return None
    columns = zip(table.start_ns / 1e3, table.duration_ns / 1e3, table.name, strict=True)
    return _timeline(
        [
            Event(
                "GPU", start, us, short_name(name), kind(name), (("in full", name),), on_device=True
            )
            for start, us, name in columns
        ]
    )


def of_events(path: Path) -> tuple[dict[str, Any], pandas.DataFrame, int]:
    """All timed events of any Chrome trace, by category; a table of them, with those beyond EVENTS;
    and the number of events that are left out, because they are damaged or have no end.
    """
    labels: dict[str | tuple[str, str], str] = {}  # of a process, and of one of its threads
    found: list[tuple[tuple[str, str], Event]] = []
    begun: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    damaged = 0
    for event in trace_events.events(path):
        phase = event.get("ph") if isinstance(event, dict) else None
        process, thread = track = (
            (str(event.get("pid")), str(event.get("tid"))) if phase else ("", "")
        )
        try:
            if phase == "M" and event["name"] in ("process_name", "thread_name"):
                labels[process if event["name"] == "process_name" else track] = str(
                    event["args"]["name"]
                )
            elif phase == "B":
                begun[track].append(event)
            elif phase == "X":
                found.append((track, _timed(event, event["dur"])))
            elif phase == "E" and begun[track]:
                first = begun[track].pop()
                found.append(
                    (
                        track,
                        _timed(
                            first | event | {"ts": first["ts"]},
                            float(event["ts"]) - float(first["ts"]),
                        ),
                    )
                )
        except (KeyError, TypeError, ValueError, AttributeError):
            damaged += 1
    if not found:
        raise UsageError(f"{path} holds no timed event")
    names = {
        track: f"{labels.get(track[0], track[0])}, {labels.get(track, track[1])}"
        for track, _ in found
    }
    shared = Counter(names.values())
    made = [
        event._replace(track=names[track] + f" ({', '.join(track)})" * (shared[names[track]] > 1))
        for track, event in found
    ]
    return _timeline(made), pandas.DataFrame(made), damaged + sum(map(len, begun.values()))


def _timed(event: dict[str, Any], duration: float | str) -> Event:
    """An event on no track yet; AMD's rpd2tracing writes times as text. Errors as of `trace_events`
    where it is damaged.
    """
    if (us := float(duration)) < 0:
        raise ValueError
    detail = tuple((key, str(value)) for key, value in (event.get("args") or {}).items())
    return Event(
        "", float(event["ts"]), us, str(event["name"]), str(event.get("cat", "event")), detail
    )


def _timeline(found: list[Event], steps: Iterable[tuple[str, float, float]] = ()) -> dict[str, Any]:
    kept = sorted(found, key=lambda event: (event.on_device, event.duration))[-EVENTS:]
    begin = min((event.start for event in kept), default=0.0)
    positions: dict[str, dict[Any, int]] = {"names": {}, "groups": {}, "details": {}}

    def position(kind: str, value: Hashable) -> int:
        return positions[kind].setdefault(value, len(positions[kind]))

    def ns(us: float) -> int:
        return round(1e3 * us)

    tracks: dict[str, list[int]] = {}
    last: dict[str, int] = {}
    for event in sorted(
        kept, key=lambda event: (event.on_device, event.track, event.start, -event.duration)
    ):
        start = ns(event.start - begin)
        tracks.setdefault(event.track, []).extend(
            (
                start - last.get(event.track, 0),
                ns(event.duration),
                position("names", event.name),
                position("groups", event.group),
                position("details", event.detail),
                ns(event.beside),
            )
        )
        last[event.track] = start
    return {
        "tracks": [{"name": name, "events": events} for name, events in tracks.items()],
        **{kind: list(values) for kind, values in positions.items()},
        "steps": [(name, ns(start - begin), ns(end - begin)) for name, start, end in steps],
        "left_out": len(found) - len(kept),
    }
