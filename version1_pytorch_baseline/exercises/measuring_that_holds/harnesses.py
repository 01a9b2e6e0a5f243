"""A harness that holds and five that lie, with a simulated GPU to run them on.

A harness takes a device, times a launch on it, and returns a Claim. A device has

    update(buffers)  launches an update in place of each of these buffers in turn
    product()        launches the product of `x` and a weight, and returns a number of it
    synchronize()    waits until all launched work is done
    now()            seconds on the host's clock
    launches         how many launches there were
    processes(n)     the device as n processes find it, this one first (simulated GPU only)
"""

import functools
from collections.abc import Callable, Sequence
from operator import methodcaller
from statistics import mean, median, quantiles
from typing import Any, NamedTuple

BUFFERS = range(16)
Device = Any  # SimulatedGPU, or RealGPU of measure.py
update_all = methodcaller("update", BUFFERS)  # A launch: it takes a device.
multiply = methodcaller("product")
remembered = functools.cache(multiply)  # It launches the first product of a device alone.


class Claim(NamedTuple):
    seconds: float  # of a launch
    error: float = 0.0  # of these seconds, as the harness says
    result: float = 0.0  # of the last product


Harness = Callable[[Device], Claim]


class SimulatedGPU:
    """Has a queue, a first launch that compiles, a cache of four buffers, a falling clock, luck."""

    def __init__(self, process: int = 0) -> None:
        self.process = process
        self.luck = 1 + 0.01 * (3 * process % 5 - 2)
        self.x = 1.0
        self.launches = 0
        self.worked = 0.0
        self.cached = [0] * 4
        self.host = 0.0
        self.idle_from = 0.0

    def processes(self, count: int) -> list["SimulatedGPU"]:
        return [SimulatedGPU(self.process + i) for i in range(count)]

    def now(self) -> float:
        return self.host

    def synchronize(self) -> None:
        self.host = max(self.host, self.idle_from)

    def _launch(self, seconds: float) -> None:
        self.host += 5e-6 if self.launches else 0.5
        self.launches += 1
        noise = 1 + 0.001 * (self.launches % 5 - 2)
        self.idle_from = max(self.host, self.idle_from) + seconds * self.luck * noise
        self.worked += seconds

    def update(self, buffers: Sequence[int]) -> None:
        seconds = 0.0
        for buffer in buffers:
            seconds += 6e-6 if buffer in self.cached else 12e-6
            self.cached = [*self.cached, buffer][-4:]
        self._launch(seconds)

    def product(self) -> float:
        self._launch(1e-3 if self.worked < 1 else 1.15e-3)
        return 3 * self.x


def timed(device: Device, launch: Callable[[Device], object], count: int = 100) -> float:
    """Seconds of a launch: the mean of `count`, before and after which the device is idle."""
    device.synchronize()
    begin = device.now()
    for _ in range(count):
        launch(device)
    device.synchronize()
    return (device.now() - begin) / count


def honest(device: Device, launch: Callable[[Device], Any] = update_all) -> Claim:
    warm = device.now() + 3
    while device.now() < warm:
        timed(device, launch)
    return Claim(timed(device, launch), result=float(launch(device) or 0))


def five_processes(device: Device) -> Claim:
    seconds = [honest(process).seconds for process in device.processes(5)]
    return Claim(median(seconds), (max(seconds) - min(seconds)) / 2)


def hurried(device: Device) -> Claim:
    begin = device.now()
    for _ in range(100):
        update_all(device)
    return Claim((device.now() - begin) / 100)


def one_buffer(device: Device) -> Claim:
    launch = methodcaller("update", [0] * len(BUFFERS))
    timed(device, launch)
    return Claim(timed(device, launch))


def short(device: Device) -> Claim:
    timed(device, multiply, 3)
    return Claim(timed(device, multiply))


def one_process(device: Device) -> Claim:
    timed(device, update_all)
    steps = [timed(device, update_all, 1) for _ in range(1000)]
    p20, *_, p80 = quantiles(steps, n=5)
    return Claim(mean(steps), (p80 - p20) / 2)


def replayed(device: Device) -> Claim:
    return Claim(timed(device, remembered), result=float(remembered(device)))


honest_product = functools.partial(honest, launch=multiply)
LIARS = {  # The check that catches a liar: the liar, and an honest harness.
    "waits_and_warms_up": (hurried, honest),
    "reads_memory": (one_buffer, honest),
    "lasts": (short, honest_product),
    "repeats": (one_process, five_processes),
    "computes": (replayed, honest_product),
}
