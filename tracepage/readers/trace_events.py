"""Reads the events of a Chrome trace; of one of PyTorch's profiler only what an analysis needs of
each.

Times become whole nanoseconds since the first event, with the first taken off while they are exact.
Events whose times are false are left out and counted, and so is what is not read. Work that is only
unlikely counts: a lane can hold several queues, and a copy or a pause can be long.
"""

import codecs
import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from tracepage import files
from tracepage.errors import UsageError
from tracepage.terminal import counted, format_time, progress, shortened

import pandas

# Kinds of events by their category in lower case; PyTorch's first profilers wrote Operator,
# Runtime, Kernel and Memcpy.
KINDS = {
    "operator": re.compile(r"cpu_op|operator"),
    "annotation": re.compile(r"user_annotation"),
    "launch": re.compile(r"(\w+_)?(runtime|driver)"),  # Also xpu_runtime and privateuse1_runtime.
    "kernel": re.compile(r"(\w+_)?kernel|mtia_ccp_events"),
    "memcpy": re.compile(r"(\w+_)?memcpy"),
    "memset": re.compile(r"(\w+_)?memset"),
    "frame": re.compile(r"python_function"),
    # Events of PyTorch's profilers that repeat others or time the profiler.
    "repeated": re.compile(r"gpu_user_annotation|(\w+_)?sync|overhead|trace"),
}
DEVICE = ("kernel", "memcpy", "memset")
PYTORCH = ("operator", *DEVICE)  # Other programs have none of them.
CHUNK = 1 << 20  # characters
SEPARATORS = re.compile(r"[\s,:]*")
DECODER = json.JSONDecoder(parse_float=str)
EVENTS = "traceEvents"
UNKNOWN = ("unknown", "uncategorized")
STEP = "ProfilerStep#"
# The name of a process or thread whose events are work of a device, where they have no category.
DEVICE_LANE = re.compile(
    r"\b(gpu|npu|xpu|hpu|mlu|tpu|dcu|gcu|device|accelerator|hardware|stream|queue)s?\d*\b",
    re.IGNORECASE,
)
TASK = "Task Type"  # An argument of the work of an Ascend NPU, which has no category.
WAITING_TASK = re.compile(r"EVENT|NOTIFY|WAIT|PLACE_?HOLDER", re.IGNORECASE)
BEGINS = ("B", "b", "S")  # Phases of events that begin here; another one is their end.
STREAM = re.compile(r"([\w ]+[ _])?(stream|queue)([ _]?id)?", re.IGNORECASE)
LONGEST = 10**18  # ns, 30 years
LATEST = 2**62  # ns: a start that is later is an overflow.
HOUR = 3600 * 10**9  # ns
# In ns: the largest numbers of ns and of us with 32 bits; durations that overflow are NEAR them.
LIMITS = (2**31 - 1, 2**32 - 1, (2**31 - 1) * 1000, (2**32 - 1) * 1000)
NEAR = 0.001  # A share of them.
# See `_endless`. One that was launched early overlaps the one before it.
ENCLOSED = 2
FAR = 100
OVERLAPPED = 0.1  # A share of the time of all work.
FRAME_NS = 100_000  # A trace with stacks has millions of frames; shorter ones explain no wait.
MEMORY = ("Bytes", "Addr", "Total Allocated", "Device Type")
# Of the job that a trace is one rank of.
JOB = "distributedInfo"
JOB_PROPERTIES = {"rank": "rank", "world_size": "world_size"}
GPUS = "deviceProperties"
GPU_PROPERTIES = {
    "id": "id",
    "name": "name",
    "numSms": "multiprocessors",
}
# Of a node of a CUDA graph, by `torch.cuda._annotate_cuda_graph_trace`: the part of the model.
ANNOTATIONS = ("module_fqn", "str", "name", "annotation")
LAYER = re.compile(r"\.\d+(?=\.|$)")
# Of a collective's kernel: the process group with its ranks, the kind, and the number in the group.
COLLECTIVE = ("Process Group Name", "Process Group Ranks", "Collective name", "Seq")
# What an event that lacks something, or holds what it cannot, raises.
DAMAGED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


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
    bytes: int = 0  # Of a copy, in the same way.
    collective: tuple[str, str, str, str] | None = None  # COLLECTIVE; "" where one is not told.
    number: int | None = None  # An operator's sequence number.
    shapes: str = "[]"  # An operator's or annotation's inputs, as JSON.
    types: str = "[]"
    # Bytes (a release: below 0), address, total, `cpu` or `gpu`.
    memory: tuple[int, str, int, str] | None = None
    operator: "Event | None" = None  # The innermost enclosing operator; of a frame, the frame.
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
    origin: int  # The first time on the clock of the file, ns.
    devices: Sequence[dict[str, Any]] = ()  # As in `Trace`, of all GPUs.
    # All events as they are in the file, where none is an operator of PyTorch or work of a GPU.
    others: list[Any] | None = None
    # Where ranges of any name are spans: a thread without ranges of its own, and the one whose
    # ranges are around its calls.
    ranged: dict[tuple, tuple] | None = None
    job: Mapping[str, int] = {}


