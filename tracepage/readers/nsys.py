"""Reads files of NVIDIA's nsys: the database of `nsys export --type sqlite`, and two tables of
`nsys stats --format csv`.

A database becomes the trace that torch.profiler would have written. Calls of the runtime launch,
and the work of a GPU is joined to them by process and correlation. Push/pop ranges of NVTX are
annotations, and those of `torch.autograd.profiler.emit_nvtx` are operators with shapes and sequence
numbers. The span of a launch is the deepest range around it, of any name. A thread without ranges,
such as that of autograd's engine, is in those of the thread that has most in its process. Ranges
named `step 3`, `iteration3` and the like mark the steps. Calls of the operating system tell where a
host is that is in nothing else.

Releases of nsys differ: a table or column that is not there is empty.
"""

import csv
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tracepage import files
from tracepage.errors import UsageError
from tracepage.readers import chrome_trace, pytorch, sqlite_file
from tracepage.readers.csv_table import numbers, read_rows
from tracepage.readers.source import Source, make_source, several_gpus
from tracepage.readers.trace_events import FRAME_NS, STEP, Event, Events, from_first, name_streams
from tracepage.span_names import SPANS
from tracepage.terminal import counted, progress

import pandas

ACTIVITY = "CUPTI_ACTIVITY_KIND_"
PLACE = ("deviceId", "streamId", "correlationId", "globalPid")  # Columns of a GPU's work.
COPIES = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD"}
COPIES |= {9: "HtoH", 10: "PtoP", 11: "HtoD", 12: "DtoH", 13: "DtoD"}  # From 11 on unified memory.
MEMORY = ("Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static")
GRAPH = "CUDA graph"
PUSH_POP = "WHERE eventType IN (59, 70)"
PROCESS = 1 << 24  # A global thread is PROCESS times its process, plus the thread.
VERSION = re.compile(r"(_pts[zd])?_v\d+$")  # Of a call: cudaLaunchKernel_v7000.
# A range of emit_nvtx is `aten::mm, seq = 4, op_id = 7, sizes = [[2, 3], [3, 4]]`.
RANGE = re.compile(
    r"(?P<name>.+?)(, seq = (?P<sequence>\d+))?(?P<id>, op_id = \d+)?"
    r"(, sizes = (?P<shapes>\[[][\d, ]*\]))?(, input_op_ids = .*)?",
    re.DOTALL,
)
# Of its ranges, those that torch.profiler does not hold for the user's.
OPERATOR = re.compile(
    r"[a-z]\w*::|triton_|detach_?$|record_param_comms|Torch-Compiled|TorchDynamo|AOTDispatcher"
    r"|Pregraph"
)
STEP_RANGE = re.compile(
    r"(?P<noun>((profiler|train(ing)?)[ _]?)?(step|iter(ation)?))[ _:#=]*(?P<number>\d+)",
    re.IGNORECASE,
)
NO_CUDA = "holds no work of a GPU: nsys did not trace CUDA, so profile with --trace=cuda,nvtx"
NOTHING_RAN = (
    "holds no work of a GPU: nothing ran on one while nsys recorded. Profile with "
    "--trace=cuda,nvtx; with --capture-range, the range that it names must begin"
)
NO_LAUNCH = "holds no work of a GPU, but {} of the runtime: none of them launched anything"

# The first line of each table of `nsys stats --format csv`, and what comes after its last.
HEADER = re.compile(r'^"?(Time ?\(%\)|Start \(\w+\))"?,.*$', re.MULTILINE)
TABLE_END = re.compile(r"\n\s*\n|\nProcessing \[")
TIME = re.compile(r"(Start|Duration|Total Time)( \((\w+)\))?")
UNITS = {"ns": 1, "nsec": 1, "us": 1e3, "usec": 1e3, "ms": 1e6, "msec": 1e6, "s": 1e9, "sec": 1e9}
COPY = re.compile(r"\[CUDA (Unified Memory )?memcpy (\w)\w*?-?to-?(\w)\w*\]")


def is_export(path: Path) -> bool:
    """Whether a SQLite database is of nsys."""
    names = sqlite_file.tables(path)
    return "StringIds" in names or any(name.startswith(ACTIVITY) for name in names)


