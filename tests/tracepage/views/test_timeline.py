"""The timeline of a page: tracks, steps and numbers of known traces, and what a trace of another
program may hold.
"""

import json
from pathlib import Path

from tracepage.causes.waits import GAP_COLUMNS
from tracepage.readers import chrome_trace, load_kernels
from tracepage.views import timeline

import pandas

COLUMNS = [*GAP_COLUMNS, "culprit", "gap"]
NO_GAPS = pandas.DataFrame(columns=COLUMNS)


def events(found: dict, track: str) -> list[tuple]:
    """Start and duration in us, name, group, the other number in us, and the details, of each event
    of a track.
    """
    [numbers] = [each["events"] for each in found["tracks"] if each["name"] == track]
    rows, start = [], 0
    for delta, duration, name, group, detail, beside in zip(
        *(numbers[i::6] for i in range(6)), strict=True
    ):
        start += delta
        detail = dict(found["details"][detail])
        rows.append(
            (
                start / 1e3,
                duration / 1e3,
                found["names"][name],
                found["groups"][group],
                beside / 1e3,
                detail,
            )
        )
    return rows


def test_kernels_have_their_stream_span_and_delay(gpu_profile):
    found = timeline.draw_trace(chrome_trace.load(gpu_profile.with_name("trace_2.json")), NO_GAPS)
    assert [track["name"] for track in found["tracks"]] == [
        "host, thread 1",
        "host, thread 2 (backward)",
        "GPU, stream 7",
        "GPU, stream 8",
    ]
    kernels = events(found, "GPU, stream 7")
    assert [row[:5] for row in kernels] == [
        (0, 35, "before", "not counted", -1e-3),
        (50, 30, "gemm", "attention", 6),
        (80, 5, "add", "residual", 17),
        (90, 30, "gemm", "attention", 6),
        (130, 30, "foreach", "optimizer", 15),
        (161, 59, "gemm", "mlp", 19),
    ]
    detail = kernels[1][5]
    assert (detail["operator"], detail["shapes"], detail["phase"]) == (
        "aten::mm",
        "[[4, 8], [8, 8]]",
        "forward",
    )
    assert [name for name, *_ in found["steps"]] == ["step 1", "step 2"] and found["left_out"] == 0


def test_the_longest_events_and_all_kernels_are_kept(monkeypatch, gpu_profile):
    monkeypatch.setattr(timeline, "EVENTS", 8)
    trace = chrome_trace.load(gpu_profile.with_name("trace_2.json"))
    found = timeline.draw_trace(trace, NO_GAPS)
    names = [found["names"][name] for track in found["tracks"] for name in track["events"][2::6]]
    assert (
        len(names) == 8
        and {"gemm", "foreach"} <= set(names)
        and "ProfilerStep#0" in names
        and found["left_out"] == 24 + 7 - 8
    )
    monkeypatch.setattr(timeline, "EVENTS", 6)
    assert [track["name"] for track in timeline.draw_trace(trace, NO_GAPS)["tracks"]] == [
        "GPU, stream 7",
        "GPU, stream 8",
    ]


def test_waits_stand_first_with_their_cause_and_the_time_of_all_their_parts(gpu_profile):
    trace = chrome_trace.load(gpu_profile.with_name("trace_2.json"))
    place = ("aten::item", "loss", "train.py(7): main", "aten::item")
    waits = [
        (55_000, 5_000, "copy_to_host", *place, 4, 1),
        (60_000, 3_000, "copy_to_host", *place, 4, -1),
        (90_000, 10_000, "launches", "", "", "", "", 4, 2),
    ]
    found = timeline.draw_trace(trace, pandas.DataFrame(waits, columns=COLUMNS))
    assert found["tracks"][0]["name"] == timeline.WAITS
    detail = {"operator": "aten::item", "span": "loss", "line": "train.py(7): main"}
    assert events(found, timeline.WAITS) == [
        (55, 5, "copy to host, aten::item", "copy to host", 8, detail),
        (60, 3, "copy to host, aten::item", "copy to host", 8, detail),
        (90, 10, "launches", "launches", 10, {}),
    ]


