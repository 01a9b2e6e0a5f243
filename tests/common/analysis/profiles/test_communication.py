"""Communication in the traces of two ranks, written by hand."""

from pathlib import Path

from common.analysis.profiles import communication
from common.errors import UsageError
from tests.small_traces import gloo_trace, gpu_trace, rank_trace, write_ranks

import pytest


def split(folder: Path, *contents: dict) -> list[dict]:
    write_ranks(folder, *contents)
    return communication.split(communication.find(folder))


def test_overlap_and_waiting_of_two_ranks(tmp_path):
    """Of rank 0's 80 us, 40 + 10 lie beside a product; 10 us of each all-reduce are waiting for rank 1, and beside a product."""
    first, second = split(tmp_path, rank_trace(0), rank_trace(1))
    both = {"exposed_ms": 0.030, "moving_ms": 0.060, "exposed_waiting_ms": 0.0}
    assert first == pytest.approx(both | {"communication_ms": 0.080, "overlapped_ms": 0.050, "waiting_ms": 0.020})
    assert second == pytest.approx(both | {"communication_ms": 0.060, "overlapped_ms": 0.030, "waiting_ms": 0.0})

    early = rank_trace(0)
    early["traceEvents"] = [event for event in early["traceEvents"] if event["name"] != "gemm"]
    first, second = split(tmp_path, early, rank_trace(1))
    assert first["exposed_ms"] == pytest.approx(0.080) and first["exposed_waiting_ms"] == pytest.approx(0.020)


def test_gloo_on_a_cpu(tmp_path):
    first, second = split(tmp_path, gloo_trace(0), gloo_trace(1))
    assert (first["communication_ms"], first["overlapped_ms"], first["waiting_ms"]) == pytest.approx((0.070, 0.020, 0.030))
    assert (second["communication_ms"], second["overlapped_ms"], second["waiting_ms"]) == pytest.approx((0.040, 0, 0))


def test_traces_in_the_order_of_the_ranks(tmp_path):
    for name in ("trace_rank10_1.json", "trace_rank2_1.json", "trace_1.json", "eager_trace_1.json", "profile_1.json"):
        (tmp_path / name).write_text("")
    assert [path.name for path in communication.find(tmp_path)] == ["trace_1.json", "trace_rank2_1.json", "trace_rank10_1.json"]


def test_traces_that_do_not_belong_together_are_refused_and_one_without_collectives_is_not(tmp_path):
    (alone,) = split(tmp_path, gpu_trace())
    assert set(alone.values()) == {0.0}
    short = rank_trace(1)
    del short["traceEvents"][-1]
    with pytest.raises(UsageError, match="not of one job, or one is cut off: ncclDevKernel_AllGather_RING_LL number 1 of step 1"):
        split(tmp_path, rank_trace(0), short)
