"""Reads communication from the traces of all processes of a job, one trace a process.

Collectives are the kernels of NCCL and RCCL by name, or on a CPU the annotations `gloo:...` of gloo's threads. They count in the
profiled steps. Their time on a rank is the union of their intervals. It is divided in two ways:

    overlapped, exposed    beside a computing kernel (on a CPU: an operator of `aten`), or not
    waiting, moving        a collective ends on all ranks once the last one has come. The shortest duration of the same
                           collective among the ranks is taken as that of moving bytes, at its end; the time before it is waiting

The same collective on two ranks is the one of the same name with the same number in the same step, because all ranks start
collectives in one order. Only durations are compared between ranks, whose clocks differ.
"""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common.analysis.profiles import chrome_trace
from common.analysis.profiles.chrome_trace import Interval, length, union
from common.analysis.profiles.kernel_names import kind
from common.errors import UsageError
from common.records.study_files import Split

GLOO = "gloo:"
Collectives = dict[tuple[int, str, int], Interval]  # by step, name and number within both; by the rank's clock, in us


class Traced(NamedTuple):
    """Communication in one rank's trace: collectives, the union of computing intervals, and the number of steps."""

    collectives: Collectives
    computing: list[Interval]
    steps: int


def find(folder: Path) -> list[Path]:
    """The traces of a job in a folder that holds no others, in the order of the ranks."""
    traces = (*folder.glob("trace_*.json"), *folder.glob("trace_*.json.gz"))
    return sorted(traces, key=lambda path: int((re.match(r"trace_rank(\d+)_", path.name) or [0, 0])[1]))


def split(paths: Sequence[Path]) -> list[Split]:
    """Communication of each rank, in milliseconds of a step: the mean over its profiled steps."""
    ranks = [_load(path) for path in paths]
    for path, traced in zip(paths, ranks, strict=True):
        if differing := traced.collectives.keys() ^ ranks[0].collectives.keys():
            step, name, number = min(differing)
            raise UsageError(
                f"{path} and {paths[0]} are not of one job, or one is cut off: {name} number {number + 1} of step {step + 1} is "
                "in one of them only"
            )
    shortest = {
        key: min(end - start for start, end in (traced.collectives[key] for traced in ranks)) for key in ranks[0].collectives
    }
    return [_split(traced, shortest) for traced in ranks]


def _load(path: Path) -> Traced:
    trace = chrome_trace.load(path)
    if not len(trace.steps):
        raise UsageError(f"{path} holds no profiled step: its run was stopped early; profile again")
    if len(trace.kernels):
        kernels = trace.kernels[trace.kernels.category == "kernel"]
        kernels = kernels.assign(end_us=kernels.start_us + kernels.duration_us)
        ours = kernels.name.map(kind) == "communication"
        computing = zip(kernels.start_us[~ours], kernels.end_us[~ours], strict=True)
        found = list(kernels[ours][["step", "name", "start_us", "end_us"]].itertuples(index=False, name=None))
    else:
        operators = trace.operators[trace.operators.name.str.startswith("aten::")]
        computing = zip(operators.start_us, operators.start_us + operators.cpu_us, strict=True)
        found = [(event.step, event.name, event.start, event.end) for event in trace.host if event.name.startswith(GLOO)]
    return Traced(_numbered(found), union(computing), len(trace.steps))


def _numbered(found: list[tuple[int, str, float, float]]) -> Collectives:
    """The collectives of profiled steps, from step, name, start and end of each in order of start."""
    counts: Counter[tuple[int, str]] = Counter()
    numbered: Collectives = {}
    for step, name, start, end in found:
        if step >= 0:
            numbered[step, name, counts[step, name]] = start, end
            counts[step, name] += 1
    return numbered


def common_length(one: list[Interval], other: list[Interval]) -> float:
    """Time in both of two unions."""
    return length(one) + length(other) - length(union([*one, *other]))


def _split(traced: Traced, shortest: dict[tuple[int, str, int], float]) -> Split:
    whole = union(traced.collectives.values())
    moving = union((end - shortest[key], end) for key, (_, end) in traced.collectives.items())
    overlapped, exposed_moving = common_length(whole, traced.computing), length(moving) - common_length(moving, traced.computing)
    exposed = length(whole) - overlapped

    def per_step(us: float) -> float:
        return max(0.0, us) / 1e3 / traced.steps

    return Split(
        communication_ms=per_step(length(whole)), overlapped_ms=per_step(overlapped), exposed_ms=per_step(exposed),
        waiting_ms=per_step(length(whole) - length(moving)), moving_ms=per_step(length(moving)),
        exposed_waiting_ms=per_step(exposed - exposed_moving),
    )  # fmt: skip
