"""Reads a Chrome trace of torch.profiler (NVIDIA, ROCm or CPU) and attributes each event to a part of the model.

The events of one thread nest like function calls: an event that starts inside another one was called by it. Each operator gets

- its *self time*: its duration less that of the operators that it called. Calls of the GPU's runtime are not operators, so
  the time to launch a kernel belongs to the operator that launches it. Self times add up to the time covered by operators.
- its *span*: the innermost enclosing annotation of `common.spans` that is not an inner span. An addition of two tensors of one
  shape outside all spans is a residual connection. The inner span, if there is one, is its *detail*.
- its *phase*: `optimizer` inside the optimizer's step, `backward` inside the span of that name or below an autograd node,
  else `forward` until the backward pass of the step starts, and `other` after it or outside all steps.

The backward pass runs autograd nodes that the forward pass recorded, on a GPU in a thread of its own, so no span encloses them.
The profiler writes a "Sequence number" on both sides. A forward operator carries the number that the next autograd node will
get, so the last operator with a number made the node with that number, and the node takes its span and detail. Nodes without
a number (they accumulate gradients at parameters) have the span `other`.

A kernel is joined to the runtime call with the same `correlation`, never by name: ROCm's runtime calls are named
hipLaunchKernel and so on, in categories that keep the name `cuda_runtime`. The kernel belongs to the operator that made the call.

Times are microseconds as the profiler wrote them, with their fractions.
"""

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common.analysis.profiles.json_elements import elements
from common.errors import UsageError
from common.files import Amount, Integer, Number
from common.progress import progress
from common.records.step_profile import Shapes
from common.spans import FORWARD_SPANS, INNER_SPANS

import pandas
from pydantic import TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

AUTOGRAD_NODE = "autograd::engine::evaluate_function"
AUTOGRAD_ENGINE = "autograd engine"  # the name of the rows that hold the engine's own time around its nodes
REDISPATCH = "redispatch"  # the name of a call that calls the same operator again: autocast, or a number made a tensor
KINDS = {"cpu_op": "operator", "user_annotation": "annotation", "cuda_runtime": "launch", "cuda_driver": "launch"}
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
GRAPH_LAUNCHES = ("cudaGraphLaunch", "hipGraphLaunch")
CLOCK_ERROR_US = 0.002  # timestamps near 4e12 us are doubles with a step of 0.001 us

OPERATOR_COLUMNS = (
    "name", "span", "phase", "step", "start_us", "cpu_us", "self_cpu_us", "device_us", "self_device_us",
    "input_shapes", "input_types", "allocated_bytes", "detail",
)  # fmt: skip
KERNEL_COLUMNS = (
    "name", "category", "start_us", "duration_us", "stream", "span", "phase", "step", "launch_delay_us", "operators", "graph",
    "detail",
)  # fmt: skip
MEMORY_COLUMNS = ("time_us", "bytes", "address", "device", "total_bytes", "span", "phase")
STEP_COLUMNS = ("start_us", "duration_us")

Arguments = TypedDict(
    "Arguments",
    {
        "Sequence number": NotRequired[int], "Input Dims": NotRequired[Shapes], "Input type": NotRequired[list[str]],
        "correlation": NotRequired[int | str], "stream": NotRequired[int | str],
    },
)  # fmt: skip
MemoryArguments = TypedDict(
    "MemoryArguments", {"Bytes": Integer, "Addr": int | str, "Total Allocated": Integer, "Device Type": int}
)


class Event(TypedDict):
    name: str
    pid: int | str
    tid: int | str
    ts: Number


class TimedEvent(Event):
    """An operator, an annotation, a call of the GPU's runtime, or the work of a GPU."""

    dur: Amount
    args: NotRequired[Arguments]


class MemoryEvent(Event):
    """An allocation or a release."""

    args: MemoryArguments


TIMED_EVENT, MEMORY_EVENT = TypeAdapter(TimedEvent), TypeAdapter(MemoryEvent)


