"""The clock: the calls that a benchmark times, its summary, and the phases of a step."""

from common import spans, timing
from common.spans import span

import torch

CPU = torch.device("cpu")


def test_a_benchmark_leaves_out_its_warm_up_and_a_summary_has_the_percentiles():
    calls = []
    assert (
        len(timing.benchmark(lambda: calls.append(1), CPU, warmup=3, iterations=5)) == 5
        and len(calls) == 8
    )
    assert timing.summarize([float(i) for i in range(11)]) == {
        "median": 5.0,
        "p20": 2.0,
        "p80": 8.0,
        "count": 11,
    }


def test_a_benchmark_by_time_goes_on_until_its_seconds_are_over(monkeypatch):
    """On a clock that each call advances by a second; the host is never more than AHEAD calls ahead
    of the device.
    """
    now = [0.0]
    waited = []

    def work() -> None:
        now[0] += 1.0

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing.Clock, "wait", lambda self, mark: waited.append(mark))
    times = timing.benchmark(work, CPU, warmup=0, iterations=2, seconds=9.5)
    assert times == [1e3] * 10
    assert waited[:2] == [1, 3] and 10 - timing.AHEAD == 2
    assert len(timing.benchmark(work, CPU, warmup=0, iterations=12, seconds=9.5)) == 12


def test_the_phases_are_cut_where_their_spans_begin_and_end(monkeypatch):
    """A clock that counts seconds: forward takes 3, backward 5, the optimizer 2, and 1 lies between
    the last two.
    """
    now = [0.0]

    def work(seconds: int) -> None:
        now[0] += seconds

    def step(i: int) -> None:
        work(3)
        with span("backward"):
            work(5)
        work(1)
        with span("optimizer"):
            work(2)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    times = timing.phase_times(step, CPU)
    assert (
        times == {"forward": [3e3] * 10, "backward": [5e3] * 10, "optimizer": [2e3] * 10}
        and spans.observer is None
    )
