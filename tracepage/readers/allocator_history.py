"""Reads a memory snapshot of PyTorch's allocator: the pickle of `torch.cuda.memory._dump_snapshot`,
of anyone.

A pickle can name any function for its reader to call, so only plain containers, texts and numbers
are read, and a pickle that names anything is refused before it runs.

The history is a list of allocations and releases. It begins where it was switched on or, in a ring
that was full, later, so what was allocated before follows from the blocks that are alive at its
end. The allocator counts a release when it is requested, and in units of UNIT.
"""

import functools
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tracepage import files
from tracepage.errors import UsageError, first_line
from tracepage.readers.trace_events import DAMAGED
from tracepage.terminal import progress

import pandas

PICKLE = b"\x80"  # A pickle of protocol 2 or later begins with it.
UNIT = 512  # bytes
BEFORE = "before the history"
NO_STACK = "no stack"
CALLS = ("optimizer", "backward", "forward")
# Files of no user: of PyTorch, of Triton, of C++, and code that was made.
NOT_OURS = re.compile(r"/(torch|triton)/|^<|^\?\?|\.(cpp|cc|cu|cuh|h|hpp|so)\b")
BACKWARD = re.compile(r"^(backward|_engine_run_backward)$|autograd::Engine")
FORWARD = re.compile(r"^(forward|_call_impl)$")
COLUMNS = ["time_us", "bytes", "reserved", "place", "category"]


class Snapshot(NamedTuple):
    """The memory of one device.

    `events` has a row for the start and for each change, with `bytes` (a release: below 0, with the
    place and category of its allocation), and `reserved` likewise of the pools; `time_us` counts
    entries where they are not `timed`. `alive` has `place` and `bytes` of each block that is in use
    at the end, `free` the sizes of blocks that are not, and `failures` the requests that failed:
    bytes, bytes that the device had free, and place.
    """

    path: Path
    device: int
    events: pandas.DataFrame
    alive: pandas.DataFrame
    free: list[int]
    failures: list[tuple[int, int, str]]
    notes: list[str]
    timed: bool


def is_snapshot(path: Path) -> bool:
    """Whether a file is a pickle."""
    if not path.is_file():
        return False
    with files.opened(path) as file:
        return file.read(1) == PICKLE