@dataclass
class Trace:
    """A trace as pandas DataFrames; no frame is ever missing, some are empty.

    Attributes:
        operators: a row per operator call: name, span, phase, step (index into `steps`, or -1), start_us, cpu_us,
            self_cpu_us, device_us (kernels launched in it and below), self_device_us (launched in it directly),
            input_shapes and input_types (JSON), allocated_bytes (net, in it directly; 0 without memory events), detail (the inner
            span, or "").
            The time that the autograd engine spends around its nodes has rows named `autograd engine`, and a call that
            only calls the same operator again is named `redispatch`.
        kernels: a row per kernel, copy or fill on the device: name, category, start_us, duration_us, stream, span,
            phase, step, launch_delay_us (from the start of the launching call; NaN if that is not in the trace), operators (rows
            of `operators`: the one that launched it, and those around it), graph (the start of the call that launched the
            graph which holds it; NaN for a kernel that was launched alone), detail.
        memory: a row per allocation (bytes > 0) or release (bytes < 0): time_us, bytes, address, device (`cpu` or `gpu`),
            total_bytes (allocated afterwards, as the allocator counts), span, phase.
        steps: a row per ProfilerStep with operators in it: start_us, duration_us, of the host.
    """

    operators: pandas.DataFrame
    kernels: pandas.DataFrame
    memory: pandas.DataFrame
    steps: pandas.DataFrame

    def device_busy_us(self) -> float:
        """Time in which at least one kernel of the profiled steps runs: the union of their intervals."""
        kernels = self.kernels[self.kernels.step >= 0].sort_values("start_us")
        busy, end = 0.0, float("-inf")
        for start, duration in zip(kernels.start_us, kernels.duration_us, strict=True):
            busy += max(0.0, start + duration - max(start, end))
            end = max(end, start + duration)
        return busy

    def step_us(self) -> list[float]:
        """Wall time of each step: from when host and device had finished the step before until both have finished this one.

        The host runs ahead of a GPU, so a ProfilerStep can end before the first kernel of the step has started, and a trace may
        begin with kernels that were launched before it.
        """
        kernels, ends = self.kernels, self.kernels.start_us + self.kernels.duration_us
        device_end = ends.groupby(kernels.step).max().to_dict()
        first = kernels.start_us[kernels.step >= 0].min()
        walls, before = [], ends[kernels.start_us < first].max() if (kernels.start_us < first).any() else float("-inf")
        for index, (start, duration) in enumerate(zip(self.steps.start_us, self.steps.duration_us, strict=True)):
            end = max(start + duration, device_end.get(index, before))
            walls.append(float(end - max(start, before)))
            before = end
        return walls


@dataclass(eq=False, slots=True)
class _Event:
    """One event of the host: an operator, an annotation, a call of the GPU's runtime, or an allocation.

    It keeps what is needed of the event's arguments: the number of an operator and its inputs as JSON, or the `correlation` of a
    call, or the size, address, total and device of an allocation.
    """

    kind: str
    name: str
    thread: tuple
    start: float
    duration: float
    number: int | None = None
    shapes: str | None = None
    types: str | None = None
    correlation: int | str | None = None
    memory: tuple | None = None
    operator: "_Event | None" = None  # innermost enclosing operator
    span: str | None = None
    detail: str = ""
    phase: str | None = None
    step: int = -1
    children_us: float = 0.0
    device_us: float = 0.0
    self_device_us: float = 0.0
    allocated_bytes: int = 0
    repeated: bool = False  # it calls an operator of the same name and shapes, which does the work

    @property
    def end(self) -> float:
        return self.start + self.duration


class _Kernel(NamedTuple):
    """Work of a GPU: a kernel, a copy or a fill."""

    name: str
    category: str
    start: float
    duration: float
    stream: int | str | None
    correlation: int | str | None


