"""Where the time of a profiled step goes, and why the GPU waits.

Each moment of the profiled steps belongs to one cause, so the parts add up to the step.

- A moment in which kernels run is `work`, of the first of KINDS that runs. A kernel whose grid has
  fewer blocks than FILLED of the multiprocessors is of the kind SMALL. Where only collectives run
  it is `communication`, and where only copies between host and device run, a copy by its
  direction. Copies of `aten::item` and the like are part of the synchronization.
- A moment in which nothing runs is part of a gap. It belongs to what the host did (`host_time`)
  until it began the launch of the kernel that ends the gap, and from there on to `launches`. Once
  that launch is over, the host is not late: the GPU itself passes from one kernel to the next
  (`work`, BETWEEN, as do all gaps in a captured graph). If that takes QUEUED_NS, the kernel waits
  for something that the trace does not tell.
- Many copies to the host in a row and a host that is in no operator between or after them are
  `saving`.

A wait of the host costs more than the gap around it. While the device still works, the host that
waits loses its lead, and later the queue runs dry between short kernels, which a host that is
ahead would have queued before. Without the wait, the host would be ahead by as long as it waited
beside a busy device. So each such time is a debt: gaps of launches after it count for the
wait until they have used it up, the last wait first. A synchronization that did not really wait has
no debt, and launches remain the cause. What the host does beside a busy device costs nothing by
itself.

A gain is step / (step - part). Removing a cause can reveal another wait, and it can hide others:
a host that no longer waits may be ahead of the device in the rest of the step, too. So the verdict
also names the time without any gap. The profiler adds time to each operator and launch, so
undisturbed steps wait less for the host.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from tracepage.causes import wait_words
from tracepage.causes.host_time import (
    CAUSES,
    CODES,
    LAUNCHES,
    LEAST_NS,
    NODE,
    OF_ONE_VALUE,
    HostTime,
    Stacks,
    copy_cause,
    host_time,
    numbered,
    own_line,
)
from tracepage.causes.wait_words import share
from tracepage.readers import kernel_names
from tracepage.readers.source import OTHER_TRACE, SERIALIZED_NOTE, Source
from tracepage.readers.trace import Trace
from tracepage.records.step_profile import Profile
from tracepage.terminal import counted, format_time

import numpy
import pandas
from typing_extensions import TypedDict

GAP_COLUMNS = ("start_ns", "duration_ns", "cause", "operator", "span", "line", "where")
SMALL = "small grids"
BETWEEN = "between kernels"
KINDS = (
    "matrix products",
    "attention",
    "convolutions",
    "elementwise",
    "reductions",
    "copies",
    "other",
    SMALL,
)
# What runs on the device, the first that does; codes of causes stand beside those of work.
ON_DEVICE = (
    *KINDS,
    "communication",
    "copy_to_device",
    "copy_to_host",
    "synchronization",
    "saving",
)
IDLE = -1
WORK = CODES["work"]
UNKNOWN = CODES["unknown"]
NO_HOST = "the file has no events of the host"
# The last place is that of IDLE.
DEVICE_CODES = numpy.array([*(CODES.get(kind, WORK) for kind in ON_DEVICE), WORK])
COPIES = [CODES["copy_to_device"], CODES["copy_to_host"]]
# What may be part of saving.
OF_SAVING = [CODES[cause] for cause in ("copy_to_host", "synchronization", "host", "launches")]
FILLED = 0.5  # A share of the multiprocessors.
AT_ONCE_US = 20  # A mean; a kernel that was in a queue starts later after its launch.
QUEUED_NS = 50_000  # A launched kernel starts sooner after its launch and the kernel before it.
SAVED_COPIES = 8
LONELY = 4  # Saving writes files, while another use of copies calls operators.
HASH = re.compile(r" \w{40,}")  # In the names of compiled graphs.
REMOVABLE = 0.1  # A share of the step.
LEAST_REST = 1e-6  # A share of the step: less is an error of rounding.
MIB = 2**20
# Causes that run on the device themselves: the gaps beside them are their small part.
RUNNING = ("copy_to_device", "copy_to_host", "communication")


class Part(TypedDict):
    """One cause, in a mean step; `work` has a part for each kind."""

    cause: str
    kind: str  # Of `work`: one of KINDS or BETWEEN; else empty.
    ms: float
    count: float  # Kernels, waits or gaps.
    where: str


class Verdict(TypedDict):
    """The largest removable part, or `work` where none is REMOVABLE; `unknown`, of 0 ms, in a
    file without a timeline.
    """

    cause: str
    ms: float
    gain: float  # So many times as fast, if it alone were gone.
    sentence: str


class StepCauses(NamedTuple):
    """The parts of a mean step, or of a file that marks none, add up to `step_ms`. `gaps` has
    GAP_COLUMNS and a row for each piece of a gap that has one cause, in order, and for copies and
    collectives that run alone; gaps BETWEEN kernels are left out.
    """

    step_ms: float
    parts: list[Part]
    verdict: Verdict
    gaps: pandas.DataFrame
    of_steps: bool = True


def attribute(source: Source | Trace) -> StepCauses | None:
    """The causes of a mean step, or of the whole time where a file marks no steps; None where no
    GPU works.
    """
    if isinstance(source, Trace):
        return _of_trace(source) if len(source.kernels) else None
    if source.trace is not None:
        return attribute(source.trace)
    if source.are_operators or source.kind == OTHER_TRACE:
        return None
    return _of_table(source)


class Moments(NamedTuple):
    """Moments of the steps in which nothing changes, in order; each is of one gap and one cause."""

    starts: numpy.ndarray
    lengths: numpy.ndarray
    causes: numpy.ndarray  # Codes.
    # Rows of `Trace.host`; -2 less the first place of a piece of the host's time in no event.
    culprits: numpy.ndarray
    gaps: numpy.ndarray  # Numbers of the gaps; -1 where the device works.
    kinds: numpy.ndarray  # Places in ON_DEVICE, or IDLE.


def _of_trace(trace: Trace) -> StepCauses:
    kernels = trace.kernels.sort_values("start_ns", kind="stable").reset_index(drop=True)
    ends = kernels.start_ns + kernels.duration_ns
    times = trace.step_times() or [(kernels.start_ns.min(), ends.max())]
    windows = numpy.array(times, dtype=float)
    stacks = Stacks(trace.frames)
    host = host_time(trace, stacks)
    kernels["kind"] = _kinds(trace, kernels, host.codes)
    moments = _moments(trace, kernels, host, windows)
    moments = _pay_debts(_mark_saving(trace, kernels, moments))
    waits = _waits(trace, kernels, moments, host, stacks)
    ran = kernels[(kernels.start_ns < windows.max()) & (ends > windows.min())]
    parts = _parts(ran, moments, waits[waits.gap >= 0], len(windows))
    step_ms = (windows[:, 1] - windows[:, 0]).mean() / 1e6
    steps = len(trace.steps)
    has_operators = not trace.operators.empty
    verdict = _verdict(step_ms, parts, waits, steps, trace.gpus, has_operators)
    if verdict["cause"] in wait_words.SLOWED:
        launches = ran.launch[ran.launch >= 0].nunique() / len(windows)
        verdict["sentence"] += wait_words.OF_PROFILER.format(launches)
    before_ms = windows.min() / 1e6
    if not steps and before_ms >= REMOVABLE * step_ms:
        before = format_time(before_ms)
        verdict["sentence"] += f" The {before} before the first kernel are not counted."
    return StepCauses(step_ms, parts, verdict, waits, steps > 0)


def _kinds(trace: Trace, kernels: pandas.DataFrame, event_codes: numpy.ndarray) -> numpy.ndarray:
    """Places in ON_DEVICE."""
    kinds = _kinds_of_names(kernels)
    least = FILLED * max((gpu.get("multiprocessors", 0) for gpu in trace.devices), default=0)
    small = (kernels.blocks > 0) & (kernels.blocks < least)
    kinds[small & (kinds < len(KINDS))] = KINDS.index(SMALL)
    launched = kernels.launch.to_numpy()
    waited = numpy.append(event_codes, 0)[launched] == CODES["synchronization"]
    kinds[waited & (kinds > len(KINDS))] = ON_DEVICE.index("synchronization")
    return kinds


def _kinds_of_names(table: pandas.DataFrame) -> numpy.ndarray:
    """Places in ON_DEVICE, of calls with a name and a category."""
    by_name = {}
    names = table[["name", "category"]].drop_duplicates()
    for name, category in names.itertuples(index=False):
        kind = kernel_names.kind(name)
        if category != "kernel":
            kind = copy_cause(name) or "copies"
        by_name[name] = ON_DEVICE.index(kind)
    return table.name.map(by_name).to_numpy(int, copy=True)


def _device(kernels: pandas.DataFrame) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Times, and from each to the next the first of ON_DEVICE that runs, or IDLE."""
    starts = kernels.start_ns.to_numpy(float)
    ends = starts + kernels.duration_ns.to_numpy(float)
    times = numpy.unique(numpy.concatenate([[-numpy.inf], starts, ends]))
    runs = numpy.full(len(times), IDLE)
    for kind in range(len(ON_DEVICE))[::-1]:
        chosen = (kernels.kind == kind).to_numpy()
        begun = numpy.bincount(numpy.searchsorted(times, starts[chosen]), minlength=len(times))
        ended = numpy.bincount(numpy.searchsorted(times, ends[chosen]), minlength=len(times))
        runs[numpy.cumsum(begun - ended) > 0] = kind
    new = numpy.append(True, runs[1:] != runs[:-1])
    return times[new], runs[new]


