"""Reads a Chrome trace of torch.profiler (NVIDIA, ROCm or CPU) and says to which part of the model each event belongs.

The events of one thread nest like function calls: what starts inside another event was called by it. From that follow,
for every operator,

- its *self time*: its duration less that of the operators it called. Calls of the GPU's runtime are not operators, so
  launching kernels is part of the operator that launches them. Self times add up to the time covered by operators.
- its *span*: the innermost enclosing `common.spans` annotation. An addition of two tensors of one shape outside all
  spans is a residual connection.
- its *phase*: `optimizer` inside the optimizer's step, `backward` inside the span of that name or below an autograd
  node, else `forward` until a step's backward starts, and `other` after it or outside all steps.

The backward pass runs nodes that the forward pass recorded, on a GPU in a thread of its own, so nothing there encloses
them with a span. The profiler writes a "Sequence number" on both sides: forward operators carry the number that the next
autograd node will get, so of several with one number the last to start made the node. A node takes its span. Nodes
without a number (gradients added up at parameters) are span `other`.

A kernel is joined to the runtime call with the same `correlation`, never by name: ROCm's runtime calls are named
hipLaunchKernel and so on, in categories that keep the name `cuda_runtime`. It belongs to the operator that made the call.

Times are microseconds as the profiler wrote them, fractions kept.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UsageError
from common.files import read_json
from common.spans import FORWARD_SPANS

if TYPE_CHECKING:
    import pandas

AUTOGRAD_NODE = "autograd::engine::evaluate_function"
AUTOGRAD_ENGINE = "autograd engine"  # the name under which the engine's own time around a node is listed
REDISPATCH = "redispatch"  # and that of a call that calls the same operator again: autocast, or a number made a tensor
KINDS = {"cpu_op": "operator", "user_annotation": "annotation", "cuda_runtime": "launch", "cuda_driver": "launch"}
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
CLOCK_ERROR_US = 0.002  # timestamps near 4e12 us are doubles with a step of 0.001 us

OPERATOR_COLUMNS = (
    "name", "span", "phase", "step", "start_us", "cpu_us", "self_cpu_us", "device_us", "self_device_us",
    "input_shapes", "input_types", "allocated_bytes",
)  # fmt: skip
KERNEL_COLUMNS = ("name", "category", "start_us", "duration_us", "stream", "span", "phase", "step", "launch_delay_us")
MEMORY_COLUMNS = ("time_us", "bytes", "address", "device", "total_bytes", "span", "phase")
STEP_COLUMNS = ("start_us", "duration_us")


@dataclass
class Trace:
    """What a trace says, as pandas DataFrames; no frame is ever missing, some are empty.

    Attributes:
        operators: a row per operator call: name, span, phase, step (index into `steps`, or -1), start_us, cpu_us,
            self_cpu_us, device_us (kernels launched in it and below), self_device_us (launched in it directly),
            input_shapes and input_types (JSON), allocated_bytes (net, in it directly; 0 without memory events).
            The time that the autograd engine spends around its nodes has rows named `autograd engine`; a call that
            only calls the same operator again has `redispatch`.
        kernels: a row per kernel, copy or fill on the device: name, category, start_us, duration_us, stream, span,
            phase, step, launch_delay_us (from the start of the launching call; NaN if that is not in the trace).
        memory: a row per allocation (bytes > 0) or release (bytes < 0): time_us, bytes, address, device (`cpu` or `gpu`),
            total_bytes (all that is allocated afterwards, as the allocator counts), span, phase.
        steps: a row per ProfilerStep with operators in it: start_us, duration_us, of the host.
    """

    operators: "pandas.DataFrame"
    kernels: "pandas.DataFrame"
    memory: "pandas.DataFrame"
    steps: "pandas.DataFrame"

    def device_busy_us(self) -> float:
        """Time in which at least one kernel of the profiled steps runs: the union of their intervals."""
        kernels = self.kernels[self.kernels.step >= 0].sort_values("start_us")
        busy, end = 0.0, float("-inf")
        for start, duration in zip(kernels.start_us, kernels.duration_us, strict=True):
            busy += max(0.0, start + duration - max(start, end))
            end = max(end, start + duration)
        return busy

    def step_us(self) -> list[float]:
        """Wall time of each step: until host and device have both finished it, from when both had finished the one before.

        The host runs ahead of a GPU, so a ProfilerStep alone can end before the step's first kernel has started, and a
        trace may begin with kernels that were launched before it.
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


