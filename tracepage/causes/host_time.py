"""What the host does at each moment of a trace, as far as it can make a GPU wait.

The host is the thread that makes the next launch of a kernel, since the threads of a training step
wait for each other: while the autograd engine launches, the main thread waits in `backward`. Where
that thread is in no operator, another thread that launches may be in one. The innermost event
decides:

- a call of the runtime launches, allocates, loads code, copies or waits for the GPU;
- an event in something with a cause by its name (a data loader, a compiler, `aten::item`) belongs
  to that;
- everything else is in an operator, or in none.

Between two launches a host is always a little while in operators and in Python, which belongs to
launching. A stretch without a launch is something of its own if it takes LONGER times the median of
such stretches, but LEAST_NS at least and MOST_NS at most. Then each part of it that is in no
operator and takes as long is `host`, and each operator that takes as long is `cpu_operators`. So is
the rest if operators fill IN_OPERATORS of it, since Python between them prepares them.
"""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from tracepage.cost import operators
from tracepage.readers.trace import Trace
from tracepage.readers.trace_events import Event

import numpy

CAUSES = (
    "work",
    "copy_to_device",
    "copy_to_host",
    "communication",
    "input",
    "synchronization",
    "allocation",
    "compilation",
    "cpu_operators",
    "saving",
    "host",
    "launches",
    "unknown",
)
CODES = {cause: code for code, cause in enumerate(CAUSES)}
LAUNCHES = CODES["launches"]
# What the host is in, where nothing tells a cause yet.
NOTHING = -1
OPERATOR = -2
LEAST_NS = 100_000
MOST_NS = 500_000
LONGER = 10
IN_OPERATORS = 0.25  # A share of a stretch.
LOAD_NS = 1_000_000  # The first launch of a kernel that takes longer loads its code.
CLOCKS_NS = 10_000  # The clocks of host and device differ by less.
WAIT_NS = 1_000_000  # A collective that takes longer on the host waits in it.
THREADS = 8  # Those that launch most kernels.

# Calls of the runtime of NVIDIA (cuda, cu), AMD (hip) and Intel (ur, pi).
CALLS = {
    "allocation": re.compile(
        r"(cuda|cu|hip)(Malloc|Free|HostAlloc|HostFree|HostMalloc|HostRegister|HostUnregister"
        r"|Mem(Alloc|Free|Create|Map|Unmap|Release|SetAccess|AddressReserve))"
    ),
    "synchronization": re.compile(
        r"(cuda|cu|hip)(Device|Stream|Event|Ctx)Synchronize"
        r"|(ur|pi)(EventWait|EventsWait|QueueFinish)"
    ),
    "compilation": re.compile(
        r"(cuda|cu|hip)(Module|Library)Load|(cuda|cu|hip)GraphInstantiate|hiprtc|nvrtc"
    ),
    "launches": re.compile(r"\w*Launch|(cuda|cu|hip)Mem(cpy|set)"),
}
OF_ONE_VALUE = re.compile(r"aten::(item|_local_scalar_dense|is_nonzero)$")
# Events that tell the cause of all inside them.
NAMES = {
    "annotation": {
        "input": re.compile(
            r"DataLoader|data_?load|(get|next|load|fetch|prepare)_?(batch|data)|dataset"
            r"|^(data|inputs?|batch)$",
            re.IGNORECASE,
        ),
        "saving": re.compile(r"^sav(e|ing)\b|save_?(checkpoint|state|model)|^checkpoint", re.I),
    },
    "operator": {"synchronization": OF_ONE_VALUE},
}
COMPILES = re.compile(
    r"\(dynamo_timed\)|^(dynamo|TORCHDYNAMO)$|^entire_(frame|backward)_compile$|compile_fx"
)
# Functions of Python, `FILE(LINE): FUNCTION` or `<built-in ...>`.
FRAMES = {
    "saving": re.compile(r"torch/serialization\.py|distributed/checkpoint/|pickle\.py|method dump"),
    "compilation": re.compile(
        r"_dynamo/convert_frame\.py|_inductor/(compile_fx|codecache|async_compile)\.py"
        r"|triton/(compiler|runtime/build)|cpp_extension\.py"
    ),
    "input": re.compile(
        r"torch/utils/data/|/datasets?/|/PIL/|webdataset|data_?load|(get|next|load|fetch)_?batch",
        re.IGNORECASE,
    ),
}
OTHERS_CODE = re.compile(r"^<|site-packages|dist-packages|(^|/)torch/|/lib/python")
STEP = "ProfilerStep#"
NODE = "autograd::engine::evaluate_function"