def _moments(
    trace: Trace,
    kernels: pandas.DataFrame,
    host_time: HostTime,
    windows: numpy.ndarray,
) -> Moments:
    """The moments of the steps; in those beside a busy device the cause is what the host does."""
    host = host_time.intervals
    device_times, runs = _device(kernels)
    call_starts = numpy.array([event.start for event in trace.host] + [numpy.inf])
    call_ends = numpy.array([event.end for event in trace.host] + [numpy.inf])
    launch = kernels.launch.to_numpy()
    calls = (call_starts[launch], call_ends[launch])
    changes = (device_times, host.times, windows.ravel(), *calls)
    bounds = numpy.unique(numpy.concatenate(changes))
    bounds = bounds[(bounds >= windows.min()) & (bounds <= windows.max())]
    starts = bounds[:-1]
    lengths = numpy.diff(bounds)
    step = numpy.searchsorted(windows[:, 0], starts, side="right") - 1
    inside = starts < windows[step, 1]
    starts = starts[inside]
    lengths = lengths[inside]

    gaps = numpy.searchsorted(device_times, starts, side="right") - 1
    kinds = runs[gaps]
    place = host.at(starts)
    causes = host.codes[place]
    culprits = numpy.where(host.rows[place] < 0, -2 - host.pieces()[place], host.rows[place])

    gap_starts = device_times[gaps]
    gap_ends = numpy.append(device_times, numpy.inf)[gaps + 1]
    next_kernel = numpy.searchsorted(kernels.start_ns, gap_ends)
    last = next_kernel == len(kernels)
    # -1 is the infinite time at the end of both.
    call = numpy.append(launch, -1)[next_kernel]
    idle = kinds == IDLE
    late = idle & (starts >= call_starts[call])
    of_call = numpy.append(host_time.codes, LAUNCHES)[call]
    causes = numpy.where(late, numpy.where(of_call < 0, LAUNCHES, of_call), causes)
    owner = numpy.append(host_time.owners, -1)[call]
    owner = numpy.where(of_call < 0, call, owner)
    culprits = numpy.where(idle & ((causes == LAUNCHES) | late) & (call >= 0), owner, culprits)
    causes = numpy.where(idle & (call_ends[call] <= gap_starts), WORK, causes)
    launched = numpy.maximum(call_ends[call], gap_starts)
    stalled = idle & (starts >= launched) & (gap_ends >= launched + QUEUED_NS)
    causes = numpy.where(stalled, UNKNOWN, causes)
    culprits = numpy.where(stalled, call, culprits)
    not_told = idle & (call < 0) & ~last
    causes = numpy.where(not_told, UNKNOWN, causes)
    culprits = numpy.where(not_told, -1, culprits)
    culprits[~idle & (causes == LAUNCHES)] = -1
    gaps = numpy.where(idle, gaps, -1)
    return _joined(Moments(starts, lengths, causes, culprits, gaps, kinds))


