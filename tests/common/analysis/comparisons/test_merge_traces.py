"""Traces of several ranks in one, and the command that merges them."""

import json

from common.analysis.comparisons import merge_traces
from common.analysis.profiles import communication
from common.errors import UsageError
from common.files import read_json
from tests.conftest import ROOT
from tests.small_traces import gpu_trace, rank_trace, write_ranks

import pytest

SCRIPT = ROOT / "version4_ultra_fused/merge_traces.py"


def test_merged_traces_keep_the_tracks_and_arrows_of_the_ranks_apart(tmp_path):
    contents = [gpu_trace(), gpu_trace()]
    for content in contents:
        content["traceEvents"] += [
            {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
            {"ph": "M", "name": "process_sort_index", "pid": 0, "args": {"sort_index": 9}},
            {"ph": "s", "name": "fwdbwd", "cat": "fwdbwd", "id": 7, "pid": 0, "tid": 1, "ts": 12},
        ]
    write_ranks(tmp_path, *contents)
    merged = merge_traces.merge(communication.find(tmp_path))["traceEvents"]
    assert [event.get("ts") for event in merged] == [event.get("ts") for each in contents for event in each["traceEvents"]]
    half = len(merged) // 2
    for key in ("pid", "id"):
        first, second = ({event[key] for event in part if key in event} for part in (merged[:half], merged[half:]))
        assert len(first) == len(second) > 0 and not first & second
    names = {event["args"]["name"] for event in merged if event["name"] == "process_name"}
    assert {"rank 0: python", "rank 1: python"} <= names
    assert [event["args"]["sort_index"] for event in merged if event["name"] == "process_sort_index"] == [0, 1]


def test_the_ranks_of_one_run_are_written_into_one_trace(execute, refused, tmp_path):
    write_ranks(tmp_path, rank_trace(0), rank_trace(1))
    assert "written: all.json.gz (2 ranks)" in execute(SCRIPT, ".", "--output", "all.json.gz").out
    events = read_json(tmp_path / "all.json.gz")["traceEvents"]
    assert len(events) == sum(len(rank_trace(rank)["traceEvents"]) for rank in (0, 1))

    (tmp_path / "trace_2027.json").write_text(json.dumps(rank_trace(0)))
    assert "traces of several runs (ranks [0, 0, 1])" in refused(SCRIPT, ".")
    assert "holds 0 traces" in refused(SCRIPT, "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    write_ranks(tmp_path / "elsewhere", rank_trace(0), rank_trace(1), rank_trace(1))
    (tmp_path / "elsewhere" / "trace_rank1_2026.json").unlink()
    assert "elsewhere lacks the traces of ranks 1" in refused(SCRIPT, "elsewhere")
    (tmp_path / "elsewhere" / "trace_rank2_2026.json").unlink()
    assert "elsewhere holds 1 trace (" in refused(SCRIPT, "elsewhere")


def test_events_that_are_none_are_refused_and_a_nameless_process_is_not(tmp_path):
    write_ranks(tmp_path, {"traceEvents": [{"ph": "M", "name": "process_name"}]})
    (event,) = merge_traces.merge(communication.find(tmp_path))["traceEvents"]
    assert event["args"] == {"name": "rank 0: "}
    write_ranks(tmp_path, {"traceEvents": [7]})
    with pytest.raises(UsageError, match="one of its traceEvents is no object"):
        merge_traces.merge(communication.find(tmp_path))
