"""Reads a Chrome trace of torch.profiler (NVIDIA, ROCm or CPU) and attributes each event to a part
of the model.

The events of one thread nest like function calls: an event that starts inside another one was
called by it. Each operator gets

- its *self time*: its duration less that of the operators that it called. Calls of the GPU's
  runtime are not operators, so the time to launch a kernel belongs to the operator that launches
  it. Self times add up to the time covered by operators.
- its *span*: the innermost enclosing annotation of `common.spans` that is not an inner span. An
  addition of two tensors of one shape outside all spans is a residual connection.
- its *phase*: `optimizer` inside the optimizer's step, `backward` inside the span of that name or
  below an autograd node, else `forward` until the backward pass of the step starts, and `other`
  after it or outside all steps. The kernels of a graph have the phase `other`.

The backward pass runs autograd nodes that the forward pass recorded, on a GPU in a thread of its
own, so no span encloses them. The profiler writes a "Sequence number" on both sides. A forward
operator carries the number that the next autograd node will get, so the last operator with a number
made the node with that number, and the node takes its span. Nodes without a number (they accumulate
gradients at parameters) have the span `other`.

A kernel is joined to the runtime call with the same `correlation`, never by name: ROCm's runtime
calls are named hipLaunchKernel and so on, in categories that keep the name `cuda_runtime`. The
kernel belongs to the operator that made the call. A kernel whose call is not in the trace belongs
to the step in whose time it starts, or else to that of the kernel before it. If it has a
correlation and starts before all kernels of steps, its call was made before the trace began, and it
belongs to none.
"""

import json
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tracepage.errors import UsageError
from tracepage.readers import trace_events
from tracepage.readers.trace_events import Event
from tracepage.records.step_profile import Sums
from tracepage.span_names import FORWARD_SPANS
from tracepage.terminal import progress

import numpy
import pandas

STEP = "ProfilerStep#"
AUTOGRAD_NODE = "autograd::engine::evaluate_function"
# the name of the rows that hold the engine's own time around its nodes
AUTOGRAD_ENGINE = "autograd engine"
# the name of a call that calls the same operator again: autocast, or a number made a tensor
REDISPATCH = "redispatch"
PASSED_ON = {
    ("aten::zero_", "aten::fill_"),
    ("aten::rsub", "aten::sub"),
    ("aten::pow", "aten::copy_"),
}
GRAPH_LAUNCHES = ("cudaGraphLaunch", "hipGraphLaunch")
CLOCK_ERROR_US = 0.002  # timestamps near 4e12 us are doubles with a step of 0.001 us

OPERATOR_COLUMNS = (
    "name",
    "span",
    "phase",
    "step",
    "start_us",
    "cpu_us",
    "self_cpu_us",
    "device_us",
    "self_device_us",
    "input_shapes",
    "input_types",
    "allocated_bytes",
)
KERNEL_COLUMNS = (
    "name",
    "category",
    "start_us",
    "duration_us",
    "stream",
    "span",
    "phase",
    "step",
    "launch_delay_us",
    "operators",
    "graph",
)
MEMORY_COLUMNS = ("time_us", "bytes", "address", "total_bytes", "device", "span", "phase")
STEP_COLUMNS = ("start_us", "duration_us")

Interval = tuple[float, float]  # start and end


@dataclass
class Trace:
    """A trace as pandas DataFrames; no frame is ever missing, some are empty. Times of the host and
    of the GPU are in us.

    Attributes:
        operators: a row per operator call. `device_us` is of the kernels launched in it and below,
            `self_device_us` of those launched in it directly; `input_shapes` and `input_types` are
            JSON; `allocated_bytes` is net, in it directly, and 0 without memory events; `step` is
            an index into `steps`, or -1. The time that the autograd engine spends around its nodes
            has rows named `autograd engine`, and a call that only calls the same operator again, or
            one of PASSED_ON, is named `redispatch`.
        kernels: a row per kernel, copy or fill on the device. `launch_delay_us` counts from the
            start of the launching call (NaN if that is not in the trace); `operators` are rows of
            that frame: the one that launched it, and those around it; `graph` is the start of the
            call that launched the graph which holds it (NaN for a kernel launched alone).
    """

    operators: pandas.DataFrame
    kernels: pandas.DataFrame
    # per allocation (bytes > 0) or release on `cpu` or `gpu`; total_bytes: the allocator then has
    memory: pandas.DataFrame
    # a row per ProfilerStep with operators in it, with its times on the host
    steps: pandas.DataFrame
    gpus: int = 1
    # in order of start: from these the frames were made
    host: list[Event] = field(default_factory=list)
    notes: tuple[str, ...] = ()  # on events that were left out

    def device_busy_us(self) -> float:
        """Time in which at least one kernel of the profiled steps runs."""
        kernels = self.kernels[self.kernels.step >= 0]
        return busy(
            kernels.start_us.to_numpy(), (kernels.start_us + kernels.duration_us).to_numpy()
        )

    def step_us(self) -> list[float]:
        """Wall time of each step."""
        return [end - start for start, end in self.step_times()]

    def step_times(self) -> list[Interval]:
        """Start and end of each step: from when host and device had finished the one before until
        both have finished it.

        The host runs ahead of a GPU, so a ProfilerStep can end before the first kernel of the step
        has started, and a trace may begin with kernels that were launched before it.
        """
        kernels = self.kernels
        ends = self.kernels.start_us + self.kernels.duration_us
        device_end = ends.groupby(kernels.step).max().to_dict()
        first = kernels.start_us[kernels.step >= 0].min()
        found = []
        before = (
            ends[kernels.start_us < first].max()
            if (kernels.start_us < first).any()
            else float("-inf")
        )
        for index, (start, duration) in enumerate(
            zip(self.steps.start_us, self.steps.duration_us, strict=True)
        ):
            end = max(start + duration, device_end.get(index, before))
            found.append((float(max(start, before)), float(end)))
            before = end
        return found