def _joined(moments: Moments) -> Moments:
    """The same, with moments in a row that differ in nothing as one."""
    starts, lengths, *codes = moments
    _, first = numpy.unique(numbered(*codes), return_index=True)
    joined = numpy.add.reduceat(lengths, first)
    return Moments(starts[first], joined, *(code[first] for code in codes))


def _mark_saving(trace: Trace, kernels: pandas.DataFrame, moments: Moments) -> Moments:
    """The same, where a run of copies to the host and the gaps beside it are `saving`, if the host
    is in no operator there for half as long as the copies take, and for LONELY times as long as in
    operators; these kernels get that kind.
    """
    to_host = (kernels.kind > ON_DEVICE.index("copy_to_device")).to_numpy(copy=True)
    to_host &= kernels.name.map(copy_cause) == "copy_to_host"
    for place in numpy.flatnonzero(to_host):
        row = kernels.launch[place]
        operator = trace.host[row].operator if row >= 0 else None
        to_host[place] = not (operator and OF_ONE_VALUE.match(operator.name))
    causes = moments.causes.copy()
    culprits = moments.culprits.copy()
    kinds = moments.kinds.copy()
    kernel_ends = kernels.start_ns + kernels.duration_ns
    changes = numpy.flatnonzero(numpy.diff(to_host, prepend=False, append=False))
    for copy, after in changes.reshape(-1, 2):
        if after - copy < SAVED_COPIES:
            continue
        call = kernels.launch[copy]
        begin = kernel_ends[copy - 1] if copy else 0
        if call >= 0:
            begin = min(begin, trace.host[call].start)
        end = kernels.start_ns[after] if after < len(kernels) else numpy.inf
        inside = slice(*numpy.searchsorted(moments.starts, (begin, end)))
        lengths = moments.lengths[inside]
        copying = kinds[inside] > ON_DEVICE.index("copy_to_device")
        idle = kinds[inside] == IDLE
        working = idle & numpy.isin(causes[inside], [CODES["host"], CODES["cpu_operators"]])
        in_operators = culprits[inside] >= 0
        alone = lengths[working & ~in_operators].sum()
        most = LONELY * lengths[working & in_operators].sum()
        if alone > max(lengths[copying].sum() / 2, most, LEAST_NS):
            of_saving = numpy.isin(causes[inside], OF_SAVING)
            causes[inside][of_saving] = CODES["saving"]
            culprits[inside][of_saving] = call
            kinds[inside][copying] = ON_DEVICE.index("saving")
            kernels.loc[copy : after - 1, "kind"] = ON_DEVICE.index("saving")
    return moments._replace(causes=causes, culprits=culprits, kinds=kinds)