class _JsonText:
    """The text of a JSON file, read in chunks."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        self.text = ""
        self.place = 0
        self.is_over = False

    def _read(self) -> None:
        """Reads on; as much as there is, so that a long value is not begun too often."""
        rest = self.text[self.place :]
        chunk = self.file.read(max(CHUNK, len(rest)))
        self.text = rest + self.decoder.decode(chunk)
        self.place = 0
        self.is_over = not chunk

    def next(self) -> str:
        """The next character that separates nothing; empty at the end."""
        while True:
            self.place = SEPARATORS.match(self.text, self.place).end()  # type: ignore[union-attr]
            if self.place < len(self.text) or self.is_over:
                return self.text[self.place : self.place + 1]
            self._read()

    def value(self) -> Any:
        """The value that begins here. ValueError: it is none."""
        while True:
            try:
                value, end = DECODER.raw_decode(self.text, self.place)
                # A number at the end of the text could go on, from `1` to `1e-5`.
                if end < len(self.text) - 2 or self.is_over:
                    self.place = end
                    return value
            except ValueError:
                if self.is_over:
                    raise
            self._read()

    def items(self) -> Iterator[Any]:
        """The values of the list that begins here; its end may be missing."""
        self.place += 1
        while self.next() not in ("]", ""):
            yield self.value()
        self.place += 1


def entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Key and value of each entry of a .json or .json.gz file, and each event of the list EVENTS
    under that key, so that any file takes the memory of a few events.

    The file can be this list, whose end may be missing. Numbers that are not whole are text, since
    a double of us loses ns after 50 days. UsageError: it is no JSON.
    """
    try:
        with files.opened(path) as file:
            text = _JsonText(file)
            if text.next() == "[":
                for event in text.items():
                    yield EVENTS, event
            else:
                text.place += 1
                while text.next() not in ("}", ""):
                    key = text.value()
                    if key == EVENTS and text.next() == "[":
                        for event in text.items():
                            yield EVENTS, event
                    else:
                        text.next()
                        yield key, text.value()
                if not text.next():
                    raise ValueError("its end is missing")
                text.place += 1
            if text.next():
                raise ValueError("it goes on after its end")
    except (ValueError, RecursionError) as error:
        files.read_json(path)  # Its error says where.
        raise UsageError(f"{path} is not JSON or is cut off: {error}") from error


def read_job(path: Path) -> dict[str, int]:
    """`rank` and `world_size` of the process of a trace, as far as it tells before its events."""
    for key, value in entries(path):
        if key == EVENTS:
            break
        if key == JOB:
            return _known_of(value, JOB_PROPERTIES)
    return {}


@functools.cache
def kind(category: str) -> str:
    """A key of KINDS, or `unknown`."""
    kinds = [name for name, pattern in KINDS.items() if pattern.fullmatch(category.lower())]
    return kinds[0] if kinds else "unknown"


@functools.cache
def _stream_key(arguments: tuple[str, ...]) -> str | None:
    """The argument that names the stream of a launch or of work; a queue of an XPU is one."""
    return next(filter(STREAM.fullmatch, arguments), None)


def nanoseconds(us: Any) -> int:
    """A time in us, which may be text. One of DAMAGED: it is no time."""
    return round(1000 * Decimal(us))


