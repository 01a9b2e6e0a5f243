"""Who makes whom wait among the ranks of a job."""

import json

from tests.conftest import ROOT
from tests.rank_files import write_late, write_rank
from tracepage.causes import rank_waits
from tracepage.errors import UsageError
from tracepage.readers import rank_traces

import pytest


def compare(*paths):
    traces, notes = rank_traces.find(paths)
    return rank_waits.compare({n: rank_waits.read_rank(path) for n, path in traces.items()}, notes)


def test_two_h100s_have_the_waits_of_the_log():
    job = compare(ROOT / "results/h100x2")
    assert [rank.exposed_ms for rank in job.ranks.values()] == pytest.approx([1.4, 1.9], abs=0.05)
    verdict = rank_waits.verdict(job)
    assert verdict["cause"] == "none" and verdict["sentence"].startswith("Neither a slow rank nor")
    assert rank_waits.kinds(job)[0][2:4] == [2, 23], "ranks, and all-reduces in a step"


@pytest.mark.parametrize(
    "in_loader, cause", [(False, "matrix products (gemm"), (True, "input (enumerate(DataLoader)")]
)
def test_a_slow_rank_is_named_with_what_takes_it_longer(tmp_path, in_loader, cause):
    job = compare(*write_late(tmp_path, in_loader=in_loader))
    verdict = rank_waits.verdict(job)
    assert (verdict["cause"], verdict["rank"]) == ("rank", 1)
    assert verdict["ms"] == pytest.approx(0.1) and job.waiting_ms[1] == pytest.approx(0)
    assert f"100 us more than they do on {cause}" in verdict["sentence"]
    assert [job.transfer_ms(rank) for rank in (0, 1)] == pytest.approx([0.02, 0.02])
    assert job.clocks[1] - job.clocks[0] == pytest.approx(0, abs=10), "each from its first event"
    [row] = rank_waits.kinds(job)
    assert row[-2:] == ["rank 1", 100] and row[4:6] == pytest.approx([0.02, 0.05])


def test_a_rank_that_another_made_wait_is_not_called_slow(tmp_path):
    """Rank 0 makes rank 1 wait, and so rank 1 comes late to rank 2."""
    write_rank(tmp_path, 0, [("gemm", 0, 300), ("tp [0, 1]", 300, 310)])
    calls = [("gemm", 0, 100), ("tp [0, 1]", 100, 310), ("dp [1, 2]", 310, 320)]
    write_rank(tmp_path, 1, calls)
    write_rank(tmp_path, 2, [("gemm", 0, 100), ("dp [1, 2]", 100, 320)])
    job = compare(tmp_path)
    assert rank_waits.verdict(job)["rank"] == 0
    assert list(job.waiting_ms.values()) == pytest.approx([0, 0.2, 0.21])
    assert {row[1]: row[-2] for row in rank_waits.kinds(job)} == {
        "tp [0, 1]": "rank 0",
        "dp [1, 2]": "rank 1",
    }


def test_ranks_that_are_even_and_move_bytes_wait_for_the_network(tmp_path):
    for rank in (0, 1):
        write_rank(tmp_path, rank, [("gemm", 0, 500), ("", 500, 700)], clock_us=7 * rank)
    verdict = rank_waits.verdict(compare(tmp_path))
    assert verdict["cause"] == "network" and verdict["ms"] == pytest.approx(0.2)
    assert "most of them of AllReduce" in verdict["sentence"]


def test_a_slow_rank_is_not_named_where_transfers_take_longer(tmp_path):
    write_rank(tmp_path, 0, [("gemm", 0, 500), ("", 500, 800)])
    write_rank(tmp_path, 1, [("gemm", 0, 600), ("", 600, 800)])
    job = compare(tmp_path)
    assert list(job.waiting_ms.values()) == pytest.approx([0.1, 0])
    verdict = rank_waits.verdict(job)
    assert verdict["cause"] == "network" and verdict["ms"] == pytest.approx(0.2)


def test_one_collective_that_ends_late_on_a_rank_moves_no_clock(tmp_path):
    calls = [("gemm", 0, 100), ("a [0, 1]", 100, 110), ("b [0, 1]", 110, 120)]
    write_rank(tmp_path, 0, [*calls, ("c [0, 1]", 120, 130), ("gemm", 130, 200)])
    write_rank(tmp_path, 1, [*calls, ("c [0, 1]", 120, 190), ("gemm", 190, 200)], clock_us=50)
    clocks = compare(tmp_path).clocks
    assert clocks[1] == pytest.approx(clocks[0])


def test_a_missing_rank_may_be_waited_for(tmp_path):
    for rank in (0, 1):
        write_rank(tmp_path, rank, [("gemm", 0, 500), ("", 500, 700)], world_size=3)
    sentence = rank_waits.verdict(compare(tmp_path))["sentence"]
    assert sentence.startswith("The network, or a rank without trace, limits the job")


