"""Reads the events of a Chrome trace; of one of PyTorch's profiler only what an analysis needs of
each.

Times are microseconds as the profiler wrote them, with their fractions. Events whose times cannot
be are left out and counted.
"""

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracepage import files
from tracepage.errors import UsageError
from tracepage.terminal import counted, shortened

import ijson
import numpy
import pandas

# of events, by their category in lower case; PyTorch's first profilers wrote Operator, Runtime,
# Kernel and Memcpy
KINDS = {
    "operator": re.compile(r"cpu_op|operator"),
    "annotation": re.compile(r"user_annotation"),
    "launch": re.compile(r"(\w+_)?(runtime|driver)"),  # also xpu_runtime and privateuse1_runtime
    "kernel": re.compile(r"(\w+_)?kernel|mtia_ccp_events"),
    "memcpy": re.compile(r"(gpu_)?memcpy"),
    "memset": re.compile(r"(gpu_)?memset"),
}
DEVICE = ("kernel", "memcpy", "memset")
# see `_far`; FEW is a share of all events
FAR = 1000
FEW = 0.01
LONGEST = 1e15  # us, 30 years
# no kernel ends after that many later ones of its stream; one that was launched early overlaps the
# one before it
ENCLOSED = 2
MEMORY = ("Bytes", "Addr", "Total Allocated", "Device Type")


@dataclass(eq=False, slots=True)
class Event:
    """An operator, an annotation, a call of the GPU's runtime (kind `launch`), an allocation
    (`memory`), or work of a GPU.

    The first fields are read, the others follow from the events around this one (see
    `chrome_trace`).
    """

    kind: str
    name: str
    thread: tuple[Any, Any]  # process and thread; of a GPU's work, its first is the GPU
    start: float
    duration: float
    correlation: int | str | None = None  # of a launch and its work
    stream: int | str | None = None
    number: int | None = None  # an operator's sequence number
    shapes: str = "[]"  # an operator's or annotation's inputs, as JSON
    types: str = "[]"
    # bytes (a release: below 0), address, total, `cpu` or `gpu`
    memory: tuple[int, str, int, str] | None = None
    operator: "Event | None" = None  # innermost enclosing operator
    span: str | None = None
    phase: str | None = None
    step: int = -1
    row: int = -1  # of an operator, in the table of operators
    children_us: float = 0.0
    device_us: float = 0.0
    self_device_us: float = 0.0
    allocated_bytes: int = 0
    # it calls the operator that does its work, of the same name and shapes or of those in PASSED_ON
    repeated: bool = False

    @property
    def end(self) -> float:
        return self.start + self.duration


def events(path: Path) -> Iterator[Any]:
    """The events of a .json or .json.gz file, one at a time, so that any file takes the memory of a
    few of them.

    They are the list under the key `traceEvents`, or the file is the list, whose end may be
    missing. UsageError: it is no JSON.
    """
    is_list = False
    try:
        with files.opened(path) as file:
            is_list = file.read(1000).lstrip()[:1] == b"["
            file.seek(0)
            yield from ijson.items(file, "item" if is_list else "traceEvents.item", use_float=True)
    except ijson.JSONError as error:
        if is_list and isinstance(error, ijson.IncompleteJSONError):
            return
        files.read_json(path)  # says where
        raise UsageError(
            f"{path} is not JSON or is cut off: {str(error).splitlines()[0]}"
        ) from error


@functools.cache
def kind(category: str) -> str:
    """A key of KINDS, or an empty string."""
    return next(
        (found for found, pattern in KINDS.items() if pattern.fullmatch(category.lower())), ""
    )


def is_of_pytorch(path: Path) -> bool:
    """Whether there are operators of PyTorch, or work of a GPU."""
    return any(
        isinstance(event, dict) and kind(str(event.get("cat"))) in ("operator", *DEVICE)
        for event in events(path)
    )