def load(path: Path) -> Trace:
    """Reads a .json or .json.gz file.

    Raises:
        UsageError: the file cannot be read, is damaged, or is not a trace of torch.profiler, or one of its events lacks a field
            or holds a value of the wrong type.
    """
    with progress(f"reading {path}") as note:
        host, device = _read(path, note)
        note("attributing events")
        host.sort(key=lambda event: (event.start, -event.duration))
        if not any(event.kind == "operator" for event in host):
            raise UsageError(f"{path} is not a trace of torch.profiler (it has no PyTorch operators): give a trace_*.json")
        _attribute(host)
        steps = _mark_steps(host)
        return _frames(host, _join_kernels(device, host), steps)


def _read(path: Path, note: Callable[[str], None]) -> tuple[list[_Event], list[_Kernel]]:
    """The events of the host and of the device, each checked and reduced to what is needed as soon as it is read.

    Args:
        note: is told from time to time how many events were read.
    """
    host: list[_Event] = []
    device: list[_Kernel] = []
    shared: dict[Any, Any] = {}  # most names, threads and shapes occur often: one object for each
    otherwise = "is not a trace of torch.profiler (it has no traceEvents): give a trace_*.json"
    for number, event in enumerate(elements(path, "traceEvents", otherwise)):
        if number % 10_000 == 0:
            note(f"{number:,} events")
        if not isinstance(event, dict):
            continue
        category = str(event.get("cat")) if event.get("ph") == "X" else None
        if event.get("name") == "[memory]":
            check(path, MEMORY_EVENT, event, number)
            host.append(_event("memory", event, shared))
        elif category in KINDS:
            check(path, TIMED_EVENT, event, number)
            host.append(_event(KINDS[category], event, shared))
        elif category in DEVICE_CATEGORIES:
            check(path, TIMED_EVENT, event, number)
            device.append(_kernel(event, shared))
    return host, device


