"""How the ranks of a job wait for each other: where their steps go, and who makes whom wait.

A collective ends at the same time on all of its ranks, so its ends align the clocks of the traces.
It is the same one on all ranks by process group, kind and number: the number that the trace gives,
or its place among those of the step. Until its last rank has arrived, the others wait; from then on
bytes move. Sends and receives between two ranks have no such split.

Waiting beside kernels that compute costs a rank nothing, so only what is exposed counts. A slow
rank is the one that waits least, and not one that arrives last because another made it wait: in a
step of all ranks, time that is not waiting is the rank's own.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tracepage.causes import waits
from tracepage.causes.host_time import copy_cause
from tracepage.causes.wait_words import share
from tracepage.causes.waits import Part
from tracepage.errors import UsageError
from tracepage.readers import chrome_trace, kernel_names
from tracepage.readers.trace import busy
from tracepage.terminal import format_time

import numpy
import pandas
from typing_extensions import TypedDict

SAME_START_NS = 60 * 10**9  # Ranks of one job begin to record within this time.
LEAST = 0.05  # A share of the step, from which a slow rank or the network is named.
POINT_TO_POINT = re.compile(r"send_?recv|^send|^recv|^coalesced|^batch_isend", re.IGNORECASE)
KERNEL = re.compile(r"nccl\w*?_(AllReduce|AllGather|ReduceScatter|Broadcast|Reduce|SendRecv)")
KEY = ["step", "group", "name", "number", "place"]
TIMES = ["start_ns", "end_ns"]
COLUMNS = [*KEY, *TIMES]


class RankSteps(NamedTuple):
    """One rank's mean step. `collectives` has COLUMNS, and `computing` the start and end of each
    stretch in which the GPU computes, on the clock of the trace.
    """

    path: Path
    device: str
    size: int  # Ranks of the job; 0 where the trace does not tell.
    origin: int
    steps: int
    step_ms: float
    computing_ms: float
    exposed_ms: float  # Collectives beside which nothing computes.
    sends_ms: float  # The same of sends and receives between two ranks.
    hidden_ms: float  # Communication beside computing.
    parts: list[Part]
    collectives: pandas.DataFrame
    computing: numpy.ndarray


class Verdict(TypedDict):
    """`cause`: `rank` (a slow one, by its number), `network`, `sends`, `turns`, or `none`."""

    cause: str
    rank: int | None
    ms: float
    gain: float
    sentence: str


class Job(NamedTuple):
    """All ranks on one clock.

    `collectives` has a row for each collective on each rank: KEY, rank, start_ns, end_ns, last (the
    rank that arrived last), arrived_ns (when it did), wait_ns and transfer_ns. `waiting_ms` is the
    exposed part of a mean step, by rank, and `clocks` what is added to a rank's times.
    """

    ranks: Mapping[int, RankSteps]
    collectives: pandas.DataFrame
    clocks: Mapping[int, float]
    waiting_ms: Mapping[int, float]
    notes: list[str]

    def transfer_ms(self, rank: int) -> float:
        """The exposed part in which bytes move."""
        return self.ranks[rank].exposed_ms - self.waiting_ms[rank]


def read_rank(path: Path) -> RankSteps:
    """UsageError: no kernels of a GPU in it."""
    trace = chrome_trace.load(path)
    causes = waits.attribute(trace)
    if causes is None:
        raise UsageError(
            f"{path} has no kernels of a GPU, so it cannot stand beside other ranks: give it alone"
        )
    steps = len(trace.steps) or 1
    kernels = trace.kernels[trace.kernels.step >= 0] if len(trace.steps) else trace.kernels
    kernels = kernels.assign(end_ns=kernels.start_ns + kernels.duration_ns)
    communicates = kernels.name.map(kernel_names.kind) == "communication"
    copies = kernels.name.map(copy_cause).astype(bool) & (kernels.category != "kernel")
    calls = _communication(kernels[communicates])
    collectives = calls[~calls.name.astype(str).str.contains(POINT_TO_POINT)]
    computing = stretches(kernels[~communicates & ~copies][TIMES].to_numpy(float))
    exposed_ns = _exposed(computing, collectives[TIMES].to_numpy())
    communication_ns = _exposed(computing, calls[TIMES].to_numpy())
    return RankSteps(
        path,
        " and ".join(dict.fromkeys(str(gpu.get("name", "")) for gpu in trace.devices)),
        trace.job.get("world_size", 0),
        trace.origin,
        steps,
        causes.step_ms,
        _length(computing) / steps / 1e6,
        exposed_ns / steps / 1e6,
        (communication_ns - exposed_ns) / steps / 1e6,
        (_length(calls[TIMES]) - communication_ns) / steps / 1e6,
        causes.parts,
        collectives,
        computing,
    )


def _exposed(computing: numpy.ndarray, intervals: numpy.ndarray) -> int:
    """Time of the intervals beside which nothing computes, ns."""
    return _length(numpy.concatenate([computing, intervals])) - _length(computing)


def _length(intervals: Any) -> int:
    """Time that the intervals cover together, ns."""
    starts, ends = numpy.array(intervals, dtype=float).reshape(-1, 2).T
    return busy(starts, ends)


def stretches(intervals: numpy.ndarray, least_ns: int = 1) -> numpy.ndarray:
    """The intervals in order, those with less than `least_ns` between them as one."""
    if not len(intervals):
        return intervals
    starts, ends = intervals[numpy.argsort(intervals[:, 0], kind="stable")].T
    ends = numpy.maximum.accumulate(ends)
    apart = starts[1:] - ends[:-1] >= least_ns
    first = numpy.append(True, apart)
    last = numpy.append(apart, True)
    return numpy.stack([starts[first], ends[last]], axis=1)


def _communication(kernels: pandas.DataFrame) -> pandas.DataFrame:
    """Rows of COLUMNS; `number` is empty where none is told."""
    rows = []
    kernels = kernels.sort_values("start_ns")
    columns = (kernels[name] for name in ("step", "name", "collective", *TIMES))
    for step, kernel, told, start, end in zip(*columns, strict=True):
        match = KERNEL.search(kernel)
        by_name = match[1] if match else kernel_names.own_name(kernel)
        group, members, name, number = told or ("", "", "", "")
        place = (f"{group} {members}".strip(), name or by_name, number)
        rows.append((step, *place, 0, start, end))
    table = pandas.DataFrame(rows, columns=COLUMNS)
    return table.assign(place=table.groupby(KEY[:-1]).cumcount())


def compare(ranks: Mapping[int, RankSteps], notes: Sequence[str] = ()) -> Job:
    """`notes` are those on the files. UsageError: the traces are not of one job: they share no
    collectives, or were recorded at different times.
    """
    earliest, *_, latest = sorted(ranks.values(), key=lambda rank: rank.origin)
    apart_ns = latest.origin - earliest.origin
    if apart_ns > SAME_START_NS:
        raise UsageError(
            f"{earliest.path} and {latest.path} are of two jobs: they were recorded "
            f"{apart_ns / 1e9:,.0f} s apart"
        )
    tables = [rank.collectives.assign(rank=number) for number, rank in ranks.items()]
    table = pandas.concat(tables, ignore_index=True)
    table, left_out = _matched(table)
    notes = [*notes, *left_out]
    table, clocks = _aligned(ranks, table)
    calls = table.groupby(KEY)
    table["arrived_ns"] = calls.start_ns.transform("max")
    table["last"] = table["rank"][calls.start_ns.transform("idxmax")].to_numpy()
    arrived = table[["arrived_ns", "end_ns"]].min(axis=1)
    table["wait_ns"] = (arrived - table.start_ns).clip(lower=0)
    table["transfer_ns"] = table.end_ns - table.start_ns - table.wait_ns
    waiting_ms = {}
    for number, rank in ranks.items():
        calls_of_rank = table[table["rank"] == number]
        starts = calls_of_rank.start_ns - clocks[number]
        pieces = numpy.stack([starts, starts + calls_of_rank.wait_ns], axis=1)
        waiting_ns = _exposed(rank.computing, pieces)
        waiting_ms[number] = float(min(waiting_ns / rank.steps / 1e6, rank.exposed_ms))
    size = max(rank.size for rank in ranks.values())
    absent = [str(number) for number in range(size) if number not in ranks]
    if absent:
        notes.append(
            f"No trace of {len(absent)} of {size} ranks ({', '.join(absent[:8])}): the others may "
            "wait for them, which counts as transfer."
        )
    return Job(ranks, table, clocks, waiting_ms, notes)


def _matched(table: pandas.DataFrame) -> tuple[pandas.DataFrame, list[str]]:
    """The collectives that several ranks have, and a note on others.

    Without numbers those of a step count only if its ranks have equally many.
    """
    of_kind = table.assign(count=table.groupby([*KEY[:-1], "rank"]).place.transform("size"))
    unequal = of_kind.groupby(KEY[:-1])["count"].transform("nunique") > 1
    alone = table.groupby(KEY)["rank"].transform("size") < 2
    left_out = alone | unequal & (table.number == "")
    notes = []
    if left_out.any():
        notes.append(
            f"Not compared: {left_out.sum():,} collectives, of which other ranks have no "
            "counterpart, or another number in the step."
        )
    return table[~left_out].reset_index(drop=True), notes


def _aligned(
    ranks: Mapping[int, RankSteps], table: pandas.DataFrame
) -> tuple[pandas.DataFrame, dict[int, float]]:
    """The same on the clock of the first rank, and what was added to each rank's times."""
    ends = table.pivot(index=KEY, columns="rank", values="end_ns")
    clocks = {next(iter(ranks)): 0.0}
    for _ in ranks:
        for number in ranks.keys() - clocks.keys():
            if number not in ends:
                continue
            known = [ends[other] + clock for other, clock in clocks.items() if other in ends]
            shift = pandas.DataFrame(known).mean() - ends[number]
            if shift.notna().any():
                clocks[number] = float(shift.median())
    strangers = [ranks[number].path for number in ranks if number not in clocks]
    if strangers:
        first = next(iter(ranks.values()))
        raise UsageError(
            f"{strangers[0]} has no collective in common with {first.path}: "
            "give the traces of one job, of the same steps"
        )
    shifts = table["rank"].map(clocks)
    return table.assign(start_ns=table.start_ns + shifts, end_ns=table.end_ns + shifts), clocks