def test_a_cpu_has_self_times(cpu_trace):
    trace = chrome_trace.load(cpu_trace)
    found = timeline.draw_trace(trace, NO_GAPS)
    [track] = found["tracks"]
    assert len(track["events"]) == 6 * sum(event.kind != "memory" for event in trace.host)
    outer = next(row for row in events(found, track["name"]) if row[2] == "aten::linear")
    assert 0 <= outer[4] < outer[1] and {"attention", "mlp", "optimizer"} <= set(found["groups"])


def drawn(path: Path) -> dict:
    return timeline.draw_events(load_kernels.load(path, any_trace=True))


def test_a_trace_of_another_program(tmp_path):
    """Begin and end make an event, threads have their names, times may be text, what never began is
    left out.
    """
    place = {"pid": 1, "tid": 2}
    content = [
        {"ph": "M", "name": "process_name", "pid": 3, "args": None},
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "server"}},
        {"ph": "M", "name": "thread_name", **place, "args": {"name": "main"}},
        {"ph": "B", "name": "request", "ts": 10, **place},
        {
            "ph": "X",
            "name": "parse",
            "cat": "text",
            "ts": "12.0",
            "dur": "3",
            "args": {"bytes": 7},
            **place,
        },
        {"ph": "E", "ts": 20, **place},
        {"ph": "E", "ts": 21, **place},
        {"ph": "s", "name": "arrow", "ts": 21, **place},
    ]
    (tmp_path / "other.json").write_text(json.dumps({"traceEvents": content}))
    found = events(drawn(tmp_path / "other.json"), "server, main")
    assert [row[:4] for row in found] == [
        (0, 10, "request", "event"),
        (2, 3, "parse", "text"),
    ] and found[1][5] == {"bytes": "7"}
    wrong = [
        {**content[4], field: value} for field, value in (("dur", []), ("ts", "soon"), ("dur", -1))
    ]
    (tmp_path / "other.json").write_text(json.dumps({"traceEvents": [*content[1:5], *wrong]}))
    [note] = load_kernels.load(tmp_path / "other.json", any_trace=True).notes
    assert note.startswith("Left out: 4 events "), "three damaged events, and one without an end"


def test_asynchronous_events_are_drawn_by_their_id(tmp_path):
    """As NCCL's profiler writes them: two collectives at a time, each with its network's part."""
    ops = [(number, name, start) for number in (0, 1) for name, start in (("all", 0), ("net", 10))]
    content = [
        {"name": name, "cat": "COLL", "ph": phase, "id": number, "pid": 7, "tid": 1, "ts": ts}
        for number, name, start in ops
        for phase, ts in (("b", 50 * number + start), ("e", 50 * number + 300 - start))
    ]
    content.append({"ph": "X", "name": "other", "pid": 7, "tid": 1, "ts": 0, "dur": 3})
    content += [{"ph": "e", "cat": "COLL", "name": "all", "id": 9, "pid": 7, "tid": 1, "ts": 9}]
    (tmp_path / "trace.json").write_text(json.dumps(content))
    source = load_kernels.load(tmp_path / "trace.json", any_trace=True)
    sums = source.table.groupby("name").duration_ns.agg(["size", "sum"])
    assert dict(sums["sum"]) == {"all": 600_000, "net": 560_000, "other": 3000}
    assert list(sums["size"]) == [2, 2, 1]
    assert source.notes == ("Left out: 1 event without a name, a time, a begin or an end.",)


def test_pairs_of_a_thread_may_have_the_category_of_an_operator(tmp_path):
    place = {"cat": "operator", "pid": 0, "tid": 3}
    content = [
        {"name": "Convolution", "ph": phase, "ts": 50 * i + start, **place}
        for i in range(20)
        for phase, start in (("B", 0), ("E", 30))
    ]
    (tmp_path / "trace.json").write_text(json.dumps(content))
    table = load_kernels.load(tmp_path / "trace.json", any_trace=True).table
    assert (len(table), table.duration_ns.sum()) == (20, 600_000)