def test_sends_and_receives_are_not_called_the_network(tmp_path):
    """A stage of a pipeline waits in them, as rank 1 does; both end with an all-reduce."""
    reduce = ("dp [0, 1]", 600, 610)
    write_rank(tmp_path, 0, [("gemm", 0, 300), ("send", 300, 310), ("gemm", 310, 600), reduce])
    write_rank(tmp_path, 1, [("send", 0, 310), ("gemm", 310, 600), reduce])
    job = compare(tmp_path)
    verdict = rank_waits.verdict(job)
    assert verdict["cause"] == "sends" and verdict["ms"] == pytest.approx(0.16)
    assert [job.transfer_ms(rank) for rank in (0, 1)] == pytest.approx([0.01, 0.01])
    assert [row[0] for row in rank_waits.kinds(job)] == ["allreduce"]


@pytest.mark.parametrize("transfer", [10, 40])
def test_ranks_that_are_late_in_turns_are_not_slow(tmp_path, transfer):
    """Nor is it the network, as long as they wait for each other longer than bytes move."""
    middle = 300 + transfer
    end = middle + 290 + transfer
    first = [("gemm", 0, 100), ("", 100, middle)]
    second = [("gemm", 0, 300), ("", 300, middle)]
    write_rank(tmp_path, 0, [*first, ("gemm", middle, middle + 290), ("", middle + 290, end)])
    write_rank(tmp_path, 1, [*second, ("gemm", middle, middle + 90), ("", middle + 90, end)])
    verdict = rank_waits.verdict(compare(tmp_path))
    assert verdict["cause"] == "turns" and verdict["rank"] is None
    assert verdict["ms"] == pytest.approx(0.2)


def test_waiting_beside_computing_costs_nothing(tmp_path):
    write_rank(tmp_path, 0, [("gemm", 0, 500), ("", 100, 400)])
    write_rank(tmp_path, 1, [("gemm", 0, 500), ("", 300, 400)])
    job = compare(tmp_path)
    assert list(job.waiting_ms.values()) == [0, 0]
    assert [rank.hidden_ms for rank in job.ranks.values()] == pytest.approx([0.3, 0.1])
    assert rank_waits.verdict(job)["cause"] == "none"


def test_of_a_wait_only_what_nothing_computes_beside_is_lost(tmp_path):
    """Rank 0 waits from 100 to 400 us, computes until 300, and bytes move until 500."""
    write_rank(tmp_path, 0, [("gemm", 0, 300), ("", 100, 500)])
    write_rank(tmp_path, 1, [("gemm", 0, 400), ("", 400, 500)])
    job = compare(tmp_path)
    assert list(job.waiting_ms.values()) == pytest.approx([0.1, 0])
    assert [job.transfer_ms(rank) for rank in (0, 1)] == pytest.approx([0.1, 0.1])


def test_sends_beside_computing_are_hidden_too(tmp_path):
    for rank in (0, 1):
        calls = [("gemm", 0, 500), ("send", 100, 300), ("", 500, 510)]
        write_rank(tmp_path, rank, calls)
    for rank in compare(tmp_path).ranks.values():
        assert (rank.hidden_ms, rank.sends_ms) == pytest.approx((0.2, 0))


def test_a_missing_rank_is_told(tmp_path):
    for rank in (0, 2):
        write_rank(tmp_path, rank, [("", 0, 100)], world_size=3)
    [note] = compare(tmp_path).notes
    assert note.startswith("No trace of 1 of 3 ranks (1)")


def test_collectives_that_only_some_ranks_have_are_counted(tmp_path):
    write_rank(tmp_path, 0, [("tp [0, 1]", 0, 100), ("pp [0, 2]", 200, 300)])
    write_rank(tmp_path, 1, [("tp [0, 1]", 50, 100)])
    [note] = compare(tmp_path).notes
    assert note.startswith("Not compared: 2 collectives")


def test_traces_of_two_jobs_are_refused(tmp_path):
    write_rank(tmp_path, 0, [("tp [0, 1]", 0, 100)])
    write_rank(tmp_path, 1, [("other [0, 1]", 0, 100)])
    with pytest.raises(UsageError, match=r"trace_rank1.json has no collective in common with"):
        compare(tmp_path)
    write_rank(tmp_path, 1, [("tp [0, 1]", 0, 100)], clock_us=70e6)
    with pytest.raises(UsageError, match=r"are of two jobs: they were recorded 70 s apart"):
        compare(tmp_path)


def test_a_rank_without_a_gpu_is_refused(tmp_path):
    write_rank(tmp_path, 0, [("", 0, 100)])
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 5}
    (tmp_path / "trace_rank1.json").write_text(json.dumps({"traceEvents": [event]}))
    with pytest.raises(UsageError, match=r"trace_rank1.json has no kernels of a GPU"):
        compare(tmp_path)
