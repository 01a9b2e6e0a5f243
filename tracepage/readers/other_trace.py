"""Reads the timed events of a Chrome trace that any other program wrote."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tracepage.readers.source import OTHER_TRACE, Source
from tracepage.readers.trace_events import BEGINS, DAMAGED, nanoseconds
from tracepage.terminal import counted

import pandas

ENDS = ("E", "e", "F")
COLUMNS = ["track", "name", "category", "start_ns", "duration_ns", "calls", "detail"]


def read_other_trace(path: Path, records: Iterable[dict[str, Any]]) -> Source:
    """A row per event of a trace: complete ones, and pairs of begin and end, which are the last of
    a thread or, where they are asynchronous, have one category, id and name. `track` names process
    and thread, and `detail` holds pairs of a label and a value. A note counts what is left out,
    because it is damaged or has no begin or end.
    """
    labels: dict[str | tuple[str, str], str] = {}  # Of a process, and of one of its threads.
    rows: list[list[Any]] = []
    begun: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    damaged = 0
    for record in records:
        phase = record.get("ph")
        track = (str(record.get("pid")), str(record.get("tid")))
        try:
            if phase == "M" and record["name"] in ("process_name", "thread_name"):
                owner = track[0] if record["name"] == "process_name" else track
                labels[owner] = str(record["args"]["name"])
            elif phase == "X":
                rows.append(_row(track, record, nanoseconds(record["dur"])))
            elif phase in BEGINS:
                begun[_pair(track, record)].append(record)
            elif phase in ENDS:
                first = begun[_pair(track, record)].pop()
                duration = nanoseconds(record["ts"]) - nanoseconds(first["ts"])
                place = (str(first.get("pid")), str(first.get("tid")))
                rows.append(_row(place, first | record | {"ts": first["ts"]}, duration))
        except DAMAGED:
            damaged += 1
    damaged += sum(map(len, begun.values()))
    names = {
        track: f"{labels.get(track[0], track[0])}, {labels.get(track, track[1])}"
        for track, *_ in rows
    }
    shared = Counter(names.values())
    origin = min((row[3] for row in rows), default=0)
    for row in rows:
        name = names[row[0]]
        row[0] = f"{name} ({', '.join(row[0])})" if shared[name] > 1 else name
        row[3] -= origin
    notes = (f"Left out: {counted(damaged, 'event')} without a name, a time, a begin or an end.",)
    table = pandas.DataFrame(rows, columns=COLUMNS).assign(span="", phase="")
    return Source(OTHER_TRACE, path, table, notes=notes if damaged else ())


def _pair(track: tuple[str, str], record: dict[str, Any]) -> tuple[str, ...]:
    """The same for the begin and the end of an event."""
    if record["ph"] in "BE":
        return track
    number = record.get("id", record.get("id2"))
    return (str(record.get("cat")), str(number), str(record["name"]))


def _row(track: tuple[str, str], record: dict[str, Any], duration: int) -> list[Any]:
    """One of DAMAGED: the event is damaged. AMD's rpd2tracing writes times as text."""
    if duration < 0:
        raise ValueError
    arguments = record.get("args") or {}
    detail = tuple((key, str(value)) for key, value in arguments.items())
    category = str(record.get("cat", "event"))
    start = nanoseconds(record["ts"])
    return [track, str(record["name"]), category, start, duration, 1, detail]