def _pay_debts(moments: Moments) -> Moments:
    """The same, where gaps of launches belong to the waits before them that they follow from."""
    idle = moments.kinds == IDLE
    on_device = DEVICE_CODES[moments.kinds]
    copies = numpy.isin(on_device, COPIES)
    saving = moments.causes == CODES["saving"]
    owed = moments.causes.copy()
    waits = ~idle & (owed != LAUNCHES)
    owed[waits & copies & ~saving] = on_device[waits & copies & ~saving]
    owed[waits & ~copies & numpy.isin(owed, COPIES)] = CODES["synchronization"]
    launches = idle & (moments.causes == LAUNCHES)
    chosen = numpy.flatnonzero(waits | launches)
    columns = (moments.starts, moments.lengths, owed, moments.culprits, moments.gaps)
    # The number of the gap after a moment that is beside a busy device.
    following = numpy.append(moments.gaps[1:], -1)
    table = zip(*(column[chosen].tolist() for column in (*columns, following)), strict=True)
    debts: list[list[Any]] = []  # Length, cause and culprit.
    drained: tuple = (-1, 0, 0)  # Gap, cause and culprit: the device ran out of work in this wait.
    pieces: list[tuple] = []
    for start, length, cause, culprit, gap, next_gap in table:
        if gap < 0:
            debts.append([length, cause, culprit])
            drained = (next_gap, cause, culprit)
            continue
        while length > 0 and debts:
            debt = debts[-1]
            paid = min(length, debt[0])
            pieces.append((start, paid, debt[1], debt[2], gap, IDLE))
            debt[0] -= paid
            start += paid
            length -= paid
            if debt[0] <= 0:
                debts.pop()
        if length > 0:
            follows = drained if drained[0] == gap else (gap, cause, culprit)
            pieces.append((start, length, *follows[1:], gap, IDLE))
    new = numpy.array(pieces).reshape(-1, len(Moments._fields)).T
    joined = [
        numpy.append(column[~launches], more) for column, more in zip(moments, new, strict=True)
    ]
    order = numpy.argsort(joined[0], kind="stable")
    starts, lengths, *codes = (column[order] for column in joined)
    return Moments(starts, lengths, *(column.astype(int) for column in codes))