@dataclass(eq=False)
class _Event:
    """One event of the host: an operator, an annotation, a call of the GPU's runtime, or an allocation."""

    kind: str
    name: str
    thread: tuple
    start: float
    duration: float
    args: dict[str, Any]
    operator: "_Event | None" = None  # innermost enclosing operator
    span: str | None = None
    phase: str | None = None
    step: int = -1
    children_us: float = 0.0
    device_us: float = 0.0
    self_device_us: float = 0.0
    allocated_bytes: int = 0
    repeated: bool = False  # by an operator of the same name and shapes, which does the work

    @property
    def end(self) -> float:
        return self.start + self.duration


def load(path: Path) -> Trace:
    """Reads a .json or .json.gz file.

    Raises:
        UsageError: the file cannot be read, is damaged, or is not a trace of torch.profiler.
    """
    content = read_json(path)
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list):
        raise UsageError(f"{path} is not a trace of torch.profiler (it has no traceEvents): give a trace_*.json")
    events = [event for event in events if isinstance(event, dict)]
    host = sorted((found for event in events if (found := _host_event(event))), key=lambda event: (event.start, -event.duration))
    if not any(event.kind == "operator" for event in host):
        raise UsageError(f"{path} is not a trace of torch.profiler (it has no PyTorch operators): give a trace_*.json")
    _attribute(host)
    steps = _mark_steps(host)
    kernels = _join_kernels([event for event in events if event.get("cat") in DEVICE_CATEGORIES], host)
    return _frames(host, kernels, steps)


def _host_event(event: dict) -> _Event | None:
    kind = KINDS.get(event.get("cat")) if event.get("ph") == "X" else None
    if event.get("name") == "[memory]":
        kind = "memory"
    if kind is None:
        return None
    thread = (event.get("pid"), event.get("tid"))
    return _Event(kind, event["name"], thread, event["ts"], event.get("dur", 0.0), event.get("args", {}))


def _encloses(outer: _Event, inner: _Event) -> bool:
    """Whether `inner`, which does not start earlier, lies in `outer`. Of a runtime call only the start counts: another
    clock measures it."""
    return inner.start < outer.end and (inner.kind == "launch" or inner.end <= outer.end + CLOCK_ERROR_US)


def _attribute(host: list[_Event]) -> None:
    """Gives each event its operator, span and phase; `host` is in order of start, so a forward precedes its backward."""
    open_events: dict[tuple, list[_Event]] = defaultdict(list)  # by thread, outermost first
    span_of_node: dict[int, str | None] = {}  # by sequence number
    for event in host:
        stack = open_events[event.thread]
        while stack and not _encloses(stack[-1], event):
            stack.pop()
        if stack:
            parent = stack[-1]
            event.span, event.phase = parent.span, parent.phase
            event.operator = parent if parent.kind == "operator" else parent.operator
        if event.kind == "annotation":
            if event.name in FORWARD_SPANS:
                event.span, event.phase = event.name, event.phase or "forward"
            elif event.name == "backward":
                event.span, event.phase = None, "backward"
            elif event.name == "optimizer" or event.name.startswith("Optimizer."):
                event.span = event.phase = "optimizer"
            stack.append(event)
        elif event.kind == "operator":
            number = event.args.get("Sequence number")
            if event.name.startswith(AUTOGRAD_NODE):
                event.span, event.phase = span_of_node.get(number), "backward"
            elif event.span is None and event.phase is None and _is_residual(event):
                event.span, event.phase = "residual", "forward"
            if number is not None:
                span_of_node[number] = event.span
            if event.operator:
                event.operator.children_us += event.duration
                event.operator.repeated = event.operator.repeated or _is_same_call(event.operator, event)
            stack.append(event)
        elif event.kind == "memory" and event.operator:
            event.operator.allocated_bytes += event.args["Bytes"]


