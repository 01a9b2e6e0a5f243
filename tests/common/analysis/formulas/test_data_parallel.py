"""The model on paper: its limits, by hand and in general."""

from itertools import pairwise

from common.analysis.formulas import data_parallel
from common.analysis.formulas.data_parallel import Link, Step, Transfer

import pytest

FORMS = ("ddp", "zero1", "fsdp")
ONE, LINK, ENDLESS = Step(10.0, 20.0, 3.0), Link(100.0, 5.0), Link(1e30, 0.0)
COUNTS = [1, 2, 4, 8, 64, 4096]


def step_ms(form: str, processes: int, link: Link = LINK, share: float = 1.0) -> float:
    return data_parallel.step_ms(form, data_parallel.transfers(form, 1_000_000_000, 22), ONE, processes, link, share)


@pytest.mark.parametrize("n", COUNTS)
def test_with_a_link_without_limits_scaling_is_perfect(n):
    """A sharded update takes an n-th of its time; the update of ddp takes all of it, however small the batch."""
    assert step_ms("ddp", n, ENDLESS) == pytest.approx(ONE.total)
    assert data_parallel.efficiency(ONE.total, step_ms("ddp", n, ENDLESS)) == pytest.approx(1)
    for form in ("zero1", "fsdp"):
        assert step_ms(form, n, ENDLESS) == pytest.approx(30 + 3 / n)
        assert data_parallel.efficiency(ONE.total, step_ms(form, n, ENDLESS, 1 / n), 1 / n) == pytest.approx(1)
    assert step_ms("ddp", n, ENDLESS, 1 / n) == pytest.approx(30 / n + 3)


@pytest.mark.parametrize("form", FORMS)
def test_a_slower_link_is_never_faster_and_more_gpus_never_communicate_less(form):
    times = [step_ms(form, 8, Link(bandwidth, 5.0)) for bandwidth in (1000, 100, 10, 1)]
    assert times == sorted(times) and times[0] < times[-1]
    times = [step_ms(form, 8, Link(100.0, latency)) for latency in (0, 10, 1000)]
    assert times == sorted(times) and times[0] < times[-1]
    moved = data_parallel.transfers(form, 1_000_000_000, 22)
    totals = [sum(data_parallel.transfer_ms(each, n, LINK) for each in moved) for n in COUNTS]
    assert totals[0] == 0 and all(few < many for few, many in pairwise(totals))
    if form == "ddp":
        times = [step_ms(form, n) for n in COUNTS]
        assert times == sorted(times)


@pytest.mark.parametrize(
    "kind, expected",
    [("all_reduce", 2 * 3 * (0.01 + 8 / 4)), ("all_gather", 3 * (0.01 + 8 / 4)), ("reduce_scatter", 3 * (0.01 + 8 / 4)),
     ("broadcast", 3 * 0.01 + 8), ("reduce", 3 * 0.01 + 8)],
)  # fmt: skip
def test_a_collective_on_four_gpus(kind, expected):
    """8 MB over 1 GB/s take 8 ms; the latency is 10 us."""
    assert data_parallel.transfer_ms(Transfer(kind, 8e6, 1, "nothing"), 4, Link(1.0, 10.0)) == pytest.approx(expected)


def test_all_but_the_last_piece_overlap_with_the_pass_as_far_as_they_fit():
    """Four pieces of an all-reduce of 2 x 8 MB / 2 over 1 GB/s: 2 ms each."""
    moved = [Transfer("all_reduce", 8e6, 4, "backward")]
    assert data_parallel.exposed_ms(moved, 2, Link(1.0, 0.0), 100.0) == pytest.approx(2)  # only the last piece
    assert data_parallel.exposed_ms(moved, 2, Link(1.0, 0.0), 4.0) == pytest.approx(8 - 3)  # the first is ready after 1 ms
    assert data_parallel.exposed_ms(moved, 2, Link(1.0, 0.0), 0.0) == pytest.approx(8)
    assert data_parallel.exposed_ms([], 2, LINK, 1.0) == 0
    moved = [Transfer("all_gather", 8e6, count, "backward") for count in (1, 4, 1)]  # 4 ms each
    assert data_parallel.exposed_ms(moved, 2, Link(1.0, 0.0), 100.0) == pytest.approx(12 / 4)
    moved = data_parallel.transfers("zero1", 10**9, 22)  # 20 ms each: of the first the last of 153 pieces is exposed
    ms = data_parallel.step_ms("zero1", moved, Step(10.0, 100.0, 4.0), 2, Link(100.0, 0.0))
    assert ms == pytest.approx(10 + 100 + 4 / 2 + 20 / 153 + 20)


def test_the_bytes_of_each_form_and_the_link_behind_all_reduces():
    """64 MB between 4 processes: 2 x 3/4 of them over each link in 0.48 ms; a small one takes 30 us for 6 messages."""
    buckets, blocks = 153, 23  # of 25 MiB; one a layer and one for the rest
    assert {form: data_parallel.transfers(form, 10**9, 22) for form in FORMS} == {
        "ddp": [Transfer("all_reduce", 4e9, buckets, "backward")],
        "zero1": [Transfer("reduce_scatter", 4e9, buckets, "backward"), Transfer("all_gather", 4e9, 1, "nothing")],
        "fsdp": [
            Transfer("all_gather", 4e9, blocks, "forward"), Transfer("all_gather", 4e9, blocks, "backward"),
            Transfer("reduce_scatter", 4e9, blocks, "backward"),
        ],
    }  # fmt: skip

    link = data_parallel.link_of([(64_000_000, 0.48), (4096, 0.03)], 4)
    assert link == pytest.approx((200.0, 5.0))