class Intervals(NamedTuple):
    """From each of `times` (ns, rising) to the next the host is in the event of row `rows` of
    `Trace.host` (or -1), in the annotation of row `spans` (or -1). `codes` are of CAUSES, NOTHING
    or OPERATOR.
    """

    times: numpy.ndarray
    codes: numpy.ndarray
    rows: numpy.ndarray
    spans: numpy.ndarray

    def at(self, times: numpy.ndarray) -> numpy.ndarray:
        """The places of these times."""
        return numpy.searchsorted(self.times, times, side="right") - 1

    def pieces(self) -> numpy.ndarray:
        """The first place of each run of one cause and event, for each place."""
        numbers = numbered(self.codes, self.rows)
        return numpy.searchsorted(numbers, numbers)


class Stacks:
    """The functions of Python that ran, by thread; those of a trace without stacks are none."""

    def __init__(self, frames: list[Event]) -> None:
        self.frames: dict[tuple, list[Event]] = defaultdict(list)
        for frame in frames:
            before = self.frames[frame.thread]
            outer = before[-1] if before else None
            while outer and outer.end <= frame.start:
                outer = outer.operator
            frame.operator = outer
            before.append(frame)

    def names(self, start: float, end: float, thread: tuple | None = None) -> list[str]:
        """Functions that ran for half of this time or more, the innermost first, in a thread or in
        the first that has some.
        """
        middle = (start + end) / 2
        for frames in [self.frames.get(thread, [])] if thread else self.frames.values():
            names = []
            place = bisect_right(frames, middle, key=lambda frame: frame.start)
            frame = frames[place - 1] if place else None
            while frame:
                if min(frame.end, end) - max(frame.start, start) >= (end - start) / 2:
                    names.append(frame.name)
                frame = frame.operator
            if names:
                return names
        return []


def own_line(names: list[str]) -> str:
    """The innermost function that is no library's, or the innermost; empty where there is none."""
    mine = [name for name in names if not OTHERS_CODE.search(name)]
    return (mine or names or [""])[0]


class HostTime(NamedTuple):
    """What the host does at each moment; and of each event in `Trace.host` its code, the row of the
    event that has this cause by its name or call (itself, or one around it), and the row of the
    annotation around it; -1 for none.
    """

    intervals: Intervals
    codes: numpy.ndarray
    owners: numpy.ndarray
    spans: numpy.ndarray


def host_time(trace: Trace, stacks: Stacks) -> HostTime:
    """What the host does. Where nothing launches, it is in nothing and the cause is `unknown`."""
    events = numpy.full((len(trace.host), 3), -1)
    events[:, 0] = OPERATOR
    by_thread: dict[tuple, list[int]] = defaultdict(list)
    for row, event in enumerate(trace.host):
        if event.kind != "memory":
            by_thread[event.thread].append(row)
    launches = numpy.unique(trace.kernels.launch[trace.kernels.category == "kernel"])
    launches = launches[launches >= 0]
    if not len(launches):
        times = numpy.array([float("-inf")])
        return HostTime(Intervals(times, *numpy.array([[CODES["unknown"]], [-1], [-1]])), *events.T)
    threads = Counter(trace.host[row].thread for row in launches)
    number = {thread: place for place, (thread, _) in enumerate(threads.most_common(THREADS))}
    known = _known_by_others(trace)
    states = [_thread_intervals(trace.host, by_thread[thread], known, events) for thread in number]
    calls = [trace.host[row] for row in launches if trace.host[row].thread in number]
    ends = numpy.maximum.accumulate([call.end for call in calls])
    end = max(event.end for event in trace.host)
    merged = _merge(states, ends, numpy.array([number[call.thread] for call in calls]))
    return HostTime(_with_lines(_with_causes(merged, end), stacks), *events.T)


