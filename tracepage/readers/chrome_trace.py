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
gradients at parameters) have the span `other`. Of a kernel in a graph, an annotation of its node
is the span.

A kernel is joined to the runtime call with the same `correlation`, never by name: ROCm's runtime
calls are named hipLaunchKernel and so on, in categories that keep the name `cuda_runtime`. The
kernel belongs to the operator that made the call. A kernel whose call is not in the trace belongs
to the step in whose time it starts, or else to that of the kernel before it. If it has a
correlation and starts before all kernels of steps, its call was made before the trace began, and it
belongs to none. Where the host does nothing in the steps, all kernels belong to steps by time.
"""

import json
import math
from bisect import bisect_left
from collections import defaultdict
from pathlib import Path
from typing import Any

from tracepage.errors import UsageError
from tracepage.readers.kernel_names import category
from tracepage.readers.trace import (
    CLOCK_ERROR_NS,
    KERNEL_COLUMNS,
    MEMORY_COLUMNS,
    OPERATOR_COLUMNS,
    STEP_COLUMNS,
    Trace,
)
from tracepage.readers.trace_events import STEP, Event, Events, read_events
from tracepage.records.step_profile import Sums
from tracepage.span_names import FORWARD_SPANS, SPANS

import pandas

AUTOGRAD_NODE = "autograd::engine::evaluate_function"
AUTOGRAD_ENGINE = "autograd engine"  # The engine's own time around its nodes has this name.
# The name of a call that calls the same operator again, as autocast does.
REDISPATCH = "redispatch"
PASSED_ON = {
    ("aten::zero_", "aten::fill_"),
    ("aten::rsub", "aten::sub"),
    ("aten::pow", "aten::copy_"),
}
CALLS = ("operator", "launch")
GRAPH_LAUNCHES = ("cudaGraphLaunch", "hipGraphLaunch")
UNKNOWN = float("nan")


def load(path: Path) -> Trace:
    """Reads a .json or .json.gz file."""
    return make_trace(path, read_events(path))


def not_a_trace(path: Path) -> UsageError:
    return UsageError(
        f"{path} is not a trace of torch.profiler (no operators, no kernels): `page.py` draws it"
    )


def make_trace(path: Path, events: Events) -> Trace:
    """The tables of a trace's events. UsageError: none is of PyTorch, or several processes have
    steps.
    """
    host = events.host
    operators = [event for event in host if event.kind == "operator"]
    if not events.device and not operators:
        raise not_a_trace(path)
    if len({event.thread[0] for event in host if event.name.startswith(STEP)}) > 1:
        raise UsageError(
            f"{path} holds the steps of several processes: "
            "give the trace of one of them, trace_rank*.json"
        )
    for row, event in enumerate(operators):
        event.row = row
    # A program may have rounded both times to doubles of us, and these to fewer digits.
    rounding = round(2000 * math.ulp(events.origin / 1000))
    _attribute(host, CLOCK_ERROR_NS + rounding, events.ranged)
    steps = _mark_steps(host, events.device)
    kernels = _join_kernels(events.device, host, steps)
    memory = [
        (event.start, *event.memory, event.span, event.phase) for event in host if event.memory
    ]
    used = {event.thread[0] for event in events.device}
    return Trace(
        operators=pandas.DataFrame(map(_operator_row, operators), columns=OPERATOR_COLUMNS),
        kernels=pandas.DataFrame(kernels, columns=KERNEL_COLUMNS),
        memory=pandas.DataFrame(memory, columns=MEMORY_COLUMNS),
        steps=pandas.DataFrame(steps, columns=STEP_COLUMNS),
        gpus=len(used),
        devices=[device for device in events.devices if device.get("id") in used],
        host=host,
        frames=events.frames,
        notes=events.notes,
        origin=events.origin,
        job=events.job,
    )


def _encloses(outer: Event, inner: Event, clock_error: int) -> bool:
    """Whether `inner`, which does not start earlier, lies in `outer`; of a runtime call, whose end
    another clock measures, only the start counts.
    """
    return inner.start < outer.end and (
        inner.kind == "launch" or inner.end <= outer.end + clock_error
    )


def _attribute(host: list[Event], clock_error: int, ranged: dict[tuple, tuple] | None) -> None:
    """Gives each event its operator, span and phase; `host` is in order of start, so a forward
    precedes its backward. Its times have an error of so many ns. `ranged` is that of `Events`.
    """
    lenders = ranged or {}
    open_events: dict[tuple, list[Event]] = defaultdict(list)  # by thread, outermost first
    span_of_node: dict[int | None, str | None] = {}  # by sequence number
    for event in host:
        stack = open_events[lenders.get(event.thread, event.thread)]
        while stack and not _encloses(stack[-1], event, clock_error):
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
                event.span = None if ranged is None else "backward"
                event.phase = "backward"
            elif event.name == "optimizer" or event.name.startswith("Optimizer."):
                event.span = event.phase = "optimizer"
            elif ranged is not None and _is_span(event):
                event.span = event.name
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
            outer = event.operator
            if outer:
                outer.children_ns += event.duration
                same = outer.name == event.name and outer.shapes == event.shapes
                outer.repeated = outer.repeated or same or (outer.name, event.name) in PASSED_ON
            stack.append(event)
        elif event.memory and event.operator:
            event.operator.allocated_bytes += event.memory[0]


def _is_span(event: Event) -> bool:
    """Whether another program's range names a span: one of ours keeps what is inside it."""
    return event.span not in SPANS and not event.name.startswith(STEP)