def pauses(starts: numpy.ndarray, ends: numpy.ndarray) -> numpy.ndarray:
    """From the last end so far to the next start, in order of start; below 0 where something still
    runs.
    """
    order = numpy.argsort(starts, kind="stable")
    return starts[order][1:] - numpy.maximum.accumulate(ends[order])[:-1]


def busy(starts: numpy.ndarray, ends: numpy.ndarray) -> float:
    """Time in which at least one of these intervals runs."""
    return (
        float(ends.max() - starts.min() - pauses(starts, ends).clip(0).sum())
        if len(starts)
        else 0.0
    )


def load(path: Path) -> Trace:
    """Reads a .json or .json.gz file."""
    with progress(f"reading {path}"):
        host, device, notes = trace_events.read(path)
    operators = [event for event in host if event.kind == "operator"]
    if not device and not operators:
        raise UsageError(
            f"{path} is not a trace of torch.profiler (no operators, no kernels): `page.py` draws it"
        )
    if len({event.thread[0] for event in host if event.name.startswith(STEP)}) > 1:
        raise UsageError(
            f"{path} holds the steps of several processes: give the trace of one of them, trace_rank*.json"
        )
    for row, event in enumerate(operators):
        event.row = row
    _attribute(host)
    steps = _mark_steps(host, operators or [event for event in host if event.kind == "launch"])
    kernels = _join_kernels(device, host, steps)
    memory = [
        (event.start, *event.memory, event.span, event.phase) for event in host if event.memory
    ]
    return Trace(
        operators=pandas.DataFrame(map(_operator_row, operators), columns=OPERATOR_COLUMNS),
        kernels=pandas.DataFrame(kernels, columns=KERNEL_COLUMNS),
        memory=pandas.DataFrame(memory, columns=MEMORY_COLUMNS),
        steps=pandas.DataFrame(steps, columns=STEP_COLUMNS),
        gpus=len({event.thread[0] for event in device}),
        host=host,
        notes=notes,
    )


def _encloses(outer: Event, inner: Event) -> bool:
    """Whether `inner`, which does not start earlier, lies in `outer`; of a runtime call, whose end
    another clock measures, only the start counts.
    """
    return inner.start < outer.end and (
        inner.kind == "launch" or inner.end <= outer.end + CLOCK_ERROR_US
    )


def _attribute(host: list[Event]) -> None:
    """Gives each event its operator, span and phase; `host` is in order of start, so a forward
    precedes its backward.
    """
    open_events: dict[tuple, list[Event]] = defaultdict(list)  # by thread, outermost first
    span_of_node: dict[int | None, str | None] = {}  # by sequence number
    for event in host:
        stack = open_events[event.thread]
        while stack and not _encloses(stack[-1], event):
            stack.pop()
        if stack:
            parent = stack[-1]
            event.span = parent.span
            event.phase = parent.phase
            event.operator = parent if parent.kind == "operator" else parent.operator
        if event.kind == "annotation":
            if event.name in FORWARD_SPANS:
                event.span = event.name
                event.phase = event.phase or "forward"
            elif event.name == "backward":
                event.span = None
                event.phase = "backward"
            elif event.name == "optimizer" or event.name.startswith("Optimizer."):
                event.span = event.phase = "optimizer"
            stack.append(event)
        elif event.kind == "operator":
            number = event.number
            if event.name.startswith(AUTOGRAD_NODE):
                event.span = span_of_node.get(number)
                event.phase = "backward"
            elif event.span is None and event.phase is None and _is_residual(event):
                event.span = "residual"
                event.phase = "forward"
            if number is not None:
                span_of_node[number] = event.span
            if outer := event.operator:
                outer.children_us += event.duration
                same = outer.name == event.name and outer.shapes == event.shapes
                outer.repeated = outer.repeated or same or (outer.name, event.name) in PASSED_ON
            stack.append(event)
        elif event.memory and event.operator:
            event.operator.allocated_bytes += event.memory[0]


def _is_residual(event: Event) -> bool:
    if event.name != "aten::add" or event.operator is not None:
        return False
    shapes = json.loads(event.shapes)
    return len(shapes) > 1 and bool(shapes[0]) and shapes[0] == shapes[1]