def read_database(path: Path) -> Source:
    """UsageError: nothing in it ran on a GPU; it says why, as far as the database tells."""
    with progress(f"reading {path}"):
        events = _events(_Export(path))
    return pytorch.trace_source("nsys", path, chrome_trace.make_trace(path, events))


class _Export:
    """The tables of a database."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.strings = dict(sqlite_file.query(path, "SELECT id, value FROM StringIds"))
        self.left_out = 0  # Rows without a possible duration.

    def table(self, name: str, *columns: str, where: str = "") -> list[tuple]:
        """Its rows, with None in a column that it lacks; none where there is no such table."""
        known = sqlite_file.columns(self.path, name)
        if not known:
            return []
        chosen = [f'"{column}"' if column in known else "NULL" for column in columns]
        return sqlite_file.query(self.path, f"SELECT {', '.join(chosen)} FROM {name} {where}")

    def timed(self, name: str, *columns: str, where: str = "") -> Iterator[tuple]:
        """Start, duration and these columns of each row that has both times."""
        for start, end, *row in self.table(name, "start", "end", *columns, where=where):
            if start is None or end is None or end < start:
                self.left_out += 1
            else:
                yield start, end - start, *row

    def text(self, *numbers: int | None) -> str:
        """The first of these texts that is there. UsageError: none is."""
        for number in numbers:
            if number in self.strings:
                return self.strings[number]
        raise UsageError(f"{self.path} is damaged: its StringIds has no text {numbers[0]}")


def _events(export: _Export) -> Events:
    calls = _calls(export)
    ranges = _ranges(export)
    device = _work(export, calls)
    if not device:
        raise UsageError(f"{export.path} (nsys) {_why_empty(export, calls)}")
    devices = _name_gpus(export, device)
    name_streams(device)
    frames = _frames(export, calls)
    _name_steps(ranges)
    notes = []
    if export.left_out:
        rows = counted(export.left_out, "row")
        notes.append(f"left out: {rows} without a possible time")
    if any(event.name.startswith(GRAPH) for event in device):
        notes.append("a graph is one row: nsys profile --cuda-graph-trace=node shows its kernels")
    events = from_first(_in_order([*calls, *ranges, *device, *frames]), notes)
    return events._replace(devices=devices, ranged=_ranged(calls, ranges))


def _in_order(events: list[Event]) -> list[Event]:
    return sorted(events, key=lambda event: (event.start, -event.duration))


def _why_empty(export: _Export, calls: list[Event]) -> str:
    """Why nothing ran on a GPU, and the first warning of nsys about CUDA."""
    if calls:
        reason = NO_LAUNCH.format(counted(len(calls), "call"))
    else:
        options = export.table("META_DATA_CAPTURE", "name", "value")
        traced = {value for name, value in options if name == "CAPTURE_EVENT_TYPE"}
        reason = NO_CUDA if traced and "Cuda" not in traced else NOTHING_RAN
    for (warning,) in export.table("DIAGNOSTIC_EVENT", "text", where="WHERE severity IN (2, 3)"):
        if "CUDA" in warning:
            return f"{reason}. nsys warned: {warning}"
    return reason


def _thread(number: int | None) -> tuple[int, int]:
    """Process and thread of a global thread; a global process has the thread 0."""
    return divmod(number or 0, PROCESS)


def _correlation(process: int, number: int | None) -> int | None:
    """One for all processes, each of which counts by itself."""
    return None if number is None else (process << 32) + number


def _calls(export: _Export) -> list[Event]:
    """The calls of the runtime and the driver."""
    calls = []
    columns = ("globalTid", "correlationId", "nameId")
    for start, duration, thread, number, name in export.timed(f"{ACTIVITY}RUNTIME", *columns):
        place = _thread(thread)
        call = VERSION.sub("", export.text(name))
        key = _correlation(place[0], number)
        calls.append(Event("launch", call, place, start, duration, key))
    return calls


def _ranges(export: _Export) -> list[Event]:
    """The push/pop ranges of NVTX: annotations, and operators."""
    ranges = []
    columns = ("text", "textId", "globalTid")
    rows = export.timed("NVTX_EVENTS", *columns, where=PUSH_POP)
    for start, duration, text, number, thread in rows:
        match = RANGE.fullmatch(text or export.strings.get(number, ""))
        if match is None:
            continue
        name = match["name"]
        sequence = match["sequence"]
        event = Event("annotation", name, _thread(thread), start, duration)
        if name not in SPANS and (sequence or (match["id"] and OPERATOR.match(name))):
            event.kind = "operator"
            event.number = int(sequence) if sequence else None
            event.shapes = match["shapes"] or "[]"
        ranges.append(event)
    return ranges


def _work(export: _Export, calls: list[Event]) -> list[Event]:
    """Kernels, copies, sets and whole graphs. The thread of each is its process, and the number
    that this process has for the GPU.
    """
    rows: list[tuple] = []  # Kind, name, blocks, bytes of a copy, start, duration, and PLACE.
    kernel_columns = (*PLACE, "gridX", "gridY", "gridZ", "demangledName", "shortName")
    for *row, x, y, z, name, short in export.timed(f"{ACTIVITY}KERNEL", *kernel_columns):
        blocks = (x or 0) * (y or 0) * (z or 0)
        rows.append(("kernel", export.text(name, short), blocks, 0, *row))
    copy_columns = (*PLACE, "bytes", "copyKind", "srcKind", "dstKind")
    for *row, size, kind, source, target in export.timed(f"{ACTIVITY}MEMCPY", *copy_columns):
        name = f"Memcpy {COPIES.get(kind, 'Unknown')} ({_memory(source)} -> {_memory(target)})"
        rows.append(("memcpy", name, 0, size or 0, *row))
    for *row, kind in export.timed(f"{ACTIVITY}MEMSET", *PLACE, "memKind"):
        rows.append(("memset", f"Memset ({_memory(kind)})", 0, 0, *row))
    for *row, graph in export.timed(f"{ACTIVITY}GRAPH_TRACE", *PLACE, "graphId"):
        rows.append(("kernel", f"{GRAPH} {graph}", 0, 0, *row))
    first = calls[0].thread[0] if calls else 0
    device = []
    for kind, name, blocks, size, start, duration, gpu, stream, number, process in rows:
        if start == duration == 0:
            export.left_out += 1  # Its clock could not be read.
            continue
        # Old databases hold one process, and do not name it.
        place = first if process is None else _thread(process)[0]
        key = _correlation(place, number)
        thread = (place, gpu or 0)
        device.append(Event(kind, name, thread, start, duration, key, stream, blocks, size))
    return device


def _memory(kind: int | None) -> str:
    return MEMORY[kind] if kind is not None and kind < len(MEMORY) else "Unknown"


def _name_gpus(export: _Export, device: list[Event]) -> list[dict[str, Any]]:
    """The GPUs, as in `Trace.devices`. The thread of an event becomes its GPU and process.

    A process counts the GPUs that it sees. Where the database does not tell which they are, no two
    processes share one.
    """
    columns = ("pid", "cudaId", "gpuId")
    known = {tuple(row): gpu for *row, gpu in export.table("TARGET_INFO_CUDA_DEVICE", *columns)}
    told = export.table("TARGET_INFO_GPU", "id", "name", "smCount")
    properties = {row[0]: row[1:] for row in told}
    places = sorted({event.thread for event in device})
    several = len({process for process, _ in places}) > 1
    gpus = {}
    devices = {}
    for process, number in places:
        pid = process % PROCESS
        gpu = known.get((pid, number), number)
        label = str(gpu)
        if several and (pid, number) not in known:
            label += f" of process {pid}"
        gpus[process, number] = (label, process)
        name, multiprocessors = properties.get(gpu, (None, None))
        entry = {"id": label, "name": name, "multiprocessors": multiprocessors}
        devices[label] = {key: value for key, value in entry.items() if value is not None}
    for event in device:
        event.thread = gpus[event.thread]
    shared = Counter(label for label, _ in gpus.values())
    for event in device:
        label, process = event.thread
        if shared[label] > 1:
            event.stream = f"{event.stream} of process {process % PROCESS}"
    return list(devices.values())


def _frames(export: _Export, calls: list[Event]) -> list[Event]:
    """Long calls of the operating system by threads that use a GPU, outside the runtime's calls."""
    busy = defaultdict(list)
    for call in _in_order(calls):
        busy[call.thread].append(call)
    frames = []
    long = f'WHERE "end" - start >= {FRAME_NS}'
    for start, duration, number, name in export.timed(
        "OSRT_API", "globalTid", "nameId", where=long
    ):
        thread = _thread(number)
        before = bisect_right(busy[thread], start, key=lambda call: call.start)
        if before and busy[thread][before - 1].end <= start:
            text = f"{export.text(name)} (operating system)"
            frames.append(Event("frame", text, thread, start, duration))
    return frames


