"""Reads calls from output of torch.profiler: a Chrome trace, or our profile_*.json made from one.

A trace of a CPU has no kernels. Its rows are the operator calls that do work (category `operator`,
with their self time), each of which would be one launch on a GPU. If a trace marks steps, only
events within a step are kept, as in a profile.
"""

import functools
import json
from dataclasses import replace
from pathlib import Path

from tracepage.cost import operators
from tracepage.errors import UsageError
from tracepage.readers import chrome_trace, graph_replays
from tracepage.readers.kernel_names import category
from tracepage.readers.other_trace import read_other_trace
from tracepage.readers.source import Source, make_source, several_gpus
from tracepage.readers.trace import Trace
from tracepage.readers.trace_events import read_events
from tracepage.records import step_profile
from tracepage.records.step_profile import Profile
from tracepage.terminal import counted, format_time

import pandas

OPERATORS_NOTE = "these are operator calls that do work, with their self time"
NO_KERNELS_NOTE = (
    "nothing in the file is known as a kernel: these are operator calls that do work, with their "
    "self time"
)
COMPILED_NOTE = (
    "a CPU trace has no events for the loops that torch.compile fuses: "
    "their time is in the CompiledFunction around them"
)


def read_trace(path: Path) -> Source:
    """The calls of a trace; captured ones with the spans of the eager trace beside it. A trace of
    another program gives the source of `other_trace`.
    """
    events = read_events(path)
    if events.others is not None:
        return read_other_trace(path, events.others)
    trace = graph_replays.with_eager_spans(path, chrome_trace.make_trace(path, events))
    return trace_source("pytorch-trace", path, trace)


def with_capture(source: Source, eager_trace: Path) -> Source:
    """A source of a trace, with the operators of another trace for the kernels of its graphs.
    UsageError: it is of no trace, or as `graph_replays.with_operators_of`.
    """
    if source.kind != "pytorch-trace" or source.trace is None:
        raise UsageError(f"--capture: {source.path} is not a trace of torch.profiler")
    trace = graph_replays.with_operators_of(source.path, source.trace, eager_trace)
    return trace_source(source.kind, source.path, trace)


def trace_source(kind: str, path: Path, trace: Trace) -> Source:
    """The calls of a trace that was read from `path`. UsageError: it has steps, and none has any
    work.
    """
    steps = len(trace.steps) or None
    if steps is None and any(event.name.startswith(chrome_trace.STEP) for event in trace.host):
        raise UsageError(
            f"{path}: no operator falls into a profiled step: profile again, and let a step end"
        )
    notes = trace.notes
    if len(trace.kernels):
        calls = trace.kernels
        if steps:
            notes += _outside(path, calls)
        notes += several_gpus(trace.gpus)
    else:
        calls = _working_operators(trace)
    if steps:
        calls = calls[calls.step >= 0]
    if trace.kernels.empty:
        launches = any(event.kind == "launch" and "Launch" in event.name for event in trace.host)
        notes += _cpu_notes(calls.name, NO_KERNELS_NOTE if launches or notes else OPERATORS_NOTE)
    return make_source(kind, path, calls, steps=steps, notes=notes, trace=trace)


def read_profile(path: Path) -> Source:
    return profile_source(path, step_profile.read(path))


def with_trace(source: Source) -> Source:
    """A source that has, if it is of a profile, the trace that lies beside that."""
    if source.profile is None:
        return source
    trace = source.path.parent / source.profile["trace"]
    return replace(source, trace=graph_replays.load(trace)) if trace.exists() else source


def profile_source(path: Path, profile: Profile) -> Source:
    """The calls of a profile that was read from `path`."""
    steps = profile["profiled_steps"]
    if profile["kernels"]:
        rows = [
            (row["name"], row["span"], row["phase"], row["calls"], row["device_us"])
            for row in profile["kernels"]
        ]
    else:
        rows = [
            (row.name, row.span, row.phase, round(row.calls * steps), row.us * steps)
            for row in operators.rows(profile)
            if row.works
        ]
    labels = ["name", "span", "phase"]
    table = pandas.DataFrame(rows, columns=[*labels, "calls", "us"])
    table = table.groupby(labels, sort=False, as_index=False).sum()
    table["duration_ns"] = (table.pop("us") * 1e3).round()
    table["category"] = table.name.map(category) if profile["kernels"] else "operator"
    notes = () if profile["kernels"] else _cpu_notes(table.name)
    if profile["attention_only"]:
        notes += ("only attention was kept",)
    return make_source("profile", path, table, steps=steps, notes=notes, profile=profile)


def _outside(path: Path, kernels: pandas.DataFrame) -> tuple[str, ...]:
    """The note on kernels that belong to no profiled step. UsageError: all of them do."""
    outside = kernels[kernels.step < 0]
    if len(outside) == len(kernels):
        number = counted(len(kernels), "kernel")
        raise UsageError(f"{path}: no profiled step launched any of its {number}")
    if outside.empty:
        return ()
    time = format_time(outside.duration_ns.sum() / 1e6)
    left_out = f"{counted(len(outside), 'kernel')} of {time}"
    return (f"not counted: {left_out} that no profiled step launched",)


def _working_operators(trace: Trace) -> pandas.DataFrame:
    """Calls that compute or move data, and their start in the trace, `time_ns`. Views, allocations,
    autograd nodes and torch.compile's frames do not.
    """
    calls = trace.operators
    times = {"time_ns": calls.start_ns, "duration_ns": calls.self_cpu_ns}
    calls = calls.assign(category="operator", **times)
    inputs = zip(calls.name, calls.input_shapes, calls.input_types, strict=True)
    return calls[[_works(*call) for call in inputs]]


@functools.cache
def _works(name: str, shapes: str, types: str) -> bool:
    if name in operators.COMPOSITE_ON_CPU:
        return False
    return operators.cost(name, json.loads(shapes), json.loads(types)) != (0, 0)


def _cpu_notes(names: pandas.Series, note: str = OPERATORS_NOTE) -> tuple[str, ...]:
    if names.str.startswith("CompiledFunction").any():
        return (note, COMPILED_NOTE)
    return (note,)