def _mark_steps(host: list[Event], working: list[Event]) -> list[Interval]:
    """Gives each event its step and, where it has none yet, its phase and span. Returns the steps'
    starts and durations.

    A step in which no event of `working` starts is left out: it was cut off. Both lists are in
    order of start.
    """
    marked = [event for event in host if event.kind == "annotation" and event.name.startswith(STEP)]
    threads = {event.thread for event in working}
    starts = [event.start for event in working]
    inside = [bisect_left(starts, step.start) < bisect_left(starts, step.end) for step in marked]
    steps = [
        step for step, works in zip(marked, inside, strict=True) if works and step.thread in threads
    ]
    index = -1
    in_backward = False
    for event in host:
        while index + 1 < len(steps) and event.start >= steps[index + 1].start:
            index = index + 1
            in_backward = False
        if index >= 0 and event.start < steps[index].end:
            event.step = index
        in_backward = in_backward or event.phase == "backward"
        event.phase = event.phase or ("other" if in_backward or event.step < 0 else "forward")
        event.span = event.span or "other"
    return [(step.start, step.duration) for step in steps]


def _join_kernels(device: list[Event], host: list[Event], steps: list[Interval]) -> list[tuple]:
    """Rows of the kernels' frame; adds each kernel's time to the operator that launched it and to
    those around it.
    """
    launches: dict[Any, Event] = {
        event.correlation: event for event in host if event.kind == "launch"
    }
    rows: list[tuple] = []
    before = -1  # the step of the kernel before
    for kernel in device:
        own = kernel.name, kernel.kind, kernel.start, kernel.duration, kernel.stream
        launch = launches.get(kernel.correlation) if kernel.correlation is not None else None
        if launch is None:
            if before >= 0 or kernel.correlation is None:
                inside = (
                    number
                    for number, (start, us) in enumerate(steps)
                    if start <= kernel.start < start + us
                )
                before = next(inside, before)
            rows.append((*own, "other", "other", before, float("nan"), [], float("nan")))
            continue
        operator = launch.operator
        chain = []
        if operator:
            operator.self_device_us += kernel.duration
        while operator:
            operator.device_us += kernel.duration
            chain.append(operator.row)
            operator = operator.operator
        graph, phase = (
            (launch.start, "other")
            if launch.name in GRAPH_LAUNCHES
            else (float("nan"), launch.phase)
        )
        rows.append(
            (*own, launch.span, phase, launch.step, kernel.start - launch.start, chain, graph)
        )
        before = max(before, launch.step)
    return rows


def _operator_row(event: Event) -> tuple:
    name = event.name
    cpu_us = event.duration
    self_cpu_us = event.duration - event.children_us
    device_us = event.device_us
    # the row holds only the time around what it calls
    if name.startswith(AUTOGRAD_NODE) or event.repeated:
        name = AUTOGRAD_ENGINE if name.startswith(AUTOGRAD_NODE) else REDISPATCH
        cpu_us = self_cpu_us
        device_us = event.self_device_us
    times = event.start, cpu_us, self_cpu_us, device_us, event.self_device_us
    return (
        name,
        event.span,
        event.phase,
        event.step,
        *times,
        event.shapes,
        event.types,
        event.allocated_bytes,
    )


def profile_tables(trace: Trace, attention_only: bool = False) -> Sums:
    """The part of a profile that comes from the trace: sums over the profiled steps, as plain JSON;
    with `attention_only` the operators and kernels are those of span `attention` alone.
    """
    operators = trace.operators[trace.operators.step >= 0]
    kernels = trace.kernels[trace.kernels.step >= 0]
    launched = kernels.launch_delay_us.dropna()
    memory = trace.memory[trace.memory.device == "gpu"] if len(kernels) else trace.memory
    if attention_only:
        operators = operators[operators.span == "attention"]
        kernels = kernels[kernels.span == "attention"]
    sums = ["cpu_us", "self_cpu_us", "device_us", "self_device_us", "allocated_bytes"]
    grouped = operators.groupby(
        ["name", "span", "phase", "input_shapes", "input_types"], sort=False
    )
    by_operator = grouped[sums].sum().assign(calls=grouped.size()).reset_index()
    own_time = "self_device_us" if len(trace.kernels) else "self_cpu_us"
    grouped = kernels.groupby(["name", "span", "phase"], sort=False)
    by_kernel = grouped.agg(calls=("name", "size"), device_us=("duration_us", "sum")).reset_index()
    return {
        "operators": _sorted(by_operator, own_time),
        "kernels": _sorted(by_kernel, "device_us"),
        "step_us": trace.step_us(),
        "profiled_steps": len(trace.steps),
        "device_busy_us": trace.device_busy_us(),
        "launch": {
            "count": len(launched),
            "mean_delay_us": float(launched.mean()) if len(launched) else 0.0,
        },
        "memory_peak_bytes": int(memory.total_bytes.max()) if len(memory) else None,
    }


def _sorted(table: pandas.DataFrame, column: str) -> Any:
    """The rows, the largest first."""
    return table.sort_values(column, ascending=False, kind="stable").to_dict("records")
