"""Reads the events of a Chrome trace; of one of PyTorch's profiler only what an analysis needs of
each.

Times become whole nanoseconds since the first event. Events whose times cannot be are left out and
counted.
"""

import functools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from tracepage import files
from tracepage.errors import UsageError
from tracepage.terminal import counted, progress, shortened

import ijson
import numpy
import pandas

# Kinds of events by their category in lower case; PyTorch's first profilers wrote Operator,
# Runtime, Kernel and Memcpy.
KINDS = {
    "operator": re.compile(r"cpu_op|operator"),
    "annotation": re.compile(r"user_annotation"),
    "launch": re.compile(r"(\w+_)?(runtime|driver)"),  # Also xpu_runtime and privateuse1_runtime.
    "kernel": re.compile(r"(\w+_)?kernel|mtia_ccp_events"),
    "memcpy": re.compile(r"(gpu_)?memcpy"),
    "memset": re.compile(r"(gpu_)?memset"),
    "frame": re.compile(r"python_function"),
}
DEVICE = ("kernel", "memcpy", "memset")
FAR = 1000  # See `_far`.
FEW = 0.01  # A share of all events.
LONGEST = 10**18  # ns, 30 years
# No kernel ends after that many later ones of its stream; one that was launched early overlaps the
# one before it.
ENCLOSED = 2
FRAME_NS = 100_000  # A trace with stacks has millions of frames; shorter ones explain no wait.
MEMORY = ("Bytes", "Addr", "Total Allocated", "Device Type")
DEVICE_PROPERTIES = {
    "deviceProperties.item.id": "id",
    "deviceProperties.item.name": "name",
    "deviceProperties.item.numSms": "multiprocessors",
    "deviceProperties.item.totalGlobalMem": "memory",
}
# What an event that lacks something, or holds what it cannot, raises.
DAMAGED = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError)


@dataclass(eq=False, slots=True)
class Event:
    """An operator, an annotation, a call of the GPU's runtime (kind `launch`), an allocation
    (`memory`), a function of Python (`frame`), or work of a GPU; times in ns.

    The first fields are read, the others follow from the events around this one (see
    `chrome_trace`).
    """

    kind: str
    name: str
    thread: tuple[Any, Any]  # Process and thread; of a GPU's work, its first is the GPU.
    start: int
    duration: int
    correlation: int | str | None = None  # The same for a launch and its work.
    stream: int | str | None = None
    blocks: int = 0  # Of a kernel's grid; 0 where the trace does not tell.
    number: int | None = None  # An operator's sequence number.
    shapes: str = "[]"  # An operator's or annotation's inputs, as JSON.
    types: str = "[]"
    # Bytes (a release: below 0), address, total, `cpu` or `gpu`.
    memory: tuple[int, str, int, str] | None = None
    operator: "Event | None" = None  # The innermost enclosing operator.
    span: str | None = None
    phase: str | None = None
    step: int = -1
    row: int = -1  # An operator's, in the table of operators.
    children_ns: int = 0
    device_ns: int = 0
    self_device_ns: int = 0
    allocated_bytes: int = 0
    # It calls the operator that does its work: of the same name and shapes, or by PASSED_ON.
    repeated: bool = False

    @property
    def end(self) -> int:
        return self.start + self.duration


class Events(NamedTuple):
    """The content of a Chrome trace."""

    host: list[Event]  # In order of start, the outermost first; so is `device`.
    device: list[Event]
    frames: list[Event]  # Functions of Python that take FRAME_NS or longer, in the same order.
    notes: tuple[str, ...]  # On events that were left out.
    devices: list[dict[str, Any]]  # See `read_devices`.
    # All events as they are in the file, where none is an operator of PyTorch or work of a GPU.
    others: list[Any] | None


def raw_events(path: Path) -> Iterator[Any]:
    """The events of a .json or .json.gz file, one at a time, so that any file takes the memory of a
    few of them.

    They are the list under the key `traceEvents`, or the file is the list, whose end may be
    missing. Numbers that are not whole are Decimal, since a double of us loses ns after 50 days.
    UsageError: it is no JSON.
    """
    is_list = False
    try:
        with files.opened(path) as file:
            is_list = file.read(1000).lstrip()[:1] == b"["
            file.seek(0)
            yield from ijson.items(file, "item" if is_list else "traceEvents.item")
    except ijson.JSONError as error:
        if is_list and isinstance(error, ijson.IncompleteJSONError):
            return
        files.read_json(path)  # Its error says where.
        reason = str(error).splitlines()[0]
        raise UsageError(f"{path} is not JSON or is cut off: {reason}") from error


def read_devices(path: Path) -> list[dict[str, Any]]:
    """The GPUs that a trace names before its events: `id`, `name`, `multiprocessors` and `memory`
    in bytes, as far as it tells them.
    """
    devices: list[dict[str, Any]] = []
    with files.opened(path) as file:
        for place, event, value in ijson.parse(file):
            if place in ("traceEvents", "item"):
                break
            if place == "deviceProperties.item" and event == "start_map":
                devices.append({})
            elif place in DEVICE_PROPERTIES:
                devices[-1][DEVICE_PROPERTIES[place]] = value
    return devices