def _is_residual(event: Event) -> bool:
    if event.name != "aten::add" or event.operator is not None:
        return False
    shapes = json.loads(event.shapes)
    return len(shapes) > 1 and bool(shapes[0]) and shapes[0] == shapes[1]


def _mark_steps(host: list[Event], device: list[Event]) -> list[tuple[int, int]]:
    """Gives each event its step and, where it has none yet, its phase and span. Returns the steps'
    starts and durations.

    A step in which no operator and no launch starts, on any thread, was cut off and is left out;
    where that is all of them, those with work of the device are kept. Both lists are in order of
    start.
    """
    marks: list[Event] = []
    for event in host:
        if event.kind != "annotation" or not event.name.startswith(STEP):
            continue
        # Some profilers write a step twice, in two categories.
        if not marks or event.name != marks[-1].name or event.start >= marks[-1].end:
            marks.append(event)
    calls = [event for event in host if event.kind in CALLS]
    steps = _with_work(marks, calls) or _with_work(marks, device)
    index = -1
    in_backward = False
    for event in host:
        while index + 1 < len(steps) and event.start >= steps[index + 1].start:
            index += 1
            in_backward = False
        if index >= 0 and event.start < steps[index].end:
            event.step = index
        in_backward = in_backward or event.phase == "backward"
        event.phase = event.phase or ("other" if in_backward or event.step < 0 else "forward")
        event.span = event.span or "other"
    return [(step.start, step.duration) for step in steps]


def _with_work(steps: list[Event], work: list[Event]) -> list[Event]:
    """The steps in which some of the work starts, which is in order of start."""
    starts = [event.start for event in work]
    return [
        step for step in steps if bisect_left(starts, step.start) < bisect_left(starts, step.end)
    ]