def _waits(
    trace: Trace,
    kernels: pandas.DataFrame,
    moments: Moments,
    host: HostTime,
    stacks: Stacks,
) -> pandas.DataFrame:
    """Rows of GAP_COLUMNS, and the culprit and the number of the gap of each, or -1 where copies or
    collectives run.
    """
    on_device = DEVICE_CODES[moments.kinds]
    alone = (moments.gaps < 0) & (on_device != WORK)
    codes = numpy.where(alone, on_device, moments.causes)
    # The host may do anything beside a copy, so the call that launched it is its place.
    last = numpy.searchsorted(kernels.start_ns, moments.starts, side="right") - 1
    of_device = alone & numpy.isin(codes, [CODES[cause] for cause in RUNNING])
    culprits = numpy.where(of_device, kernels.launch.to_numpy()[last], moments.culprits)
    waits = alone | ((moments.gaps >= 0) & (codes != WORK))
    moments = moments._replace(causes=codes, culprits=culprits)
    pieces = _joined(Moments(*(column[waits] for column in moments)))
    causes = [CAUSES[code] for code in pieces.causes]
    places = list(zip(causes, pieces.culprits.tolist(), strict=True))
    words = {}
    for cause, culprit in dict.fromkeys(places):
        if culprit >= 0:
            words[cause, culprit] = _place_of_event(trace, host, stacks, cause, culprit)
        else:
            words[cause, culprit] = _place_of_piece(trace, host, stacks, cause, -2 - culprit)
    table = pandas.DataFrame([words[place] for place in places], columns=GAP_COLUMNS[3:])
    table.insert(0, "cause", causes)
    table.insert(0, "duration_ns", pieces.lengths)
    table.insert(0, "start_ns", pieces.starts)
    return table.assign(culprit=pieces.culprits, gap=pieces.gaps)


def _place_of_event(
    trace: Trace, host: HostTime, stacks: Stacks, cause: str, row: int
) -> tuple[str, str, str, str]:
    """Operator, span, line and words of what an event of the host is in."""
    event = trace.host[row]
    operator = event if event.kind == "operator" else event.operator
    names = []
    while operator:
        if not operator.name.startswith(NODE):
            names.append(operator.name)
        operator = operator.operator
    inner = names[0] if names else ""
    outer = names[-1] if names else ""
    name = inner if cause == "launches" else outer
    span = _span(trace, event.span or "", host.spans[row])
    line = own_line(stacks.names(event.start, event.end, event.thread))
    words = name or event.name
    if cause == "unknown":
        words = f"before a kernel that {words} had launched"
    if cause in ("allocation", "compilation") and event.name != words:
        words = f"{event.name} in {words}"
    return name, span, line, _where(words, span, line)