def _name_steps(ranges: list[Event]) -> None:
    """Names the most frequent numbered ranges of one thread as torch.profiler names steps."""
    steps = defaultdict(list)
    for event in _in_order(ranges):
        match = STEP_RANGE.fullmatch(event.name)
        if match:
            steps[event.thread, match["noun"].lower()].append((event, match["number"]))
    for event, number in max(steps.values(), key=len, default=[]):
        event.name = f"{STEP}{number}"


def _ranged(calls: list[Event], ranges: list[Event]) -> dict[tuple, tuple]:
    """See `Events.ranged`. Ranges that NCCL marks are around its calls alone."""
    main = {}
    counts = Counter(event.thread for event in ranges if not event.name.startswith("nccl"))
    for thread, _ in reversed(counts.most_common()):
        main[thread[0]] = thread
    threads = {call.thread for call in calls} - counts.keys()
    return {thread: main[thread[0]] for thread in threads if thread[0] in main}


def tables(text: str) -> dict[str, str]:
    """The tables of `nsys stats` in a text, by their kinds in `load_kernels`."""
    kinds = {}
    for match in HEADER.finditer(text):
        columns = next(csv.reader([match[0]]))
        kind = "nsys table"
        if {"CorrId", "Name"} <= set(columns):
            kind = "nsys-gpu-trace"
        elif {"Instances", "Name"} <= set(columns) and "Category" not in columns:
            kind = "nsys-kernel-sum"
        kinds[kind] = TABLE_END.split(text[match.start() :], maxsplit=1)[0]
    return kinds