def _known_by_others(trace: Trace) -> dict[int, int]:
    """Codes of what only other events explain: a first launch that loads code, a copy that returned
    when it was over, which waits for more than itself if it is short, and an operator that reads
    one value on the CPU, without a call of the runtime.
    """
    kernels = trace.kernels[trace.kernels.launch >= 0]
    calling = set()
    for event in trace.host:
        operator = event.operator if event.kind == "launch" else None
        while operator and operator.row not in calling:
            calling.add(operator.row)
            operator = operator.operator
    known = {
        row: OPERATOR
        for row, event in enumerate(trace.host)
        if event.kind == "operator" and event.row not in calling and OF_ONE_VALUE.match(event.name)
    }
    for row in kernels[kernels.category == "kernel"].drop_duplicates("name").launch:
        if trace.host[row].duration >= LOAD_NS:
            known[row] = CODES["compilation"]
    copies: Iterable[Any] = kernels[kernels.category == "memcpy"].itertuples()
    for copy in copies:
        call = trace.host[copy.launch]
        cause = copy_cause(copy.name)
        at_once = "Pinned" in copy.name and "Async" in call.name
        if cause and not at_once and copy.start_ns + copy.duration_ns <= call.end + CLOCKS_NS:
            long = copy.duration_ns >= call.duration / 2
            known[copy.launch] = CODES[cause if long else "synchronization"]
    return known


def copy_cause(name: str) -> str:
    """The cause of a copy between host and device by its name; empty for another."""
    if re.search(r"H(ost)?[tT]oD", name):
        return "copy_to_device"
    return "copy_to_host" if re.search(r"D(evice)?[tT]oH", name) else ""


def _thread_intervals(
    host: list[Event],
    rows: Iterable[int],
    known: dict[int, int],
    events: numpy.ndarray,
) -> Intervals:
    """What one thread does; sets the codes, owners and spans of its events."""
    by_name: dict[tuple[str, str], int] = {}
    changes: list[tuple[float, int, int, int]] = [(float("-inf"), NOTHING, -1, -1)]
    # End, code, row and span of the open events, and whether all inside has that code and row.
    stack = [(float("inf"), NOTHING, -1, -1, False)]
    wait = (-1, -1)  # Row and place in `changes` of the call before, if it is a synchronization.
    for row in rows:
        event = host[row]
        while stack[-1][0] <= event.start:
            end = stack.pop()[0]
            changes.append((end, *stack[-1][1:4]))
        end, code, place, span, whole = stack[-1]
        if event.kind == "annotation" and not event.name.startswith(STEP):
            span = row
        if not whole:
            key = (event.kind, event.name)
            if key not in by_name:
                by_name[key] = named_code(event)
            named = known.get(row, by_name[key])
            if named == CODES["communication"] and event.duration < WAIT_NS:
                named = OPERATOR if event.kind == "operator" else NOTHING
            if named != NOTHING:
                code = named
                place = row
                whole = named >= 0
        if event.kind == "launch":
            # The allocator waits before it frees and tries again.
            retry = wait[0] >= 0 and host[wait[0]].operator is event.operator
            if code == CODES["allocation"] and retry:
                changes[wait[1]] = (changes[wait[1]][0], code, row, span)
            wait = (row, len(changes)) if code == CODES["synchronization"] else (-1, -1)
        events[row] = (code, place, span)
        changes.append((event.start, code, place, span))
        stack.append((min(end, event.end), code, place, span, whole))
    while len(stack) > 1:
        end = stack.pop()[0]
        changes.append((end, *stack[-1][1:4]))
    return _intervals(numpy.array(changes))


def _intervals(changes: numpy.ndarray) -> Intervals:
    """Changes of time, code, row and span as intervals, without empty ones and repetitions."""
    last = numpy.append(changes[1:, 0] > changes[:-1, 0], True)
    changes = changes[last]
    new = numpy.append(True, (changes[1:, 1:] != changes[:-1, 1:]).any(axis=1))
    times, *columns = changes[new].T
    return Intervals(times, *(column.astype(int) for column in columns))


