"""Where the time of a profiled step goes, and why the GPU waits."""

from typing import NamedTuple

from tracepage.readers.source import Source
from tracepage.readers.trace import Trace

import pandas
from typing_extensions import TypedDict

CAUSES = (
    "work",
    "copy_to_device",
    "copy_to_host",
    "communication",
    "input",
    "synchronization",
    "allocation",
    "compilation",
    "cpu_operators",
    "saving",
    "host",
    "launches",
    "unknown",
)
GAP_COLUMNS = ("start_ns", "duration_ns", "cause", "operator", "span", "line", "where")


class Part(TypedDict):
    """One cause, in a mean step; of `work` a kind of kernels."""

    cause: str
    kind: str  # Of `work`: a kind of kernels, or "small grids"; else empty.
    ms: float
    count: float
    where: str


class Verdict(TypedDict):
    """The largest removable part, or `work`."""

    cause: str
    ms: float
    gain: float  # times as fast, if it were gone
    sentence: str


class StepCauses(NamedTuple):
    """The parts add up to `step_ms`; `gaps` has GAP_COLUMNS."""

    step_ms: float
    parts: list[Part]
    verdict: Verdict
    gaps: pandas.DataFrame


def attribute(source: Source | Trace) -> StepCauses | None:
    """The causes of a mean step; None where no GPU works, or the file tells no time."""
    trace = source if isinstance(source, Trace) else source.trace
    if trace is None or trace.kernels.empty:
        return None
    steps = trace.step_ns()
    if not steps:
        return None
    step_ms = sum(steps) / len(steps) / 1e6
    work = trace.device_busy_ns() / len(steps) / 1e6
    parts: list[Part] = [
        {"cause": "work", "kind": "other", "ms": work, "count": 0.0, "where": ""},
        {"cause": "unknown", "kind": "", "ms": step_ms - work, "count": 0.0, "where": ""},
    ]
    verdict: Verdict = {"cause": "work", "ms": work, "gain": 1.0, "sentence": "The GPU works."}
    return StepCauses(step_ms, parts, verdict, pandas.DataFrame(columns=GAP_COLUMNS))