def read_kernel_sum(path: Path) -> Source:
    frame = _frame(path, "nsys-kernel-sum")
    calls = numbers(path, frame, "Instances")
    columns = {"name": frame.Name, "calls": calls, "duration_ns": frame["Total Time"]}
    return make_source("nsys-kernel-sum", path, columns)


def read_gpu_trace(path: Path) -> Source:
    frame = _frame(path, "nsys-gpu-trace")
    memory = frame.reindex(columns=["SrcMemKd", "DstMemKd"], fill_value="Unknown")
    frame["Name"] = [
        _torch_name(*row) for row in zip(frame.Name, memory.SrcMemKd, memory.DstMemKd, strict=True)
    ]
    columns = {"name": frame.Name, "start_ns": frame["Start"], "duration_ns": frame["Duration"]}
    gpus = frame.Device.nunique() if "Device" in frame else 1
    return make_source("nsys-gpu-trace", path, columns, notes=several_gpus(gpus), gpus=gpus)


def _torch_name(name: str, source: str, target: str) -> str:
    """The name that torch.profiler has for a kernel, a copy or a set."""
    match = COPY.fullmatch(name)
    if match:
        return f"Memcpy {match[2]}to{match[3]} ({source} -> {target})"
    return name.replace("[CUDA memset]", "Memset (Device)")


def _frame(path: Path, kind: str) -> pandas.DataFrame:
    """A table; its times are numbers of ns, under names without a unit."""
    header, *body = read_rows(path, tables(files.read_text(path))[kind])
    frame = pandas.DataFrame(body, columns=header)
    for column in header:
        match = TIME.fullmatch(column)
        if match:
            frame[match[1]] = numbers(path, frame, column) * UNITS[match[3] or "ns"]
    return frame