class _PlainUnpickler(pickle.Unpickler):
    """Reads containers, texts and numbers alone."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and could run it")


def read(path: Path) -> Snapshot:
    """The device that used most memory. UsageError: it is damaged, or no snapshot."""
    content = _load(path)
    if not isinstance(content, dict) or not {"segments", "device_traces"} <= content.keys():
        raise UsageError(
            f"{path} is a pickle, but no memory snapshot: "
            "write one with torch.cuda.memory._dump_snapshot(FILE)"
        )
    try:
        traces = dict(enumerate(content["device_traces"]))
        sizes = dict.fromkeys(traces, 0)
        for segment in content["segments"]:
            device = segment["device"]
            sizes[device] = sizes.get(device, 0) + segment["total_size"]
        device = max(sizes, default=0, key=lambda number: sizes[number])
        segments = [part for part in content["segments"] if part["device"] == device]
        snapshot = _of_device(path, device, traces.get(device, []), segments)
    except DAMAGED as error:
        raise UsageError(f"{path} is a damaged memory snapshot: {error!r}") from error
    if not any(sizes.values()) and len(snapshot.events) == 1:
        raise UsageError(f"{path} holds no memory: its process had not used a GPU")
    used = [str(number) for number, size in sizes.items() if size and number != device]
    if used:
        snapshot.notes.append(f"Not shown: memory of device {', '.join(used)}, which used less.")
    return snapshot


def _load(path: Path) -> Any:
    with files.opened(path) as file, progress(f"reading {path}"), files.many_objects():
        try:
            return _PlainUnpickler(file).load()
        except (pickle.UnpicklingError, EOFError, *DAMAGED) as error:
            reason = first_line(error)
            raise UsageError(f"{path} is no memory snapshot, or is cut off: {reason}") from error


def _of_device(
    path: Path, device: int, trace: Sequence[Mapping[str, Any]], segments: list[dict[str, Any]]
) -> Snapshot:
    places = _Places()
    alive = []
    free = []
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                free.append(block["size"])
            else:
                place, _ = places.of(block.get("frames"), BEFORE)
                alive.append((place, block["size"]))
    rows, failures = _changes(trace, places)
    used = sum(size for _, size in alive) - sum(row[1] for row in rows)
    pools = sum(segment["total_size"] for segment in segments) - sum(row[2] for row in rows)
    start = (rows[0][0] if rows else 0, used, pools, BEFORE, BEFORE)
    events = pandas.DataFrame([start, *rows], columns=COLUMNS)
    notes = []
    if not rows:
        notes.append(
            "The file has no history, so it tells nothing of the peak: call "
            "`torch.cuda.memory._record_memory_history()` before the steps."
        )
    return Snapshot(
        path,
        device,
        events,
        pandas.DataFrame(alive, columns=["place", "bytes"]),
        free,
        failures,
        notes,
        timed="time_us" in (trace[0] if trace else ()),
    )


def _changes(
    trace: Sequence[Mapping[str, Any]], places: "_Places"
) -> tuple[list[tuple], list[tuple[int, int, str]]]:
    """Rows of COLUMNS, and the requests that failed."""
    rows: list[tuple] = []
    failures = []
    owners: dict[int, tuple[str, str]] = {}
    for number, entry in enumerate(trace):
        action = entry["action"]
        time = entry.get("time_us", number)
        size = -(-entry["size"] // UNIT) * UNIT
        if action == "alloc":
            owner = places.of(entry.get("frames"), NO_STACK)
            owners[entry["addr"]] = owner
            rows.append((time, size, 0, *owner))
        elif action == "free_requested":
            owner = owners.pop(entry["addr"], (BEFORE, BEFORE))
            rows.append((time, -size, 0, *owner))
        elif action in ("segment_alloc", "segment_map"):
            rows.append((time, 0, size, BEFORE, BEFORE))
        elif action in ("segment_free", "segment_unmap"):
            rows.append((time, 0, -size, BEFORE, BEFORE))
        elif action == "oom":
            place, _ = places.of(entry.get("frames"), NO_STACK)
            failures.append((entry["size"], entry["device_free"], place))
    return rows, failures


class _Places:
    """Names the line and the category of stacks, each of which is often many lists of the same
    frames.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[int, ...], tuple[str, str]] = {}

    def of(self, frames: list[Mapping[str, Any]] | None, otherwise: str) -> tuple[str, str]:
        """Place and category, both `otherwise` where there is no stack."""
        if not frames:
            return otherwise, otherwise
        stack = tuple(map(id, frames))
        if stack not in self.known:
            self.known[stack] = (_line(frames), _category(frames))
        return self.known[stack]


def _line(frames: list[Mapping[str, Any]]) -> str:
    """The innermost line of the user's own, such as `models/llama.py:71 forward`."""
    ours = (frame for frame in frames if _is_ours(frame["filename"]))
    frame = next(ours, frames[0])
    name = "/".join(Path(frame["filename"]).parts[-2:])
    return f"{name}:{frame['line']} {frame['name']}"


@functools.cache
def _is_ours(filename: str) -> bool:
    return not NOT_OURS.search(filename)


def _category(frames: list[Mapping[str, Any]]) -> str:
    """The first of CALLS that is in the stack."""
    calls = {_call(frame["filename"], frame["name"]) for frame in frames}
    return next((call for call in CALLS if call in calls), "other")


@functools.cache
def _call(filename: str, name: str) -> str:
    if "torch/optim/" in filename:
        return "optimizer"
    if BACKWARD.search(name):
        return "backward"
    return "forward" if FORWARD.search(name) else ""
