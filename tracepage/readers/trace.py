"""A trace of torch.profiler as tables, in which each event has its operator, span, phase and step.

`chrome_trace` makes it. All times are in ns since the first event of the trace.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tracepage.readers.trace_events import Event

import numpy
import pandas

CLOCK_ERROR_NS = 2  # Timestamps near 4e12 us are doubles with a step of 0.5 ns.

OPERATOR_COLUMNS = (
    "name",
    "span",
    "phase",
    "step",
    "start_ns",
    "cpu_ns",
    "self_cpu_ns",
    "device_ns",
    "self_device_ns",
    "input_shapes",
    "input_types",
    "allocated_bytes",
)
KERNEL_COLUMNS = (
    "name",
    "category",
    "start_ns",
    "duration_ns",
    "stream",
    "span",
    "phase",
    "step",
    "launch_delay_ns",
    "operators",
    "graph",
    "launch",
    "blocks",
    "collective",
    "bytes",
)
MEMORY_COLUMNS = ("time_ns", "bytes", "address", "total_bytes", "device", "span", "phase")
STEP_COLUMNS = ("start_ns", "duration_ns")


@dataclass
class Trace:
    """No frame is ever missing; some are empty.

    Attributes:
        operators: a row per operator call. `device_ns` is of the kernels launched in it and below,
            `self_device_ns` of those launched in it directly; `input_shapes` and `input_types` are
            JSON; `allocated_bytes` is net, in it directly, and 0 without memory events; `step` is
            an index into `steps`, or -1. The time that the autograd engine spends around its nodes
            has rows named `autograd engine`, and a call that only calls the same operator again, or
            one of `chrome_trace.PASSED_ON`, is named `redispatch`.
        kernels: a row per kernel, copy or fill on the device, with columns of `Source.table`.
            `launch_delay_ns` counts from the start of the launching call (NaN if that is not in the
            trace); `operators` are rows of that frame: the one that launched it, and those around
            it; `graph` is the start of the call that launched the graph which holds it (NaN for a
            kernel launched alone); `launch` is the place in `host` of the call that launched it,
            or -1; `blocks` are those of its grid, or 0; `collective` is as in `Event`;
            `bytes` are those of a copy, or 0.
        memory: a row per allocation (bytes > 0) or release on `cpu` or `gpu`; `total_bytes` is what
            the allocator then has.
        devices: the GPUs that ran kernels: `name` and `multiprocessors`, as far as the trace tells.
        steps: a row per ProfilerStep with operators in it, with its times on the host.
        host: the events of the host in order of start, from which the frames were made.
        frames: functions of Python that last, in order of start; empty in a trace without stacks.
        notes: on events that were left out.
        origin: time of the first event on the clock of the file, ns.
        job: `rank` and `world_size`, where the trace tells that it is of one process of several.
    """

    operators: pandas.DataFrame
    kernels: pandas.DataFrame
    memory: pandas.DataFrame
    steps: pandas.DataFrame
    gpus: int = 1
    devices: list[dict[str, Any]] = field(default_factory=list)
    host: list[Event] = field(default_factory=list)
    frames: list[Event] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    origin: int = 0
    job: Mapping[str, int] = field(default_factory=dict)

    def device_busy_ns(self) -> int:
        """Time in which at least one kernel of the profiled steps runs."""
        kernels = self.kernels[self.kernels.step >= 0]
        starts = kernels.start_ns.to_numpy()
        return busy(starts, starts + kernels.duration_ns.to_numpy())

    def step_ns(self) -> list[int]:
        """Wall time of each step."""
        return [end - start for start, end in self.step_times()]

    def step_times(self) -> list[tuple[int, int]]:
        """Start and end of each step: from when host and device had finished the one before until
        both have finished it.

        The host runs ahead of a GPU, so a ProfilerStep can end before the first kernel of the step
        has started, and a trace may begin with kernels that were launched before it.
        """
        kernels = self.kernels
        ends = kernels.start_ns + kernels.duration_ns
        device_end = ends.groupby(kernels.step).max()
        first = kernels.start_ns[kernels.step >= 0].min()
        times = []
        before = max(ends[kernels.start_ns < first], default=0)
        for step, start, duration in self.steps.itertuples():
            end = max(start + duration, device_end.get(step, before))
            times.append((int(max(start, before)), int(end)))
            before = end
        return times


def pauses(starts: numpy.ndarray, ends: numpy.ndarray) -> numpy.ndarray:
    """From the last end so far to the next start, in order of start; below 0 where something still
    runs.
    """
    order = numpy.argsort(starts, kind="stable")
    return starts[order][1:] - numpy.maximum.accumulate(ends[order])[:-1]


def busy(starts: numpy.ndarray, ends: numpy.ndarray) -> int:
    """Time in which at least one of these intervals runs."""
    if not len(starts):
        return 0
    return int(ends.max() - starts.min() - pauses(starts, ends).clip(0).sum())
