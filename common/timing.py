"""One clock for every measurement in this repository.

On a GPU a region lies between two device events, and nothing synchronizes inside it; on a CPU it
lies between two readings of the monotonic clock. Results are milliseconds; the summary is the
median with the 20th and 80th percentile.
"""

import time
from collections.abc import Callable

from common import device as devices
from common import spans

import numpy as np
import torch

PHASE_STEPS = 10
AHEAD = 8  # calls that the host may be ahead of the device where a benchmark ends by time


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