def verdict(job: Job) -> Verdict:
    """What limits the job: a slow rank, the network, ranks that are late in turns, or none of them.

    The slow rank waits less than the mean of the others by LEAST of the step.
    """
    count = len(job.ranks)
    step_ms = sum(rank.step_ms for rank in job.ranks.values()) / count
    slow = min(job.waiting_ms, key=lambda number: job.waiting_ms[number])
    others = [number for number in job.ranks if number != slow]
    waiting_ms = sum(job.waiting_ms[number] for number in others) / len(others)
    late_ms = waiting_ms - job.waiting_ms[slow]
    transfer_ms = sum(map(job.transfer_ms, job.ranks)) / count
    lost_ms = sum(job.waiting_ms.values()) / count
    sends_ms = sum(rank.sends_ms for rank in job.ranks.values()) / count
    least_ms = LEAST * step_ms
    if late_ms >= max(least_ms, transfer_ms):
        cause = "rank"
        ms = late_ms
        sentence = (
            f"Rank {slow} is slow: the others wait for it {_part_of(ms, step_ms)}. "
            f"{_more_of(job, slow, others)}"
        )
    elif sends_ms >= max(least_ms, transfer_ms, lost_ms):
        cause = "sends"
        ms = sends_ms
        sentence = (
            f"Sends and receives between two ranks take {_part_of(ms, step_ms)} that nothing "
            "hides. The traces do not tell whether they move bytes or wait, as the "
            "stages of a pipeline do."
        )
    elif transfer_ms >= max(least_ms, lost_ms):
        cause = "network"
        ms = transfer_ms
        complete = max(rank.size for rank in job.ranks.values()) <= count
        limits = "network limits" if complete else "network, or a rank without trace, limits"
        sentence = (
            f"The {limits} the job: {_part_of(ms, step_ms)} are transfers that nothing hides"
            f"{_longest_transfer(job)}. Let them run beside the backward pass, send less "
            "(bf16, larger batches), or shard within a host."
        )
    elif lost_ms >= least_ms:
        cause = "turns"
        ms = lost_ms
        sentence = (
            f"The ranks wait for each other in turns: {_part_of(ms, step_ms)}, and none is late "
            "more than the others. Even out their work (lengths of sequences, the loader), or "
            "synchronize less often."
        )
    else:
        cause = "none"
        ms = 0.0
        sentence = (
            "Neither a slow rank nor the network limits the job: of a step of "
            f"{format_time(step_ms)} a rank waits for others {_range(job.waiting_ms.values())} ms, "
            f"and transfers that nothing hides take {_range(map(job.transfer_ms, job.ranks))} ms. "
            "Make the page of one rank to see what limits it."
        )
    gain = float(step_ms / (step_ms - ms))
    if ms:
        sentence += f" Without it, {gain:.2f} times as fast."
    rank = slow if cause == "rank" else None
    return {"cause": cause, "rank": rank, "ms": ms, "gain": gain, "sentence": sentence}