def _place_of_piece(
    trace: Trace, host: HostTime, stacks: Stacks, cause: str, first: int
) -> tuple[str, str, str, str]:
    """The same of a piece of the host's time that is in no event, from its first place on."""
    times, codes, rows, spans = host.intervals
    if first < 0 or cause == "unknown":
        return "", "", "", "the trace does not tell"
    last = first
    while last < len(times) and (codes[last], rows[last]) == (codes[first], -1):
        last += 1
    start = max(times[first], 0)
    end = times[min(last, len(times) - 1)]
    span = _span(trace, "", spans[host.intervals.at((start + end) / 2)])
    line = own_line(stacks.names(start, end))
    before = trace.host[rows[first - 1]].name if rows[first - 1] >= 0 else "the start"
    after = trace.host[rows[last]].name if last < len(rows) and rows[last] >= 0 else "the end"
    words = f"between {before} and {after}"
    if trace.steps.start_ns.between(start, (start + end) / 2).any():
        words = f"at the start of the step, before {after}"
    return "", span, line, _where(words, span, line)


def _span(trace: Trace, span: str, annotation: int) -> str:
    """The span of the model, or the annotation around it."""
    if span in ("", "other"):
        span = trace.host[annotation].name if annotation >= 0 else ""
    return HASH.sub("", span)


def _where(words: str, span: str, line: str) -> str:
    if span and span not in words:
        words += f", in {span}"
    return f"{words}, at {line}" if line else words


def _parts(
    kernels: pandas.DataFrame, moments: Moments, gaps: pandas.DataFrame, steps: int
) -> list[Part]:
    """The parts of a mean step, the longest first."""
    works = moments.gaps < 0
    ns = numpy.bincount(moments.kinds[works], moments.lengths[works], len(ON_DEVICE))
    parts = _device_parts(kernels.assign(calls=1), ns, steps)
    between = ~works & (moments.causes == WORK)
    if between.any():
        ms = moments.lengths[between].sum() / steps / 1e6
        count = len(numpy.unique(moments.gaps[between])) / steps
        where = "the next kernel had been launched"
        parts["work", BETWEEN] = _part("work", BETWEEN, ms, count, where)
    for cause in gaps.cause.unique():
        rows = gaps[gaps.cause == cause]
        count = single_waits(rows).ngroups / steps
        ms = rows.duration_ns.sum() / steps / 1e6
        where = _longest(rows["where"], rows.duration_ns)
        if cause == "launches":
            names = rows.span.where(rows.span != "", rows["where"])
            times = rows.duration_ns.groupby(names).sum() / steps / 1e6
            number = rows.gap[names == times.idxmax()].nunique() / steps
            where = f"{number:,.0f} of them ({format_time(times.max())}) in {times.idxmax()}"
            if kernels.graph.notna().any():
                where += " beside graphs"
        part = parts.get((cause, ""))
        if part:
            ms += part["ms"]
            rows = kernels[kernels.kind == ON_DEVICE.index(cause)]
            size, ns = rows[["bytes", "duration_ns"]].sum() / steps
            if size > MIB:
                where += f", {size / MIB:,.0f} MiB in {format_time(ns / 1e6)}"
                where += f" ({size / ns:.3g} GB/s)"
            if cause != "saving":
                count = max(count, part["count"])
        parts[cause, ""] = _part(cause, "", ms, count, where)
    return sorted(parts.values(), key=lambda part: -part["ms"])


def _device_parts(
    calls: pandas.DataFrame, ns: numpy.ndarray, steps: int
) -> dict[tuple[str, str], Part]:
    """The parts of the time in which something runs, by cause and kind."""
    parts = {}
    for place, kind in enumerate(ON_DEVICE):
        if not ns[place]:
            continue
        cause, kind = (kind, "") if kind in CODES else ("work", kind)
        rows = calls[calls.kind == place]
        where = _longest(rows.name, rows.duration_ns, kernel_names.short_name)
        count = rows.calls.sum() / steps
        parts[cause, kind] = _part(cause, kind, ns[place] / steps / 1e6, count, where)
    return parts


def _part(cause: str, kind: str, ms: float, count: float, where: str) -> Part:
    return {"cause": cause, "kind": kind, "ms": float(ms), "count": float(count), "where": where}


def _longest(
    names: pandas.Series, durations: pandas.Series, shorten: Callable[[str], str] = str
) -> str:
    """The name that takes longest, and its share."""
    times = durations.groupby(names).sum()
    return f"{shorten(str(times.idxmax()))} ({share(times.max() / times.sum())})"


