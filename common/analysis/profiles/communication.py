"""Reads communication from the traces of all processes of a job, one trace a process.

Collectives are the kernels of NCCL and RCCL by name, or on a CPU the annotations `gloo:...` of gloo's threads. They count in the
profiled steps. Their time on a rank is the union of their intervals. It is divided in two ways:

    overlapped, exposed    beside a computing kernel (on a CPU: an operator of `aten`), or not
    waiting, moving        a collective ends on all ranks once the last one has come. The shortest duration of the same
                           collective among the ranks is taken as that of moving bytes, at its end; the time before it is waiting

The same collective on two ranks is the one of the same kind with the same number in the same step, because all ranks start
collectives in one order. Only durations are compared between ranks, whose clocks differ.
"""

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from common.analysis.profiles import chrome_trace, kernel_names
from common.analysis.profiles.chrome_trace import Interval, length, union
from common.errors import UsageError
from common.records.study_files import Split

GLOO = "gloo:"
KINDS = {
    "all_reduce": "allreduce", "reduce_scatter": "reducescatter", "all_gather": "allgather", "broadcast": "broadcast",
    "all_to_all": "alltoall", "send_recv": "sendrecv", "reduce": "reduce",
}  # fmt: skip

Key = tuple[int, str, int]  # of a collective: step, kind, and number within both


class Collective(NamedTuple):
    """A collective on one rank."""

    kind: str  # of KINDS, or "collective" where its name does not tell
    step: int  # from 0
    start: float  # in us, by the rank's clock
    end: float


class Traced(NamedTuple):
    """Communication in one rank's trace: collectives by start, the union of computing intervals, and the number of steps."""

    path: Path
    collectives: list[Collective]
    computing: list[Interval]
    steps: int


def find(folder: Path) -> list[Path]:
    """The traces of a job in a folder that holds no others, in the order of the ranks."""
    return sorted((*folder.glob("trace_*.json"), *folder.glob("trace_*.json.gz")), key=rank_of)


def rank_of(path: Path) -> int:
    """The rank that wrote a trace, by its name."""
    return int((re.match(r"trace_rank(\d+)_", path.name) or [0, 0])[1])


def kind(name: str) -> str:
    """The kind of a collective by the name of its kernel, annotation or operator."""
    letters = name.replace("_", "").lower()
    return next((found for found, pattern in KINDS.items() if pattern in letters), "collective")


def load(path: Path) -> Traced:
    """Reads the trace, .json or .json.gz, of one of a job's ranks."""
    trace = chrome_trace.load(path)
    if not len(trace.steps):
        raise UsageError(f"{path} holds no profiled step: its run was stopped early; profile again")
    found: list[Collective] = []
    if len(trace.kernels):
        kernels = trace.kernels[trace.kernels.category == "kernel"].sort_values("start_us")
        ends, ours = kernels.start_us + kernels.duration_us, kernels.name.map(kernel_names.kind) == "communication"
        columns = zip(ours, kernels.name, kernels.collective, kernels.step, kernels.start_us, ends, strict=True)
        for one, name, named, step, start, end in columns:
            if one and step >= 0:
                found.append(Collective(kind(named or name), step, start, end))
        computing = zip(kernels.start_us[~ours], ends[~ours], strict=True)
    else:
        operators = trace.operators[trace.operators.name.str.startswith("aten::")]
        computing = zip(operators.start_us, operators.start_us + operators.cpu_us, strict=True)
        found = _gloo(trace)
    return Traced(path, sorted(found, key=lambda each: each.start), union(computing), len(trace.steps))


def _gloo(trace: chrome_trace.Trace) -> list[Collective]:
    events = [event for event in trace.host if event.name.startswith(GLOO) and event.step >= 0]
    return [Collective(kind(event.name), event.step, event.start, event.end) for event in events]


def common_length(one: list[Interval], other: list[Interval]) -> float:
    """Time in both of two unions."""
    return length(one) + length(other) - length(union([*one, *other]))


def split(ranks: list[Traced]) -> list[Split]:
    """Communication of each rank, in milliseconds of a step: the mean over its profiled steps."""
    numbered = [_numbered(traced.collectives) for traced in ranks]
    for traced, found in zip(ranks, numbered, strict=True):
        if differing := found.keys() ^ numbered[0].keys():
            step, name, number = min(differing)
            raise UsageError(
                f"{traced.path} and {ranks[0].path} are not of one job, or one is cut off: {name} number {number + 1} of step "
                f"{step + 1} is in one of them only"
            )
    shortest = {key: min(found[key].end - found[key].start for found in numbered) for key in numbered[0]}
    return [_split(traced, found, shortest) for traced, found in zip(ranks, numbered, strict=True)]


def _numbered(collectives: list[Collective]) -> dict[Key, Collective]:
    counts: Counter[tuple[int, str]] = Counter()
    found = {}
    for each in collectives:
        found[each.step, each.kind, counts[each.step, each.kind]] = each
        counts[each.step, each.kind] += 1
    return found


def _split(traced: Traced, found: dict[Key, Collective], shortest: dict[Key, float]) -> Split:
    whole = union((each.start, each.end) for each in found.values())
    moving = union((each.end - shortest[key], each.end) for key, each in found.items())
    overlapped, exposed_moving = common_length(whole, traced.computing), length(moving) - common_length(moving, traced.computing)
    exposed = length(whole) - overlapped

    def per_step(us: float) -> float:
        return max(0.0, us) / 1e3 / traced.steps

    return Split(
        communication_ms=per_step(length(whole)), overlapped_ms=per_step(overlapped), exposed_ms=per_step(exposed),
        waiting_ms=per_step(length(whole) - length(moving)), moving_ms=per_step(length(moving)),
        exposed_waiting_ms=per_step(exposed - exposed_moving),
    )  # fmt: skip