def check(path: Path, adapter: TypeAdapter, event: dict, number: int) -> None:
    """Names the event by its position among all events if it does not fit its model."""
    try:
        adapter.validator.validate_python(event, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = f"event {number} of traceEvents ({event.get('name', 'without a name')}): {'.'.join(map(str, first['loc']))}"
        raise UsageError(" ".join(f"{path}: {where}: {first['msg']}".split())) from error


def _event(kind: str, event: dict, shared: dict) -> _Event:
    name, thread = (shared.setdefault(each, each) for each in (event["name"], (event["pid"], event["tid"])))
    result, arguments = _Event(kind, name, thread, event["ts"], event.get("dur", 0.0)), event.get("args", {})
    if kind == "memory":
        result.memory = tuple(arguments[key] for key in ("Bytes", "Addr", "Total Allocated", "Device Type"))
    elif kind == "launch":
        result.correlation = arguments.get("correlation")
    elif kind == "operator":
        result.number = arguments.get("Sequence number")
        inputs = (json.dumps(arguments[key]) if key in arguments else None for key in ("Input Dims", "Input type"))
        result.shapes, result.types = (shared.setdefault(text, text) for text in inputs)
    return result


def _kernel(event: dict, shared: dict) -> _Kernel:
    name, arguments = shared.setdefault(event["name"], event["name"]), event.get("args", {})
    category = shared.setdefault(event["cat"], event["cat"])
    return _Kernel(name, category, event["ts"], event["dur"], arguments.get("stream"), arguments.get("correlation"))


def _encloses(outer: _Event, inner: _Event) -> bool:
    """Whether `inner`, which does not start earlier, lies in `outer`. Only the start of a runtime call counts, because another
    clock measures its end."""
    return inner.start < outer.end and (inner.kind == "launch" or inner.end <= outer.end + CLOCK_ERROR_US)


def _attribute(host: list[_Event]) -> None:
    """Gives each event its operator, span and phase; `host` is in order of start, so a forward precedes its backward."""
    open_events: dict[tuple, list[_Event]] = defaultdict(list)  # by thread, outermost first
    span_of_node: dict[int, tuple[str | None, str]] = {}  # span and detail by sequence number
    for event in host:
        stack = open_events[event.thread]
        while stack and not _encloses(stack[-1], event):
            stack.pop()
        if stack:
            parent = stack[-1]
            event.span, event.detail, event.phase = parent.span, parent.detail, parent.phase
            event.operator = parent if parent.kind == "operator" else parent.operator
        if event.kind == "annotation":
            if event.name in FORWARD_SPANS:
                event.span, event.detail, event.phase = event.name, "", event.phase or "forward"
            elif event.name in INNER_SPANS and event.span == INNER_SPANS[event.name]:
                event.detail = event.name
            elif event.name == "backward":
                event.span, event.phase = None, "backward"
            elif event.name == "optimizer" or event.name.startswith("Optimizer."):
                event.span = event.phase = "optimizer"
            stack.append(event)
        elif event.kind == "operator":
            number = event.number
            if event.name.startswith(AUTOGRAD_NODE):
                (event.span, event.detail), event.phase = span_of_node.get(number, (None, "")), "backward"
            elif event.span is None and event.phase is None and _is_residual(event):
                event.span, event.phase = "residual", "forward"
            if number is not None:
                span_of_node[number] = event.span, event.detail
            if event.operator:
                event.operator.children_us += event.duration
                event.operator.repeated = event.operator.repeated or _is_same_call(event.operator, event)
            stack.append(event)
        elif event.kind == "memory" and event.operator:
            event.operator.allocated_bytes += event.memory[0]


def _is_same_call(outer: _Event, inner: _Event) -> bool:
    return outer.name == inner.name and outer.shapes == inner.shapes


def _is_residual(event: _Event) -> bool:
    if event.name != "aten::add" or event.operator is not None:
        return False
    shapes = json.loads(event.shapes or "[]")
    return len(shapes) > 1 and bool(shapes[0]) and shapes[0] == shapes[1]


def _mark_steps(host: list[_Event]) -> list[_Event]:
    """Gives each event its step and, where it has none yet, its phase and span. Returns the steps' annotations."""
    threads = {event.thread for event in host if event.kind == "operator"}
    steps = [event for event in host if event.kind == "annotation" and event.name.startswith("ProfilerStep#")]
    last_operator = max(event.start for event in host if event.kind == "operator")
    steps = [step for step in steps if step.thread in threads and step.start < last_operator]
    index, in_backward = -1, False
    for event in host:
        while index + 1 < len(steps) and event.start >= steps[index + 1].start:
            index, in_backward = index + 1, False
        if index >= 0 and event.start < steps[index].end:
            event.step = index
        in_backward = in_backward or event.phase == "backward"
        event.phase = event.phase or ("other" if in_backward or event.step < 0 else "forward")
        event.span = event.span or "other"
    return steps


def _join_kernels(device: list[_Kernel], host: list[_Event]) -> list[tuple]:
    """Rows of the kernels' frame; adds each kernel's time to the operator that launched it and to those around it."""
    launches = {event.correlation: event for event in host if event.kind == "launch"}
    rows = []
    for kernel in sorted(device, key=lambda kernel: kernel.start):
        launch = launches.get(kernel.correlation)
        where = (launch.span, launch.phase, launch.step) if launch else ("other", "other", -1)
        delay = kernel.start - launch.start if launch else float("nan")
        graph = launch.start if launch and launch.name in GRAPH_LAUNCHES else float("nan")
        operator, chain = launch.operator if launch else None, []
        if operator:
            operator.self_device_us += kernel.duration
        while operator:
            operator.device_us += kernel.duration
            chain.append(operator)
            operator = operator.operator
        rows.append((*kernel[:5], *where, delay, chain, graph, launch.detail if launch else ""))
    return rows


def _frames(host: list[_Event], kernels: list[tuple], steps: list[_Event]) -> Trace:
    operators, memory, numbers = [], [], {}
    for event in host:
        if event.kind == "operator":
            numbers[id(event)] = len(operators)
            name, cpu_us, self_cpu_us, device_us = event.name, event.duration, event.duration - event.children_us, event.device_us
            if name.startswith(AUTOGRAD_NODE):  # not an operator: the row holds only the engine's own time
                name, cpu_us, device_us = AUTOGRAD_ENGINE, self_cpu_us, event.self_device_us
            elif event.repeated:
                name, cpu_us, device_us = REDISPATCH, self_cpu_us, event.self_device_us
            shapes, types = event.shapes or "[]", event.types or "[]"
            operators.append(
                (name, event.span, event.phase, event.step, event.start, cpu_us, self_cpu_us, device_us,
                 event.self_device_us, shapes, types, event.allocated_bytes, event.detail)
            )  # fmt: skip
        elif event.kind == "memory":
            size, address, total, device_type = event.memory
            device = "cpu" if device_type == 0 else "gpu"
            memory.append((event.start, size, address, device, total, event.span, event.phase))
    kernels = [(*row, [numbers[id(event)] for event in chain], graph, detail) for *row, chain, graph, detail in kernels]
    return Trace(
        operators=pandas.DataFrame(operators, columns=OPERATOR_COLUMNS),
        kernels=pandas.DataFrame(kernels, columns=KERNEL_COLUMNS),
        memory=pandas.DataFrame(memory, columns=MEMORY_COLUMNS),
        steps=pandas.DataFrame([(step.start, step.duration) for step in steps], columns=STEP_COLUMNS),
    )


def profile_tables(trace: Trace, attention_only: bool = False) -> dict[str, Any]:
    """The part of a profile (`step_profile.Profile`) that comes from the trace: sums over the profiled steps, as plain JSON.

    Args:
        attention_only: keep only the operators and kernels of span `attention`; all else is of the whole step.

    Returns:
        operators, kernels, details, step_us, profiled_steps, device_busy_us, launch, memory_peak_bytes.
    """
    operators, kernels = trace.operators[trace.operators.step >= 0], trace.kernels[trace.kernels.step >= 0]
    launched = kernels.launch_delay_us.dropna()
    memory = trace.memory[trace.memory.device == "gpu"] if len(kernels) else trace.memory
    if attention_only:
        operators, kernels = operators[operators.span == "attention"], kernels[kernels.span == "attention"]
    sums = ["cpu_us", "self_cpu_us", "device_us", "self_device_us", "allocated_bytes"]
    grouped = operators.groupby(["name", "span", "phase", "input_shapes", "input_types"], sort=False)
    by_operator = grouped[sums].sum().assign(calls=grouped.size()).reset_index()
    own_time = "self_device_us" if len(trace.kernels) else "self_cpu_us"
    grouped = kernels.groupby(["name", "span", "phase"], sort=False)
    by_kernel = grouped.agg(calls=("name", "size"), device_us=("duration_us", "sum")).reset_index()
    detailed = operators[operators.span.isin(INNER_SPANS.values())]
    by_detail = detailed.groupby(["span", "detail", "phase"], sort=False)[own_time].sum().rename("us").reset_index()
    return {
        "operators": by_operator.sort_values(own_time, ascending=False, kind="stable").to_dict("records"),
        "kernels": by_kernel.sort_values("device_us", ascending=False, kind="stable").to_dict("records"),
        "details": by_detail.sort_values("us", ascending=False, kind="stable").to_dict("records"),
        "step_us": trace.step_us(),
        "profiled_steps": len(trace.steps),
        "device_busy_us": float(trace.device_busy_us()),
        "launch": {"count": len(launched), "mean_delay_us": float(launched.mean()) if len(launched) else 0.0},
        "memory_peak_bytes": int(memory.total_bytes.max()) if len(memory) else None,
    }