@functools.cache
def kind(category: str) -> str:
    """A key of KINDS, or an empty string."""
    kinds = [name for name, pattern in KINDS.items() if pattern.fullmatch(category.lower())]
    return kinds[0] if kinds else ""


def nanoseconds(us: Any) -> int:
    """A time in us, which may be text. One of DAMAGED: it is no time."""
    return round(1000 * Decimal(us))


def read_events(path: Path) -> Events:
    """Reads a trace once. Its damaged events are left out, and named in notes."""
    events: list[Event] = []
    damaged: list[str] = []
    others: list[Any] | None = []
    shared: dict[Any, Any] = {}  # Most names, threads and shapes occur often: one object for each.
    with progress(f"reading {path}"):
        for record in raw_events(path):
            if not isinstance(record, dict):
                continue
            event_kind = kind(str(record.get("cat")))
            if event_kind == "operator" or event_kind in DEVICE:
                others = None
            if others is not None:
                others.append(record)
            try:
                event = _event(record, event_kind, shared)
                if event:
                    events.append(event)
            except DAMAGED:
                damaged.append(str(record.get("name")))
    events.sort(key=lambda event: (event.start, -event.duration))
    device = [event for event in events if event.kind in DEVICE]
    if len({event.thread[0] for event in device}) > 1:  # Each GPU numbers its streams by itself.
        for event in device:
            event.stream = f"{event.stream} of GPU {event.thread[0]}"
    far = _far(events)
    long = _longer_than_the_next(device) - far
    left_out = {
        "without a name, a time or a possible duration": damaged,
        "far outside the time of the others": [event.name for event in far],
        f"that would run longer than the next {ENCLOSED} of their stream": [
            event.name for event in long
        ],
    }
    notes = [
        f"left out: {counted(len(names), 'event')} {why}, such as {shortened(names[0], 60)}"
        for why, names in left_out.items()
        if names
    ]
    kept = [event for event in events if event not in far and event not in long]
    origin = kept[0].start if kept else 0
    for event in kept:
        event.start -= origin
    frames = [event for event in kept if event.kind == "frame"]
    host = [event for event in kept if event.kind not in (*DEVICE, "frame")]
    device = [event for event in kept if event.kind in DEVICE]
    return Events(host, device, frames, tuple(notes), read_devices(path), others)


def _event(record: dict[str, Any], event_kind: str, shared: dict[Any, Any]) -> Event | None:
    """What is needed of an event; None where that is nothing. One of DAMAGED: it is damaged."""
    is_memory = record.get("name") == "[memory]"
    if is_memory:
        event_kind = "memory"
    elif not event_kind or record.get("ph") != "X":
        return None
    name = str(record["name"])
    thread = (record["pid"], record["tid"])
    duration = 0 if is_memory else nanoseconds(record["dur"])
    if not 0 <= duration < LONGEST:
        raise ValueError
    if event_kind == "frame" and duration < FRAME_NS:
        return None
    event = Event(
        event_kind,
        shared.setdefault(name, name),
        shared.setdefault(thread, thread),
        nanoseconds(record["ts"]),
        duration,
    )
    arguments = record.get("args") or {}
    if is_memory:
        size, address, total, device = (arguments[key] for key in MEMORY)
        event.memory = int(size), str(address), int(total), "gpu" if int(device) else "cpu"
    elif event_kind in ("operator", "annotation"):
        event.number = arguments.get("Sequence number")
        dimensions = arguments.get("Input Dims") or []
        shapes = json.dumps([shape if isinstance(shape, list) else [] for shape in dimensions])
        types = json.dumps(list(map(str, arguments.get("Input type") or [])))
        event.shapes = shared.setdefault(shapes, shapes)
        event.types = shared.setdefault(types, types)
    else:
        event.correlation = arguments.get("correlation")
        event.stream = arguments.get("stream")
        event.blocks = math.prod(arguments.get("grid") or [0])
    hash((event.correlation, event.stream, event.number))  # TypeError: they are lists or objects.
    return event


def _far(events: list[Event]) -> set[Event]:
    """The events that are FAR times as far from the others as the middle half of these lasts, if
    they are FEW.
    """
    if not events:
        return set()
    starts = numpy.array([event.start for event in events], dtype=float)
    first = numpy.percentile(starts, 25, method="higher")
    last = numpy.percentile(starts, 75, method="lower")
    distance = abs(starts - numpy.median(starts)) / max(last - first, 1e6)
    far = {event for event, times in zip(events, distance, strict=True) if times > FAR}
    return far if len(far) <= max(1, FEW * len(events)) else set()


def _longer_than_the_next(device: list[Event]) -> set[Event]:
    """Events that end after the next ENCLOSED of their own stream."""
    ends = [(event.stream, float(event.end)) for event in device]
    frame = pandas.DataFrame(ends, columns=["stream", "end"])
    long = frame.end > frame.groupby("stream").end.shift(-ENCLOSED)
    return {device[row] for row in frame.index[long]}
