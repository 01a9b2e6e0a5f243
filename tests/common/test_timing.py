"""The clock: the calls that a benchmark times, its summary, and the phases of a step."""

import os
from pathlib import Path

from common import spans, timing
from common.spans import span

import pytest
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


# ------------------------------------------------------------------------------------------ other programs


@pytest.fixture
def after_a_second(monkeypatch, tmp_path: Path):
    """after_a_second(ticks of core 0, of core 1, of core 2, threads): the note, where this process
    may use cores 0 and 1, and took 0.3 s itself.
    """
    clock = [100.0]
    own = [7.0]
    monkeypatch.setattr(timing, "CPU_TIMES", tmp_path / "stat")
    monkeypatch.setattr(timing.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(timing.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(timing.os, "sysconf", lambda _: 100)
    monkeypatch.setattr(timing.os, "times", lambda: os.times_result((own[0], 0, 0, 0, 0)))

    def write(*ticks: int) -> None:
        """Half of the ticks are a user's, half of the system; there are many idle ones."""
        lines = [f"cpu{i} {half} 0 {half} 9999 99 0 0 0 5 5" for i, half in enumerate(ticks)]
        (tmp_path / "stat").write_text("\n".join(["cpu  1 1 1 1 1 1 1 1 1 1", *lines, "intr 3"]))

    def note(*ticks: int, threads: int = 2) -> str | None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        write(1000, 1000, 1000)
        others = timing.OtherPrograms(CPU)
        write(*(1000 + count // 2 for count in ticks))
        clock[0] += 1
        own[0] += 0.3
        return others.note()

    return note


def test_cores_that_other_programs_use_are_told_with_the_cure(after_a_second):
    said = "other programs use 1.5 of 2 cores, and 2 threads wait for them: put OMP_NUM_THREADS=1 "
    assert after_a_second(100, 80, 0) == f"{said}in front of the command"
    assert after_a_second(100, 80, 0, threads=1) is None
    assert after_a_second(30, 20, 100) is None, "its own work, and a core that it may not use"
    timing.CPU_TIMES.unlink()
    assert timing.OtherPrograms(CPU).busy == 0


@pytest.mark.parametrize("percent, told", [(60, True), (3, False), (OSError("no NVML"), False)])
def test_a_gpu_that_other_programs_use_is_told(monkeypatch, percent, told):
    def utilization() -> int:
        if isinstance(percent, OSError):
            raise percent
        return percent

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    note = timing.OtherPrograms(torch.device("cuda")).note()
    assert bool(note) == told and (not told or "60 % busy" in note)