def read_events(path: Path) -> Events:
    """Reads a trace once. Notes count the events that are left out because they are damaged, and
    those that are not read because nothing says what they are.
    """
    events: list[Event] = []
    damaged: list[str] = []
    pairs: list[str] = []
    devices: set[Any] = set()  # Processes, and threads of them, by the names that the file gives.
    others: list[Any] | None = []
    header: dict[str, Any] = {}
    shared: dict[Any, Any] = {}  # Most names, threads and shapes occur often: one object for each.
    with progress(f"reading {path}"), files.many_objects():
        for key, record in entries(path):
            if key in (GPUS, JOB):
                header[key] = record
            if key != EVENTS or not isinstance(record, dict):
                continue
            if others is not None:
                others.append(record)
            phase = record.get("ph")
            try:
                if phase == "M":
                    devices |= _named_device(record)
                elif phase in BEGINS:
                    pairs.append(str(record.get("name")))
                event = _event(record, shared)
            except DAMAGED:
                damaged.append(str(record.get("name")))
                continue
            if event:
                events.append(event)
                if event.kind in PYTORCH:
                    others = None
    if _find_work(events, devices):
        others = None
    events.sort(key=lambda event: (event.start, -event.duration))
    unknown = [event for event in events if event.kind in UNKNOWN]
    known = [event for event in events if event.kind not in UNKNOWN]
    name_streams([event for event in known if event.kind in DEVICE])
    far = _without_clock(known)
    long = _endless([event for event in known if event not in far])
    left_out = {
        "left out: {} without a name, a time or a possible duration": damaged,
        "left out: {} far outside the time of the others": [event.name for event in far],
        "left out: {} whose duration has overflowed, or that would run longer than the next "
        f"{ENCLOSED} of their stream": [event.name for event in long],
        "not read: {} of no known category": [event.name for event in unknown],
        "not read: {} with a begin and an end apart": pairs,
    }
    notes = [
        f"{text.format(counted(len(names), 'event'))}, such as {shortened(names[0], 60)}"
        for text, names in left_out.items()
        if names
    ]
    kept = [event for event in known if event not in far and event not in long]
    return from_first(kept, notes)._replace(
        devices=[_known_of(gpu, GPU_PROPERTIES) for gpu in header.get(GPUS, [])],
        job=_known_of(header.get(JOB, {}), JOB_PROPERTIES),
        others=others,
    )


def from_first(events: list[Event], notes: Iterable[str]) -> Events:
    """Events that are in order, with times since the first, and a note if work overlaps."""
    origin = events[0].start if events else 0
    for event in events:
        event.start -= origin
    device = [event for event in events if event.kind in DEVICE]
    frames = [event for event in events if event.kind == "frame"]
    host = [event for event in events if event.kind not in (*DEVICE, "frame")]
    return Events(host, device, frames, (*notes, *overlap(device)), origin)


