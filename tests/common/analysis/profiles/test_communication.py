"""Communication in the traces of two ranks, written by hand."""

from pathlib import Path

from common.analysis.profiles import communication
from common.errors import UsageError
from tests.small_traces import gloo_trace, gpu_trace, rank_trace, write_ranks

import pytest


def loaded(folder: Path, *contents: dict) -> list[communication.Traced]:
    write_ranks(folder, *contents)
    return [communication.load(path) for path in communication.find(folder)]


def test_overlap_and_waiting_of_two_ranks(tmp_path):
    """Of rank 0's 80 us, 40 + 10 lie beside a product; 10 us of each all-reduce are waiting for rank 1, and beside a product."""
    ranks = loaded(tmp_path, rank_trace(0), rank_trace(1))
    first, second = communication.split(ranks)
    both = {"exposed_ms": 0.030, "moving_ms": 0.060, "exposed_waiting_ms": 0.0}
    assert first == pytest.approx(both | {"communication_ms": 0.080, "overlapped_ms": 0.050, "waiting_ms": 0.020})
    assert second == pytest.approx(both | {"communication_ms": 0.060, "overlapped_ms": 0.030, "waiting_ms": 0.0})

    early = rank_trace(0)
    early["traceEvents"] = [event for event in early["traceEvents"] if event["name"] != "gemm"]
    first, second = communication.split(loaded(tmp_path, early, rank_trace(1)))
    assert first["exposed_ms"] == pytest.approx(0.080) and first["exposed_waiting_ms"] == pytest.approx(0.020)


@pytest.mark.parametrize(
    "name, kind",
    [("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce_scatter"), ("ncclDevKernel_Reduce_Sum_f32_RING_LL", "reduce"),
     ("ncclKernel_Broadcast_RING_LL_Sum_int8_t", "broadcast"), ("rccl_main_kernel(ncclDevComm*)", "collective"),
     ("gloo:all_gather", "all_gather"), ("ncclDevKernel_SendRecv", "send_recv")],
)  # fmt: skip
def test_the_kind_of_a_collective(name, kind):
    assert communication.kind(name) == kind


def test_a_kernel_for_all_collectives_is_named_by_its_arguments(tmp_path):
    """RCCL's."""
    content = rank_trace(0)
    for event in content["traceEvents"]:
        if "AllGather" in event["name"]:
            event["name"] = "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)"
            event["args"] |= {"Collective name": "_reduce_scatter_base", "dtype": "BFloat16"}
    (rank,) = loaded(tmp_path, content)
    assert [each.kind for each in rank.collectives].count("reduce_scatter") == 1


def test_gloo_on_a_cpu(tmp_path):
    ranks = loaded(tmp_path, gloo_trace(0), gloo_trace(1))
    first, second = communication.split(ranks)
    assert (first["communication_ms"], first["overlapped_ms"], first["waiting_ms"]) == pytest.approx((0.070, 0.020, 0.030))
    assert (second["communication_ms"], second["overlapped_ms"], second["waiting_ms"]) == pytest.approx((0.040, 0, 0))
    assert [each.kind for each in ranks[0].collectives] == ["all_reduce"]


def test_a_kernel_whose_launch_is_not_in_the_trace_belongs_to_the_step_of_the_kernel_before(tmp_path):
    """And one that was launched before the trace began belongs to none."""
    content = rank_trace(0)
    for event in content["traceEvents"]:
        if event["cat"] == "kernel" and "AllGather" in event["name"]:
            event["args"]["correlation"] = 99
    before = {**content["traceEvents"][-1], "ts": 900.0, "args": {"correlation": 98}}
    content["traceEvents"].append(before)
    (rank,) = loaded(tmp_path, content)
    assert [each.step for each in rank.collectives] == [0, 0, 0]


def test_traces_in_the_order_of_the_ranks(tmp_path):
    for name in ("trace_rank10_1.json", "trace_rank2_1.json", "trace_1.json", "eager_trace_1.json", "profile_1.json"):
        (tmp_path / name).write_text("")
    assert [path.name for path in communication.find(tmp_path)] == ["trace_1.json", "trace_rank2_1.json", "trace_rank10_1.json"]


def test_traces_that_do_not_belong_together_are_refused_and_one_without_collectives_is_not(tmp_path):
    (split,) = communication.split(loaded(tmp_path, gpu_trace()))
    assert set(split.values()) == {0.0}
    short = rank_trace(1)
    del short["traceEvents"][-1]
    with pytest.raises(UsageError, match="not of one job, or one is cut off: all_gather number 1 of step 1"):
        communication.split(loaded(tmp_path, rank_trace(0), short))
