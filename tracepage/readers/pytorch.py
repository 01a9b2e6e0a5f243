"""Reads kernels from output of torch.profiler: a Chrome trace, or our profile_*.json made from one.

A trace of a CPU has no kernels. Its rows are the operator calls that do work (category `operator`,
with their self time), each of which would be one launch on a GPU. If a trace marks steps, only
events within a step are kept, as in a profile.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tracepage.cost import operators
from tracepage.errors import UsageError
from tracepage.readers import graph_replays
from tracepage.readers.chrome_trace import STEP, Trace
from tracepage.readers.kernel_table import Kernels, build, category, several_gpus
from tracepage.records import step_profile
from tracepage.records.step_profile import Profile
from tracepage.terminal import counted

import pandas

OPERATORS_NOTE = (
    "a CPU launches no kernels: these are operator calls that do work, with their self time"
)
COMPILED_NOTE = "a CPU trace has no events for the loops that torch.compile fuses: their time is in the CompiledFunction around them"


def read_trace(path: Path, trace: Trace | None = None) -> Kernels:
    """The kernels of a trace, which may have been loaded before; captured ones with the spans of
    the eager trace beside it.
    """
    trace = trace or graph_replays.load(path)
    on_gpu = len(trace.kernels) > 0
    steps = len(trace.steps) or None
    notes = trace.notes
    frame = (
        trace.kernels
        if on_gpu
        else trace.operators.assign(category="operator", duration_us=trace.operators.self_cpu_us)
    )
    if steps is None and any(event.name.startswith(STEP) for event in trace.host):
        raise UsageError(
            f"{path}: no operator falls into a profiled step: profile again, and let a step end"
        )
    if steps:
        notes += _outside(path, frame) if on_gpu else ()
        frame = frame[frame.step >= 0]
    if on_gpu:
        named = [
            category(name) if kind == "kernel" else kind
            for kind, name in zip(frame.category, frame.name, strict=True)
        ]
        frame = frame.assign(category=named)
        notes = notes + several_gpus(trace.gpus)
    else:
        calls = list(zip(frame.name, frame.input_shapes, frame.input_types, strict=True))
        working = {call for call in set(calls) if _works(*call)}
        frame = frame.loc[[call in working for call in calls]]
        notes += _cpu_notes(frame.name)
    times = {
        "start_ns": (frame.start_us * 1e3).round(),
        "duration_ns": (frame.duration_us * 1e3).round(),
    }
    columns = {name: frame[name] for name in ("name", "category", "span", "phase")}
    return build("pytorch-trace", path, columns | times, steps=steps, notes=notes)


def read_profile(path: Path, profile: Profile | None = None) -> Kernels:
    """The kernels of a profile, which may have been read before."""
    profile = profile or step_profile.read(path)
    steps = profile["profiled_steps"]
    on_gpu = bool(profile["kernels"])
    if on_gpu:
        rows = [
            (row["name"], row["span"], row["phase"], row["calls"], row["device_us"])
            for row in profile["kernels"]
        ]
    else:
        working = [row for row in operators.rows(profile) if row.works]
        rows = [
            (row.name, row.span, row.phase, round(row.calls * steps), row.us * steps)
            for row in working
        ]
    labels = ["name", "span", "phase"]
    table = (
        pandas.DataFrame(rows, columns=[*labels, "calls", "us"])
        .groupby(labels, sort=False, as_index=False)
        .sum()
    )
    categories = [category(name) if on_gpu else "operator" for name in table.name]
    columns: dict[str, Iterable] = {name: table[name] for name in labels}
    columns |= {
        "category": categories,
        "calls": table.calls,
        "duration_ns": (table.us * 1e3).round(),
    }
    notes = (() if on_gpu else _cpu_notes(table.name)) + (
        ("only attention was kept",) if profile["attention_only"] else ()
    )
    return build("profile", path, columns, steps=steps, notes=notes)


def _outside(path: Path, kernels: pandas.DataFrame) -> tuple[str, ...]:
    """The note on kernels that belong to no profiled step. UsageError: all of them do."""
    stepped = kernels.step >= 0
    if not stepped.any():
        raise UsageError(
            f"{path}: no profiled step launched any of its {counted(len(kernels), 'kernel')}"
        )
    if stepped.all():
        return ()
    left = f"{counted(int((~stepped).sum()), 'kernel')} of {kernels.duration_us[~stepped].sum() / 1e3:.3g} ms"
    return (f"not counted: {left} that no profiled step launched",)


def _works(name: str, shapes: str, types: str) -> bool:
    """Whether an operator computes or moves data. Views, allocations, autograd nodes and
    torch.compile's frames do not.
    """
    if name in operators.COMPOSITE_ON_CPU:
        return False
    return operators.cost(name, json.loads(shapes), json.loads(types)) != (0, 0)


def _cpu_notes(names: pandas.Series) -> tuple[str, ...]:
    return (
        (OPERATORS_NOTE, COMPILED_NOTE)
        if any(name.startswith("CompiledFunction") for name in names)
        else (OPERATORS_NOTE,)
    )