def _known_of(told: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """What a trace tells, by our names of it."""
    return {name: told[key] for key, name in names.items() if key in told}


def _named_device(record: dict[str, Any]) -> set[Any]:
    """The process, or process and thread, that a metadata event names as a device. One of DAMAGED:
    it is damaged.
    """
    about = record.get("name")
    if about not in ("process_name", "process_labels", "thread_name"):
        return set()
    if not DEVICE_LANE.search(str(record.get("args"))):
        return set()
    process = record.get("pid")
    return {(process, record.get("tid")) if about == "thread_name" else process}


def _find_work(events: list[Event], devices: set[Any]) -> bool:
    """Whether unknown events are kernels of a device, beside known ones of which none is: by the
    name of their lane or, where this is none of the host's threads, by a stream. They become that.
    """
    known = [event for event in events if event.kind not in UNKNOWN]
    if not known or any(event.kind in DEVICE for event in known):
        return False
    threads = {event.thread for event in known}
    work = [
        event
        for event in events
        if event.kind in UNKNOWN
        and (
            event.thread in devices
            or event.thread[0] in devices
            or (event.stream is not None and event.thread not in threads)
        )
    ]
    for event in work:
        event.kind = "kernel"
    return bool(work)


def name_streams(device: list[Event]) -> None:
    """Work without a stream has its lane for one. Each GPU numbers its streams by itself."""
    several = len({event.thread[0] for event in device}) > 1
    for event in device:
        if event.stream is None:
            event.stream = event.thread[1]
        if several:
            event.stream = f"{event.stream} of GPU {event.thread[0]}"


def _event(record: dict[str, Any], shared: dict[Any, Any]) -> Event | None:
    """What is needed of an event; None where that is nothing. One of DAMAGED: it is damaged."""
    is_memory = record.get("name") == "[memory]"
    category = record.get("cat")
    event_kind = kind(str(category)) if category else "uncategorized"
    if is_memory:
        event_kind = "memory"
    elif event_kind == "repeated" or record.get("ph") != "X":
        return None
    name = str(record["name"])
    if name.startswith(STEP):
        event_kind = "annotation"
    thread = (record["pid"], record["tid"])
    duration = 0 if is_memory else nanoseconds(record["dur"])
    start = nanoseconds(record["ts"])
    if not 0 <= duration < LONGEST or abs(start) > LATEST:
        raise ValueError
    if event_kind == "frame" and duration < FRAME_NS:
        return None
    event = Event(
        event_kind,
        shared.setdefault(name, name),
        shared.setdefault(thread, thread),
        start,
        duration,
    )
    arguments = record.get("args") or {}
    if is_memory:
        size, address, total, device = (arguments[key] for key in MEMORY)
        event.memory = int(size), str(address), int(total), "gpu" if int(device) else "cpu"
    elif event_kind in ("operator", "annotation"):
        event.number = arguments.get("Sequence number")
        dimensions = arguments.get("Input Dims")
        if dimensions:
            shapes = json.dumps([shape if isinstance(shape, list) else [] for shape in dimensions])
            event.shapes = shared.setdefault(shapes, shapes)
        types = arguments.get("Input type")
        if types:
            types = json.dumps(list(map(str, types)))
            event.types = shared.setdefault(types, types)
    else:
        event.correlation = arguments.get("correlation")
        event.stream = arguments.get(_stream_key(tuple(arguments)))
        task = arguments.get(TASK)
        if task and event_kind == "uncategorized":
            event.kind = "unknown" if WAITING_TASK.search(str(task)) else "kernel"
        event.bytes = int(arguments.get("bytes", 0))
        event.blocks = math.prod(arguments.get("grid") or [0])
        if arguments.get("graph node id"):
            annotations = (arguments[key] for key in ANNOTATIONS if key in arguments)
            event.span = LAYER.sub(".*", str(next(annotations, ""))) or None
        if COLLECTIVE[0] in arguments:
            collective = tuple(str(arguments.get(key, "")) for key in COLLECTIVE)
            event.collective = shared.setdefault(collective, collective)
    hash((event.correlation, event.stream, event.number))  # TypeError: they are lists or objects.
    return event


def _without_clock(events: list[Event]) -> set[Event]:
    """The events that a profiler wrote without having read a clock: their start is one of LIMITS;
    or it is 0 or below, and the others count from a time more than an HOUR later. Work at 0 that
    took no time never ran.
    """
    first = next((event.start for event in events if event.start > 0), 0)
    return {
        event
        for event in events
        if event.start in LIMITS
        or (event.start <= 0 and first - event.start > HOUR)
        or (first and event.kind in DEVICE and event.start == event.duration == 0)
    }


def _endless(events: list[Event]) -> set[Event]:
    """The events with a false duration, all of which end after the last start. The duration is
    nearly one of LIMITS; or it is of work that ends after the next ENCLOSED of its stream, and
    after all else of the trace by FAR times the length of that.
    """
    if not events:
        return set()
    first = events[0].start
    last = events[-1].start
    late = [event for event in events if event.end > last]
    endless = {
        event for event in late for limit in LIMITS if abs(event.duration - limit) < NEAR * limit
    }
    host = (event for event in late if event.kind not in DEVICE and event not in endless)
    last = max((last, *(event.end for event in host)))
    device = [event for event in events if event.kind in DEVICE]
    ends = [(event.stream, float(event.end)) for event in device]
    frame = pandas.DataFrame(ends, columns=["stream", "end"])
    long = frame.end > frame.groupby("stream").end.shift(-ENCLOSED)
    long &= frame.end - last > FAR * (last - first)
    return endless | {device[row] for row in frame.index[long]}


def overlap(device: list[Event]) -> tuple[str, ...]:
    """A note if work that one stream shows at a time is more than OVERLAPPED of all work."""
    ends: dict[Any, int] = {}
    ns = 0
    for event in device:
        end = ends.get(event.stream, event.start)
        ns += max(0, min(end, event.end) - event.start)
        ends[event.stream] = max(end, event.end)
    if ns <= OVERLAPPED * sum(event.duration for event in device):
        return ()
    return (
        f"work of one stream overlaps for {format_time(ns / 1e6)}: the stream has several queues, "
        "or a duration is too long; the total counts this time twice, and busy once",
    )