def read(path: Path) -> tuple[list[Event], list[Event], tuple[str, ...]]:
    """The events of the host and of the device in order of start, the outermost first, and notes on
    those that were left out.
    """
    found: list[Event] = []
    damaged: list[str] = []
    shared: dict[Any, Any] = {}  # most names, threads and shapes occur often: one object for each
    for event in events(path):
        try:
            if made := _event(event, shared):
                found.append(made)
        except (KeyError, TypeError, ValueError, AttributeError):
            damaged.append(str(event.get("name")))
    found.sort(key=lambda event: (event.start, -event.duration))
    device = [event for event in found if event.kind in DEVICE]
    if len({event.thread[0] for event in device}) > 1:  # each numbers its streams by itself
        for event in device:
            event.stream = f"{event.stream} of GPU {event.thread[0]}"
    far = _far(found)
    long = _longer_than_the_next(device)
    left_out = {
        "without a name, a time or a possible duration": damaged,
        "far outside the time of the others": [event.name for event in far],
        f"that would run longer than the next {ENCLOSED} of their stream": [
            event.name for event in long - far
        ],
    }
    notes = [
        f"left out: {counted(len(names), 'event')} {why}, such as {shortened(names[0], 60)}"
        for why, names in left_out.items()
        if names
    ]
    kept = [event for event in found if event not in far | long] if far | long else found
    return (
        [event for event in kept if event.kind not in DEVICE],
        [event for event in kept if event.kind in DEVICE],
        tuple(notes),
    )


def _event(event: Any, shared: dict[Any, Any]) -> Event | None:
    """What is needed of an event; None where that is nothing. KeyError, TypeError, ValueError,
    AttributeError: it is damaged.
    """
    if not isinstance(event, dict):
        return None
    is_memory = event.get("name") == "[memory]"
    found = "memory" if is_memory else kind(str(event.get("cat"))) if event.get("ph") == "X" else ""
    if not found:
        return None
    name, thread = (
        shared.setdefault(each, each) for each in (str(event["name"]), (event["pid"], event["tid"]))
    )
    result = Event(
        found, name, thread, float(event["ts"]), 0.0 if is_memory else float(event["dur"])
    )
    arguments = event.get("args") or {}
    if not 0 <= result.duration < LONGEST:
        raise ValueError
    if is_memory:
        size, address, total, device = (arguments[key] for key in MEMORY)
        result.memory = int(size), str(address), int(total), "gpu" if int(device) else "cpu"
    elif found in ("operator", "annotation"):
        result.number = arguments.get("Sequence number")
        shapes = [
            shape if isinstance(shape, list) else [] for shape in arguments.get("Input Dims") or []
        ]
        inputs = json.dumps(shapes), json.dumps(list(map(str, arguments.get("Input type") or [])))
        result.shapes, result.types = (shared.setdefault(text, text) for text in inputs)
    else:
        result.correlation = arguments.get("correlation")
        result.stream = arguments.get("stream")
    # TypeError: these are lists or objects
    hash((result.correlation, result.stream, result.number))
    return result


def _far(found: list[Event]) -> set[Event]:
    """The events that are FAR times as far from the others as the middle half of these lasts, if
    they are FEW.
    """
    if not found:
        return set()
    starts = numpy.array([event.start for event in found])
    first = numpy.percentile(starts, 25, method="higher")
    last = numpy.percentile(starts, 75, method="lower")
    distance = abs(starts - numpy.median(starts)) / max(last - first, 1000.0)
    far = {event for event, times in zip(found, distance, strict=True) if times > FAR}
    return far if len(far) <= max(1, FEW * len(found)) else set()


def _longer_than_the_next(device: list[Event]) -> set[Event]:
    """Events that end after the next ENCLOSED of their own stream."""
    frame = pandas.DataFrame(
        [(event.stream, event.end) for event in device], columns=["stream", "end"]
    )
    long = frame.end > frame.groupby("stream").end.shift(-ENCLOSED)
    return {device[row] for row in frame.index[long]}