def named_code(event: Event) -> int:
    """What the name of an event tells; NOTHING if that is what it is in."""
    patterns = CALLS if event.kind == "launch" else NAMES[event.kind]
    for cause, pattern in patterns.items():
        if pattern.search(event.name):
            return CODES[cause]
    if event.kind == "launch":
        return NOTHING
    if COMPILES.search(event.name):
        return CODES["compilation"]
    if operators.COMMUNICATION.search(event.name):
        return CODES["communication"]
    return OPERATOR if event.kind == "operator" else NOTHING


def _merge(threads: list[Intervals], ends: numpy.ndarray, launching: numpy.ndarray) -> Intervals:
    """What the host does, of several threads: that which makes the next launch, or another where
    that is in nothing. `ends` are of the launches, which `launching` made.
    """
    times = numpy.unique(numpy.concatenate([ends, *(thread.times for thread in threads)]))
    first = launching[numpy.searchsorted(ends, times, side="right").clip(max=len(ends) - 1)]
    codes, rows, spans = (numpy.full(len(times), -1) for _ in range(3))
    for preferred in (True, False):
        for number, thread in enumerate(threads):
            at = thread.at(times)
            free = (codes == NOTHING) & ((first == number) | (not preferred))
            codes = numpy.where(free, thread.codes[at], codes)
            rows = numpy.where(free, thread.rows[at], rows)
            spans = numpy.where(free & (spans < 0), thread.spans[at], spans)
    return _intervals(numpy.stack([times, codes, rows, spans], axis=1))


def _with_causes(host: Intervals, end: int) -> Intervals:
    """Each stretch between launches gets its cause; `end` is that of the trace."""
    lengths = numpy.diff(host.times, append=end)
    lengths[0] = max(host.times[1], 0)  # The first event of a trace is at 0.
    free = host.codes < 0
    stretch = numbered(free)
    in_stretch = numpy.bincount(stretch, lengths)[numpy.unique(stretch[free])]
    median = numpy.median(in_stretch) if free.any() else 0
    longest = min(max(LEAST_NS, LONGER * median), MOST_NS)
    codes = host.codes.copy()
    piece = numbered(host.codes, host.rows)
    long = free & (numpy.bincount(piece, lengths)[piece] >= longest)
    codes[long & (host.codes == NOTHING)] = CODES["host"]
    codes[long & (host.codes == OPERATOR)] = CODES["cpu_operators"]
    rest = free & ~long
    part = numbered(rest)
    whole = numpy.bincount(part, lengths)[part]
    in_operators = numpy.bincount(part, lengths * (host.codes == OPERATOR))[part]
    codes[rest] = CODES["host"]
    codes[rest & (in_operators >= IN_OPERATORS * whole)] = CODES["cpu_operators"]
    codes[rest & (whole < longest)] = LAUNCHES
    return host._replace(codes=codes)


def _with_lines(host: Intervals, stacks: Stacks) -> Intervals:
    """The same, where functions of Python tell more than that the host is in no operator."""
    if not stacks.frames:
        return host
    codes = host.codes.copy()
    pieces = host.pieces()
    firsts = numpy.unique(pieces)
    ends = numpy.append(firsts[1:], len(pieces) - 1)
    for first, end in zip(firsts, ends, strict=True):
        if codes[first] != CODES["host"]:
            continue
        names = stacks.names(max(host.times[first], 0), host.times[end])
        for cause, pattern in FRAMES.items():
            if any(map(pattern.search, names)):
                codes[first:end] = CODES[cause]
    return host._replace(codes=codes)


def numbered(*columns: numpy.ndarray) -> numpy.ndarray:
    """Counts from 0, one more at each place where any of these changes."""
    changes = numpy.zeros(len(columns[0]), dtype=int)
    for column in columns:
        changes[1:] |= column[1:] != column[:-1]
    return numpy.cumsum(changes)