def _join_kernels(
    device: list[Event], host: list[Event], steps: list[tuple[int, int]]
) -> list[tuple]:
    """Rows of the kernels' frame; adds each kernel's time to the operator that launched it and to
    those around it.
    """
    launches = {
        event.correlation: (row, event) for row, event in enumerate(host) if event.kind == "launch"
    }
    launches.pop(None, None)
    outside = not any(event.step >= 0 for event in host if event.kind in CALLS)
    by_time = bool(steps) and outside
    rows = []
    step = -1  # The step of the kernel before.
    for kernel in device:
        # Some profilers list copies and fills among the kernels.
        work = category(kernel.name) if kernel.kind == "kernel" else kernel.kind
        row, launch = launches.get(kernel.correlation, (-1, None))
        span = kernel.span
        phase: str | None = "other"
        delay = graph = UNKNOWN
        chain: list[int] = []
        if launch is None or by_time:
            if step >= 0 or kernel.correlation is None or by_time:
                inside = (
                    number
                    for number, (start, duration) in enumerate(steps)
                    if start <= kernel.start < start + duration
                )
                step = next(inside, step)
            step_of_kernel = step
        else:
            step_of_kernel = launch.step
            step = max(step, launch.step)
            span = span or launch.span
            delay = kernel.start - launch.start
            if launch.name in GRAPH_LAUNCHES:
                graph = launch.start
            else:
                phase = launch.phase
            operator = launch.operator
            if operator:
                operator.self_device_ns += kernel.duration
            while operator:
                operator.device_ns += kernel.duration
                chain.append(operator.row)
                operator = operator.operator
        call = (kernel.name, work, kernel.start, kernel.duration, kernel.stream)
        place = (span or "other", phase, step_of_kernel, delay, chain, graph, row)
        rows.append((*call, *place, kernel.blocks, kernel.collective, kernel.bytes))
    return rows


def _operator_row(event: Event) -> tuple:
    """A row in the order of OPERATOR_COLUMNS."""
    name = event.name
    cpu_ns = event.duration
    self_cpu_ns = event.duration - event.children_ns
    device_ns = event.device_ns
    is_node = name.startswith(AUTOGRAD_NODE)
    if is_node or event.repeated:  # The row holds only the time around what it calls.
        name = AUTOGRAD_ENGINE if is_node else REDISPATCH
        cpu_ns = self_cpu_ns
        device_ns = event.self_device_ns
    return (
        name,
        event.span,
        event.phase,
        event.step,
        event.start,
        cpu_ns,
        self_cpu_ns,
        device_ns,
        event.self_device_ns,
        event.shapes,
        event.types,
        event.allocated_bytes,
    )


def profile_tables(trace: Trace, attention_only: bool = False) -> Sums:
    """The part of a profile that comes from the trace: sums over the profiled steps in us, as plain
    JSON; with `attention_only` the operators and kernels are those of span `attention` alone.
    """
    operators = trace.operators[trace.operators.step >= 0]
    kernels = trace.kernels[trace.kernels.step >= 0]
    delays_ns = kernels.launch_delay_ns.dropna()
    memory = trace.memory[trace.memory.device == "gpu"] if len(kernels) else trace.memory
    if attention_only:
        operators = operators[operators.span == "attention"]
        kernels = kernels[kernels.span == "attention"]
    labels = ["name", "span", "phase", "input_shapes", "input_types"]
    calls = operators.groupby(labels, sort=False)
    launches = kernels.groupby(labels[:3], sort=False)
    by_operator = calls[["cpu_ns", "self_cpu_ns", "device_ns", "self_device_ns"]].sum() / 1e3
    by_operator.columns = by_operator.columns.str.replace("_ns", "_us")
    by_operator["allocated_bytes"] = calls.allocated_bytes.sum()
    by_operator["calls"] = calls.size()
    by_kernel = launches.agg(calls=("name", "size"), device_us=("duration_ns", "sum"))
    by_kernel["device_us"] /= 1e3
    own_time = "self_device_us" if len(trace.kernels) else "self_cpu_us"
    return {
        "operators": _sorted(by_operator, own_time),
        "kernels": _sorted(by_kernel, "device_us"),
        "step_us": [ns / 1e3 for ns in trace.step_ns()],
        "profiled_steps": len(trace.steps),
        "device_busy_us": trace.device_busy_ns() / 1e3,
        "launch": {
            "count": len(delays_ns),
            "mean_delay_us": float(delays_ns.mean()) / 1e3 if len(delays_ns) else 0.0,
        },
        "memory_peak_bytes": int(memory.total_bytes.max()) if len(memory) else None,
    }


def _sorted(sums: pandas.DataFrame, column: str) -> Any:
    """The rows, the largest first."""
    rows = sums.reset_index().sort_values(column, ascending=False, kind="stable")
    return rows.to_dict("records")
