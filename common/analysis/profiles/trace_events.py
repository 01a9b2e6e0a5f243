"""Reads the events of a Chrome trace of torch.profiler, each checked and reduced to what an analysis needs as soon as it is read.

Times are microseconds as the profiler wrote them, with their fractions.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common import files
from common.analysis.output.tables import shortened
from common.analysis.profiles.json_elements import elements
from common.files import Amount, Integer, Number
from common.records.step_profile import Shapes

from typing_extensions import NotRequired, TypedDict

HOST_KINDS = {"cpu_op": "operator", "user_annotation": "annotation", "cuda_runtime": "launch", "cuda_driver": "launch"}
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
NO_TRACE = "is not a trace of torch.profiler (it has no traceEvents): give a trace_*.json"

Arguments = TypedDict(
    "Arguments",
    {
        "Sequence number": NotRequired[int], "Input Dims": NotRequired[Shapes], "Input type": NotRequired[list[str]],
        "correlation": NotRequired[int | str], "stream": NotRequired[int | str],
        "Collective name": NotRequired[str], "In msg nelems": NotRequired[Amount], "dtype": NotRequired[str],
    },
)  # fmt: skip
MemoryArguments = TypedDict(
    "MemoryArguments", {"Bytes": Integer, "Addr": int | str, "Total Allocated": Integer, "Device Type": int}
)


class Event(TypedDict):
    name: str
    pid: int | str
    tid: int | str
    ts: Number


class TimedEvent(Event):
    """An operator, an annotation, a call of the GPU's runtime, or the work of a GPU."""

    dur: Amount
    args: NotRequired[Arguments]


class MemoryEvent(Event):
    """An allocation or a release."""

    args: MemoryArguments


class Memory(NamedTuple):
    """An allocation (bytes > 0) or a release; `total` is what the allocator holds afterwards, `device` is 0 on the CPU."""

    bytes: int
    address: int | str
    total: int
    device: int


@dataclass(eq=False, slots=True)
class HostEvent:
    """An event of the host: an operator, an annotation, a call of the GPU's runtime (kind `launch`), or an allocation.

    The first fields are read: times in us, an operator's sequence number, its or an annotation's inputs as JSON, the correlation
    of a call. The others follow from the events around this one (see `chrome_trace`).
    """

    kind: str
    name: str
    thread: tuple[int | str, int | str]
    start: float
    duration: float
    number: int | None = None
    shapes: str = "[]"
    types: str = "[]"
    correlation: int | str | None = None
    memory: Memory | None = None
    operator: "HostEvent | None" = None  # innermost enclosing operator
    span: str | None = None
    detail: str = ""
    phase: str | None = None
    step: int = -1
    row: int = -1  # of an operator, in the table of operators
    children_us: float = 0.0
    device_us: float = 0.0
    self_device_us: float = 0.0
    allocated_bytes: int = 0
    repeated: bool = False  # it calls the operator that does its work, of the same name and shapes or of those in PASSED_ON

    @property
    def end(self) -> float:
        return self.start + self.duration


class DeviceEvent(NamedTuple):
    """Work of a GPU: a kernel, a copy or a fill."""

    name: str
    category: str
    start: float
    duration: float
    stream: int | str | None
    sent: tuple[str, float, str] | None  # of a collective, where PyTorch says it: its name, and number and type of elements
    correlation: int | str | None
    gpu: int | str


def read(path: Path, note: Callable[[str], None]) -> tuple[list[HostEvent], list[DeviceEvent]]:
    """The events of the host and of the device, in the order of the file; `note` is told from time to time how many were read."""
    host: list[HostEvent] = []
    device: list[DeviceEvent] = []
    shared: dict[Any, Any] = {}  # most names, threads and shapes occur often: one object for each
    for number, event in enumerate(elements(path, "traceEvents", NO_TRACE)):
        if number % 10_000 == 0:
            note(f"{number:,} events")
        if not isinstance(event, dict):
            continue
        category = str(event.get("cat")) if event.get("ph") == "X" else ""
        if event.get("name") == "[memory]":
            check(path, MemoryEvent, event, number)
            host.append(_host_event("memory", event, shared))
        elif category in HOST_KINDS:
            check(path, TimedEvent, event, number)
            host.append(_host_event(HOST_KINDS[category], event, shared))
        elif category in DEVICE_CATEGORIES:
            check(path, TimedEvent, event, number)
            device.append(_device_event(event, shared))
    if len({event.gpu for event in device}) > 1:  # each numbers its streams by itself
        device = [event._replace(stream=f"{event.stream} of GPU {event.gpu}") for event in device]
    return host, device


def check(path: Path, model: type, event: dict[str, Any], number: int) -> None:
    """Names the event by its position among all events if it does not fit its model."""
    name = shortened(str(event.get("name", "without a name")), 60)
    files.check(path, event, model, f"event {number} of traceEvents ({name}): ")


def _host_event(kind: str, event: dict[str, Any], shared: dict[Any, Any]) -> HostEvent:
    name, thread = (shared.setdefault(each, each) for each in (event["name"], (event["pid"], event["tid"])))
    result, arguments = HostEvent(kind, name, thread, event["ts"], event.get("dur", 0.0)), event.get("args", {})
    if kind == "memory":
        result.memory = Memory(*(arguments[key] for key in MemoryArguments.__annotations__))
    elif kind == "launch":
        result.correlation = arguments.get("correlation")
    else:
        result.number = arguments.get("Sequence number")
        inputs = (json.dumps(arguments.get(key, [])) for key in ("Input Dims", "Input type"))
        result.shapes, result.types = (shared.setdefault(text, text) for text in inputs)
    return result


def _device_event(event: dict[str, Any], shared: dict[Any, Any]) -> DeviceEvent:
    name, category = (shared.setdefault(event[key], event[key]) for key in ("name", "cat"))
    arguments = event.get("args", {})
    count, place = arguments.get("In msg nelems"), (event["ts"], event["dur"], arguments.get("stream"))
    sent = None if count is None else (arguments.get("Collective name", name), count, arguments.get("dtype", ""))
    return DeviceEvent(name, category, *place, sent, arguments.get("correlation"), event["pid"])
