"""One clock for every measurement in this repository.

On a GPU a region lies between two device events, and nothing synchronizes inside it; on a CPU it
lies between two readings of the monotonic clock. Results are milliseconds; the summary is the
median with the 20th and 80th percentile.
"""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from common import device as devices
from common import spans

import numpy as np
import torch

PHASE_STEPS = 10
AHEAD = 8  # calls that the host may be ahead of the device where a benchmark ends by time
LOOK = 0.5  # seconds, at least, in which other programs are watched
CPU_TIMES = Path("/proc/stat")
BUSY_GPU = 10  # percent, from which on a GPU is shared


class Clock:
    """Marks instants without waiting for the device; the intervals are read at the end.

    Usage: mark(), work, mark(), ..., then `milliseconds(i, j)` between the i-th and the j-th mark.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list = []

    def mark(self) -> int:
        """Index of the new mark."""
        if devices.is_gpu(self.device):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())
        return len(self.marks) - 1

    def wait(self, mark: int) -> None:
        """Waits until the device has reached a mark."""
        if devices.is_gpu(self.device):
            self.marks[mark].synchronize()

    def milliseconds(self, start: int, stop: int) -> float:
        """Time between two marks. Waits for the device only until the second was reached."""
        self.wait(stop)
        if devices.is_gpu(self.device):
            return self.marks[start].elapsed_time(self.marks[stop])
        return (self.marks[stop] - self.marks[start]) * 1e3


def benchmark(
    function: Callable[[], object],
    device: torch.device,
    warmup: int = 3,
    iterations: int = 20,
    seconds: float = 0.0,
) -> list[float]:
    """Milliseconds of each call after `warmup` others: of `iterations` calls, or of more that take
    at least `seconds` together.
    """
    for _ in range(warmup):
        function()
    devices.synchronize(device)
    clock = Clock(device)
    count = 0
    end = time.perf_counter() + seconds
    while count < iterations or time.perf_counter() < end:
        clock.mark()
        function()
        clock.mark()
        count += 1
        if seconds and count > AHEAD:  # Without it the host would go on to launch for seconds.
            clock.wait(2 * (count - AHEAD) - 1)
    return [clock.milliseconds(2 * i, 2 * i + 1) for i in range(count)]


def summarize(milliseconds: list[float]) -> dict[str, float | int]:
    """Median, 20th and 80th percentile (ms) and how many there were."""
    p20, median, p80 = np.percentile(milliseconds, [20, 50, 80]).tolist()
    return {"median": median, "p20": p20, "p80": p80, "count": len(milliseconds)}


def phase_times(
    step: Callable[[int], object], device: torch.device, clock_type: type[Clock] = Clock
) -> dict[str, list[float]]:
    """Milliseconds of forward (with the loss), backward and optimizer in each of ten further
    training steps.

    The phases are cut where the spans `backward` and `optimizer` begin and end, by marks that
    nothing waits for.
    """
    times: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}
    clock = clock_type(device)
    cuts = {}

    def observe(name: str, entering: bool) -> None:
        if name in ("backward", "optimizer"):
            cuts[name, entering] = clock.mark()

    spans.observer = observe
    for i in range(PHASE_STEPS):
        devices.synchronize(device)
        start = clock.mark()
        step(i)
        times["forward"].append(clock.milliseconds(start, cuts["backward", True]))
        for name in ("backward", "optimizer"):
            times[name].append(clock.milliseconds(cuts[name, True], cuts[name, False]))
    spans.observer = None
    return times


class OtherPrograms:
    """What other programs take of the device since this was made, before a measurement begins."""

    def __init__(self, device: torch.device) -> None:
        self.gpu_percent = 0
        # Later this process's own kernels would count.
        if devices.is_gpu(device) and not torch.cuda.is_initialized():
            with contextlib.suppress(Exception):  # Neither NVML nor amdsmi answers everywhere.
                self.gpu_percent = torch.cuda.utilization()
        self.threads = 1 if devices.is_gpu(device) else torch.get_num_threads()
        self.start = time.monotonic()
        self.busy = _busy_seconds()

    def note(self) -> str | None:
        """A sentence with the cure; None if they take little, or if nothing here counts it."""
        if self.gpu_percent > BUSY_GPU:
            return (
                f"other programs keep this GPU {self.gpu_percent} % busy, and times include that: "
                "choose a free one with CUDA_VISIBLE_DEVICES"
            )
        if self.threads == 1:
            return None
        time.sleep(max(0.0, self.start + LOOK - time.monotonic()))
        used = (_busy_seconds() - self.busy) / (time.monotonic() - self.start)
        cores = len(os.sched_getaffinity(0))
        if used < 0.5 or used + self.threads < cores + 0.5:
            return None
        return (
            f"other programs use {min(used, cores):.1f} of {cores} cores, and {self.threads} "
            f"threads wait for them: put OMP_NUM_THREADS={max(1, int(cores - used))} in front of "
            "the command"
        )


def _busy_seconds() -> float:
    """The seconds for which other programs have kept busy the cores that this process may use; 0
    where there is no Linux to count them.
    """
    if not CPU_TIMES.exists():
        return 0.0
    cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    for line in CPU_TIMES.read_text().splitlines():
        name, *times = line.split()
        if name in cores:
            user, nice, system, _, _, irq, softirq, steal = map(int, times[:8])
            ticks += user + nice + system + irq + softirq + steal
    process = os.times()
    return ticks / os.sysconf("SC_CLK_TCK") - sum(process[:4])