def single_waits(gaps: pandas.DataFrame) -> Any:
    """Rows by the wait of one cause that they belong to; each gap of launches is one."""
    by_gap = gaps.cause.isin(("launches", "unknown"))
    return gaps.groupby([gaps.cause, gaps.culprit.where(~by_gap, gaps.gap)])


def _verdict(
    step_ms: float,
    parts: list[Part],
    waits: pandas.DataFrame,
    steps: int | None,
    gpus: int,
    has_operators: bool,
) -> Verdict:
    """The largest part that can be removed, and what people do about it. `waits` are those of all
    `steps`, or of a file that marks none, in which all `gpus` wait.
    """
    time = format_time(step_ms)
    whole = f"a step of {time}" if steps else f"the {time} in the file"
    least = REMOVABLE * step_ms
    large = [part for part in parts if part["cause"] != "work" and part["ms"] >= least]
    if not large:
        return _work_verdict(whole, step_ms, parts, gpus)
    part, *others = large
    cause = part["cause"]
    ms = part["ms"]
    count = part["count"]
    rest_ms = step_ms - ms
    gain = step_ms / rest_ms if rest_ms > LEAST_REST * step_ms else 1.0
    subject = wait_words.subject(cause, has_operators)
    sentence = f"{subject}: {format_time(ms)} of {whole} ({share(ms / step_ms)})"
    if count >= 1:
        sentence += f", in {counted(round(count), 'wait')}"
        sentence += " a step" if steps else ""
    sentence += f": {part['where']}."
    chosen = waits[waits.cause == cause]
    if len(chosen):
        longest = single_waits(chosen).duration_ns.sum().nlargest(3) / 1e6
        times = ", ".join(map(format_time, longest))
        sentence += f" The longest took {times}."
    bounds = f"{format_time(rest_ms)} ({gain:.2f} times as fast)"
    if gain == 1:
        bounds = "nothing is left that takes time"
    others_gaps = waits[(waits.cause != cause) & (waits.gap >= 0)]
    least_ms = rest_ms - others_gaps.duration_ns.sum() / (steps or 1) / 1e6
    if least_ms < (1 - REMOVABLE) * rest_ms:
        bounds = f"between {format_time(least_ms)} (the host always ahead) and {bounds}"
    sentence += f" Without it: {bounds}. {wait_words.cure(cause, part['where'])}"
    if others:
        sentence += f" Next: {_times(others)}."
    return {"cause": cause, "ms": ms, "gain": gain, "sentence": sentence}


def _times(parts: list[Part]) -> str:
    """Causes with their times."""
    return ", ".join(
        f"{part['cause'].replace('_', ' ')} {format_time(part['ms'])}" for part in parts
    )


def _work_verdict(whole: str, step_ms: float, parts: list[Part], gpus: int) -> Verdict:
    work = [part for part in parts if part["cause"] == "work"]
    waits = [part for part in parts if part["cause"] != "work"]
    ms = sum(part["ms"] for part in work)
    worker = "The GPU" if gpus < 2 else f"At least one of {gpus} GPUs"
    rest = "the file shows no wait that is worth removing"
    if gpus > 1:
        rest = "a wait of one GPU beside another that works is not counted"
    elif step_ms - ms >= REMOVABLE * step_ms:
        rest = f"no cause of waiting takes {share(REMOVABLE)} alone: {_times(waits)}"
    sentence = (
        f"{worker} works for {share(ms / step_ms)} of {whole} (with gaps between queued kernels), "
        f"and {rest}. {_largest(work, step_ms)}"
    )
    return {"cause": "work", "ms": ms, "gain": 1.0, "sentence": sentence}


def _sums_verdict(step_ms: float, parts: list[Part]) -> Verdict:
    """Of a file with the times of kernels and without a timeline."""
    sentence = (
        "The file has no timeline, so it tells neither whether the GPU waits nor what runs at "
        "once: for that, record a trace (torch.profiler, or `rocprofv3 --kernel-trace`). "
        f"{_largest(parts, step_ms)}"
    )
    return {"cause": "unknown", "ms": 0.0, "gain": 1.0, "sentence": sentence}