def _is_same_call(outer: _Event, inner: _Event) -> bool:
    return outer.name == inner.name and outer.args.get("Input Dims") == inner.args.get("Input Dims")


def _is_residual(event: _Event) -> bool:
    shapes = event.args.get("Input Dims", [])
    return event.name == "aten::add" and event.operator is None and len(shapes) > 1 and bool(shapes[0]) and shapes[0] == shapes[1]


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


def _join_kernels(device: list[dict], host: list[_Event]) -> list[tuple]:
    """Rows of the kernels' frame; adds each kernel's time to the operator that launched it and to those around it."""
    launches = {event.args.get("correlation"): event for event in host if event.kind == "launch"}
    rows = []
    for event in sorted(device, key=lambda event: event["ts"]):
        arguments = event.get("args", {})
        launch = launches.get(arguments.get("correlation"))
        where = (launch.span, launch.phase, launch.step) if launch else ("other", "other", -1)
        delay = event["ts"] - launch.start if launch else float("nan")
        rows.append((event["name"], event["cat"], event["ts"], event["dur"], arguments.get("stream"), *where, delay))
        operator = launch.operator if launch else None
        if operator:
            operator.self_device_us += event["dur"]
        while operator:
            operator.device_us += event["dur"]
            operator = operator.operator
    return rows


def _frames(host: list[_Event], kernels: list[tuple], steps: list[_Event]) -> Trace:
    import pandas

    operators, memory = [], []
    for event in host:
        if event.kind == "operator":
            name, cpu_us, self_cpu_us, device_us = event.name, event.duration, event.duration - event.children_us, event.device_us
            if name.startswith(AUTOGRAD_NODE):  # no operator: only what it adds itself
                name, cpu_us, device_us = AUTOGRAD_ENGINE, self_cpu_us, event.self_device_us
            elif event.repeated:
                name, cpu_us, device_us = REDISPATCH, self_cpu_us, event.self_device_us
            shapes, types = (json.dumps(event.args.get(key, [])) for key in ("Input Dims", "Input type"))
            operators.append(
                (name, event.span, event.phase, event.step, event.start, cpu_us, self_cpu_us, device_us,
                 event.self_device_us, shapes, types, event.allocated_bytes)
            )  # fmt: skip
        elif event.kind == "memory":
            size, address, total = (event.args[key] for key in ("Bytes", "Addr", "Total Allocated"))
            device = "cpu" if event.args["Device Type"] == 0 else "gpu"
            memory.append((event.start, size, address, device, total, event.span, event.phase))
    return Trace(
        operators=pandas.DataFrame(operators, columns=OPERATOR_COLUMNS),
        kernels=pandas.DataFrame(kernels, columns=KERNEL_COLUMNS),
        memory=pandas.DataFrame(memory, columns=MEMORY_COLUMNS),
        steps=pandas.DataFrame([(step.start, step.duration) for step in steps], columns=STEP_COLUMNS),
    )


def profile_tables(trace: Trace, attention_only: bool = False) -> dict[str, Any]:
    """What a profile (schema tiny-llama-profile/1) takes from the trace: sums over the profiled steps, as plain JSON.

    Args:
        attention_only: keep only the operators and kernels of span `attention`; the rest stays that of the whole step.

    Returns:
        operators, kernels, step_us, profiled_steps, device_busy_us, launch, memory_peak_bytes.
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
    return {
        "operators": by_operator.sort_values(own_time, ascending=False, kind="stable").to_dict("records"),
        "kernels": by_kernel.sort_values("device_us", ascending=False, kind="stable").to_dict("records"),
        "step_us": trace.step_us(),
        "profiled_steps": len(trace.steps),
        "device_busy_us": float(trace.device_busy_us()),
        "launch": {"count": len(launched), "mean_delay_us": float(launched.mean()) if len(launched) else 0.0},
        "memory_peak_bytes": int(memory.total_bytes.max()) if len(memory) else None,
    }
