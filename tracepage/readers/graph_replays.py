"""Spans and operators of the kernels of a captured step.

A profile of a captured step shows one call that launches a graph, and the kernels of the graph
without the operators and spans behind them. The graph was captured from an eager step, so it
replays the kernels of that step, and those of a branch in the order of their launches. A trace of
the eager step therefore says, kernel by kernel, where each one comes from. Branches run at their
own speed, so kernels of two branches can change places. Kernels of one name are nearly always on
one branch and keep their order.
"""

import difflib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tracepage.readers import chrome_trace
from tracepage.readers.chrome_trace import Trace

import pandas

NEARLY_ALL = 0.95  # of an eager step's kernels


def load(path: Path) -> Trace:
    """A trace, with the spans of the eager step that lies beside it for captured ones."""
    trace = chrome_trace.load(path)
    beside = eager_path(path)
    if not beside.exists():
        return trace
    eager = chrome_trace.load(beside)
    return replace(attribute(trace, eager), notes=(*trace.notes, *lost_kernels(trace, eager)))


def eager_path(path: Path) -> Path:
    """The trace of the eager step of the captured ones in a trace."""
    return path.with_name(f"eager_{path.name}")


def attribute(captured: Trace, eager: Trace) -> Trace:
    """The trace of captured steps in which the kernels of graphs have the span, phase and operators
    of the one eager step in the other trace.

    Each replay also gets the eager step's operators, with the times of the replayed kernels and
    without time on the host. A kernel that the eager step has not keeps the span `other`.
    """
    reference = (
        eager.kernels[eager.kernels.step == 0].sort_values("start_us").reset_index(drop=True)
    )
    template = eager.operators.assign(
        cpu_us=0.0, self_cpu_us=0.0, device_us=0.0, self_device_us=0.0, allocated_bytes=0
    )
    kernels = captured.kernels.copy()
    operators = [captured.operators]
    launched_by = kernels.operators.to_dict()
    for _, replay in captured.kernels.dropna(subset="graph").groupby("graph"):
        replay = replay.sort_values("start_us")
        first = sum(map(len, operators))
        step = replay.step.iloc[0]
        copies = template.assign(step=step, start_us=replay.graph.iloc[0])
        device = [0.0] * len(copies)
        own = [0.0] * len(copies)
        # one call launches all of them
        kernels.loc[replay.index[1:], "launch_delay_us"] = float("nan")
        for theirs, ours in _pairs(list(reference.name), list(replay.name)):
            row = replay.index[ours]
            source = reference.iloc[theirs]
            kernels.loc[row, ["span", "phase"]] = source.span, source.phase
            launched_by[row] = [first + number for number in source.operators]
            for position, number in enumerate(source.operators):
                own[number] += replay.duration_us[row] * (position == 0)
                device[number] += replay.duration_us[row]
        operators.append(copies.assign(device_us=device, self_device_us=own))
    kernels["operators"] = list(launched_by.values())
    return replace(captured, kernels=kernels, operators=pandas.concat(operators, ignore_index=True))


def lost_kernels(captured: Trace, eager: Trace) -> tuple[str, ...]:
    """A note on what a replay lacks in the median, if it is more than the few by which a captured
    step may differ.

    The profilers of some ROCm releases lose kernels of graphs.
    """
    launched = int((eager.kernels[eager.kernels.step == 0].category == "kernel").sum())
    of_graphs = captured.kernels[
        captured.kernels.graph.notna() & (captured.kernels.category == "kernel")
    ]
    replayed = int(of_graphs.groupby("graph").size().median()) if len(of_graphs) else 0
    if replayed >= NEARLY_ALL * launched:
        return ()
    found = f"the profiler recorded {replayed:,} kernels of a replayed step, where the eager step has {launched:,}"
    return (f"{found}: sums are too low (MACHINES.md: known on ROCm)",)


def _pairs(reference: list[str], replay: list[str]) -> Iterator[tuple[int, int]]:
    """Positions of the same kernel in both: by its number among those of its name, or by order
    where these are not as many.
    """
    counts = Counter(reference), Counter(replay)
    by_number = {name for name, count in counts[0].items() if count == counts[1][name]}
    for name in by_number:
        yield from zip(
            *([i for i, each in enumerate(names) if each == name] for names in (reference, replay)),
            strict=True,
        )
    for theirs, ours, size in difflib.SequenceMatcher(
        None, reference, replay, autojunk=False
    ).get_matching_blocks():
        yield from (
            (theirs + i, ours + i) for i in range(size) if reference[theirs + i] not in by_number
        )