def _largest(parts: list[Part], whole_ms: float) -> str:
    """The two largest parts, the first ones, and what people do about them."""
    kinds = []
    cures = []
    for part in parts[:2]:
        name = part["kind"] or part["cause"].replace("_", " ")
        of_whole = share(part["ms"] / whole_ms)
        kinds.append(f"{name} {format_time(part['ms'])} ({of_whole}): {part['where']}")
        cures.append(wait_words.cure(part["kind"] or part["cause"], part["where"]))
    return (
        "The largest kinds of work, with their longest kernels: "
        f"{'; '.join(kinds)}. {' '.join(cures)}"
    )


def _of_table(source: Source) -> StepCauses:
    """Kinds of work, and gaps of which the file tells no cause."""
    calls = source.table.assign(kind=_kinds_of_names(source.table))
    steps = source.steps or 1
    gaps = pandas.DataFrame(columns=[*GAP_COLUMNS, "culprit", "gap"])
    profile = source.profile
    whole_steps = profile is not None and not profile["attention_only"]
    in_time = calls.start_ns.notna().all() and SERIALIZED_NOTE not in source.notes
    if in_time:
        times, runs = _device(calls)
        lengths = numpy.diff(times)[1:]
        runs = runs[1:-1]
        ns = numpy.bincount(runs[runs >= 0], lengths[runs >= 0], len(ON_DEVICE))
        whole_ns = lengths.sum()
        idle = runs == IDLE
        starts = times[1:-1][idle]
        gaps = gaps.assign(start_ns=starts, duration_ns=lengths[idle], gap=starts, culprit=-1)
        gaps = gaps.assign(cause="unknown", operator="", span="", line="", where=NO_HOST)
    else:
        ns = numpy.bincount(calls.kind, calls.duration_ns, len(ON_DEVICE)).astype(float)
        whole_ns = ns.sum()
        if profile and whole_steps:
            _count_once(ns, 1e3 * profile["device_busy_us"])
            whole_ns = 1e3 * sum(profile["step_us"])
    parts = list(_device_parts(calls, ns, steps).values())
    idle_ms = (whole_ns - ns.sum()) / steps / 1e6
    launches_ms = _launches_of_profile(profile, idle_ms) if profile else 0
    if profile and launches_ms > 0:
        delay = f"kernels start {profile['launch']['mean_delay_us']:.0f} us after their launches"
        count = profile["launch"]["count"] / steps
        parts.append(_part("launches", "", launches_ms, count, delay))
        idle_ms -= launches_ms
    if idle_ms > 0:
        where = "a profile holds sums: its trace tells more" if profile else NO_HOST
        parts.append(_part("unknown", "", idle_ms, len(gaps) / steps, where))
    parts.sort(key=lambda part: -part["ms"])
    step_ms = whole_ns / steps / 1e6
    if in_time or whole_steps:
        verdict = _verdict(step_ms, parts, gaps, source.steps, source.gpus, has_operators=False)
    else:
        verdict = _sums_verdict(step_ms, parts)
    return StepCauses(step_ms, parts, verdict, gaps, bool(source.steps))


def _count_once(ns: numpy.ndarray, busy_ns: float) -> None:
    """Scales times by ON_DEVICE to the time in which any of them runs. Copies and collectives count
    only as far as they surely run beside no kernel.
    """
    kernels = ns[: len(KINDS)]
    others = ns[len(KINDS) :]
    kernels *= min(1.0, busy_ns / (kernels.sum() or busy_ns))
    others *= max(0.0, busy_ns - kernels.sum()) / (others.sum() or 1.0)


def _launches_of_profile(profile: Profile, idle_ms: float) -> float:
    """ms of the idle time in which the host surely launched: it was in operators, and kernels
    start so soon after their launches that none was in the queue.
    """
    if profile["attention_only"] or profile["launch"]["mean_delay_us"] > AT_ONCE_US:
        return 0.0
    in_operators_us = sum(row["self_cpu_us"] for row in profile["operators"])
    outside_us = max(0.0, sum(profile["step_us"]) - in_operators_us)
    return max(0.0, idle_ms - outside_us / profile["profiled_steps"] / 1e3)