def _part_of(ms: float, step_ms: float) -> str:
    return f"{format_time(ms)} of a step of {format_time(step_ms)} ({share(ms / step_ms)})"


def _range(times: Iterable[float]) -> str:
    """ "1.38 to 1.89", of two or more."""
    least, *_, most = sorted(times)
    return f"{round(least, 2):g} to {round(most, 2):g}"


def _more_of(job: Job, slow: int, others: list[int]) -> str:
    """On which part a rank spends more than the mean of the others."""
    parts = {number: _parts_of_its_own(rank) for number, rank in job.ranks.items()}
    times = pandas.DataFrame({number: parts[number].ms for number in parts}).fillna(0.0)
    more = times[slow] - times[others].mean(axis=1)
    name = str(more.idxmax())
    where = parts[slow]["where"][name]
    return f"It spends {format_time(more[name])} more than they do on {name} ({where})."


def _parts_of_its_own(rank: RankSteps) -> pandas.DataFrame:
    """The parts without communication, by kind or cause."""
    parts = pandas.DataFrame(rank.parts)
    names = parts.kind.where(parts.kind != "", parts.cause.str.replace("_", " "))
    return parts.set_index(names)[(parts.cause != "communication").to_numpy()]


def _longest_transfer(job: Job) -> str:
    """The kind of collective that moves bytes longest, in words."""
    sums = job.collectives.groupby("name").transfer_ns.sum()
    return f", most of them of {sums.idxmax()}" if len(sums) else ""


def kinds(job: Job) -> list[list[Any]]:
    """Rows for each kind of collective and process group, those waited for longest first: name,
    group, ranks, count in a step, ms of a transfer, ms of waiting in a step (a mean of the ranks),
    the rank waited for most, and its share of that waiting in %.
    """
    rows = []
    for (name, group), calls in job.collectives.groupby(["name", "group"]):
        members = calls["rank"].nunique()
        steps = job.ranks[int(calls["rank"].iloc[0])].steps
        caused = calls.groupby("last").wait_ns.sum()
        waited = calls.wait_ns.sum()
        last = f"rank {caused.idxmax()}" if waited else ""
        percent = 100 * caused.max() / waited if waited else 0.0
        count = len(calls) / members / steps
        waiting = waited / members / steps / 1e6
        transfer = calls.transfer_ns.mean() / 1e6
        times = [float(transfer), float(waiting)]
        rows.append([name, group, int(members), count, *times, last, float(percent)])
    return sorted(rows, key=lambda row: -row[5])
