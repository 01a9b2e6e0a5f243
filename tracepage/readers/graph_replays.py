"""Spans and operators of the kernels of a captured step.

A profile of a captured step shows one call that launches a graph, and the kernels of the graph
without the operators and spans behind them. The graph was captured from an eager step, so it
replays the kernels of that step, and those of a branch in the order of their launches. A trace of
the eager step therefore says, kernel by kernel, where each one comes from. Branches run at their
own speed, so kernels of two branches can change places. Kernels of one name are nearly always on
one branch and keep their order.

For graphs of another program, `with_operators_of` takes any trace in which the same kernels ran
eagerly: its first step, or all of it where it has none.
"""

import difflib
import functools
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from tracepage.errors import UsageError
from tracepage.readers import chrome_trace
from tracepage.readers.trace import Trace

import pandas

NEARLY_ALL = 0.95  # A share of an eager step's kernels.


def load(path: Path) -> Trace:
    """A trace, with the spans of the eager step that lies beside it for captured ones."""
    return with_eager_spans(path, chrome_trace.load(path))


def with_eager_spans(path: Path, trace: Trace) -> Trace:
    """The same for a trace that was read from `path`."""
    beside = eager_path(path)
    if not beside.exists():
        return trace
    eager = chrome_trace.load(beside)
    return replace(attribute(trace, eager), notes=(*trace.notes, *lost_kernels(trace, eager)))


def with_operators_of(path: Path, trace: Trace, eager_trace: Path) -> Trace:
    """A trace that was read from `path`, with the operators and spans of another for the kernels of
    its graphs. UsageError: it has none, the other has no eager kernels, or they do not match.
    """
    if eager_path(path).exists():
        raise UsageError(f"--capture: {path} has its eager trace beside it, which is used")
    if trace.kernels.graph.isna().all():
        raise UsageError(f"--capture: {path} has no kernels of a graph")
    eager = chrome_trace.load(eager_trace)
    if not eager.kernels.operators.map(bool).any():
        raise UsageError(
            f"--capture: no operator launches a kernel in {eager_trace}: give a trace in which "
            "the same work ran without a graph"
        )
    attributed = attribute(trace, eager)
    of_graphs = attributed.kernels.graph.notna()
    replayed = int(of_graphs.sum())
    lacking = int((of_graphs & ~attributed.kernels.operators.map(bool)).sum())
    if lacking == replayed:
        raise UsageError(f"--capture: no kernel of a graph in {path} is in {eager_trace}")
    note = f"{lacking:,} of {replayed:,} kernels of graphs have no operator in {eager_trace}"
    return replace(attributed, notes=(*trace.notes, note) if lacking else trace.notes)


def eager_path(path: Path) -> Path:
    """The trace of the eager step of the captured ones in a trace."""
    return path.with_name(f"eager_{path.name}")


def attribute(captured: Trace, eager: Trace) -> Trace:
    """The trace of captured steps in which the kernels of graphs have the span, phase and operators
    of the first eager step in the other trace.

    Each replay also gets the eager step's operators, with the times of the replayed kernels and
    without time on the host. A kernel that the eager step has not keeps the span `other`.
    """
    eager_kernels = eager.kernels[eager.kernels.graph.isna()].sort_values("start_ns")
    reference = eager_kernels
    operators_of_step = eager.operators
    if len(eager.steps):
        reference = eager_kernels[eager_kernels.step == 0]
    if len(eager.steps) > 1:
        operators_of_step = eager.operators[eager.operators.step == 0]
    places = {number: place for place, number in enumerate(operators_of_step.index)}
    template = operators_of_step.assign(
        cpu_ns=0, self_cpu_ns=0, device_ns=0, self_device_ns=0, allocated_bytes=0
    )
    kernels = captured.kernels.copy()
    operators = [captured.operators]
    launched_by = kernels.operators.to_dict()
    for _, replay in captured.kernels.dropna(subset="graph").groupby("graph"):
        replay = replay.sort_values("start_ns")
        first = sum(map(len, operators))
        device_ns = [0] * len(template)
        self_device_ns = [0] * len(template)
        # One call launches all of them.
        kernels.loc[replay.index[1:], "launch_delay_ns"] = float("nan")
        for theirs, ours in _pairs(tuple(reference.name), tuple(replay.name)):
            row = replay.index[ours]
            source = reference.iloc[theirs]
            duration = replay.duration_ns[row]
            kernels.loc[row, ["span", "phase"]] = source.span, source.phase
            chain = [places[number] for number in source.operators]
            launched_by[row] = [first + place for place in chain]
            for place in chain:
                device_ns[place] += duration
            for place in chain[:1]:
                self_device_ns[place] += duration
        operators.append(
            template.assign(
                step=replay.step.iloc[0],
                start_ns=int(replay.graph.iloc[0]),
                device_ns=device_ns,
                self_device_ns=self_device_ns,
            )
        )
    kernels["operators"] = list(launched_by.values())
    return replace(captured, kernels=kernels, operators=pandas.concat(operators, ignore_index=True))


def lost_kernels(captured: Trace, eager: Trace) -> tuple[str, ...]:
    """A note on what a replay lacks in the median, if it is more than the few by which a captured
    step may differ.

    The profilers of some ROCm releases lose kernels of graphs.
    """
    launched = int((eager.kernels[eager.kernels.step == 0].category == "kernel").sum())
    replays = captured.kernels.dropna(subset="graph")
    sizes = replays[replays.category == "kernel"].groupby("graph").size()
    replayed = int(sizes.median()) if len(sizes) else 0
    if replayed >= NEARLY_ALL * launched:
        return ()
    return (
        f"the profiler recorded {replayed:,} kernels of a replayed step, where the eager step has "
        f"{launched:,}: sums are too low (MACHINES.md: known on ROCm)",
    )


@functools.lru_cache
def _pairs(reference: tuple[str, ...], replay: tuple[str, ...]) -> list[tuple[int, int]]:
    """Positions of the same kernel in both: by its number among those of its name, or by order
    where these are not as many.
    """
    pairs: list[tuple[int, int]] = []
    theirs = _positions(reference)
    ours = _positions(replay)
    by_number = {name for name in theirs if len(theirs[name]) == len(ours.get(name, ()))}
    for name in by_number:
        pairs += zip(theirs[name], ours[name], strict=True)
    matcher = difflib.SequenceMatcher(None, reference, replay, autojunk=False)
    for first, second, size in matcher.get_matching_blocks():
        for i in range(size):
            if reference[first + i] not in by_number:
                pairs.append((first + i, second + i))
    return pairs


def _positions(names: tuple[str, ...]) -> dict[str, list[int]]:
    positions = defaultdict(list)
    for position, name in enumerate(names):
        positions[name].append(position)
    return positions
