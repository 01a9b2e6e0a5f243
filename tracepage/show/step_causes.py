"""Where a step goes, by cause: the verdict, its bar, its table, and its longest waits.

`waits` attributes the time of a GPU. A CPU works while operators run, and the rest of a step is
the host's.
"""

from collections import defaultdict
from typing import Any

from tracepage.causes import waits
from tracepage.causes.host_time import CAUSES, named_code
from tracepage.causes.wait_words import cure
from tracepage.causes.waits import Part, StepCauses, Verdict
from tracepage.readers import kernel_names
from tracepage.readers.source import Source
from tracepage.readers.trace import Trace
from tracepage.readers.trace_events import Event
from tracepage.show import tables
from tracepage.show.report import Report
from tracepage.terminal import shortened

import numpy
import pandas

LONGEST = 3  # waits that a page lists
SHOWN = 0.5  # % of a step, from which a part is in the bar
PLACE = 100  # characters of a place
OUTSIDE = "in no operator that works (views, autograd, Python)"
FUSE = "They are limited by bytes: fuse them (`torch.compile`)"
ADVICE = {
    "matrix products": "Use more threads, or bf16 on a CPU that multiplies it",
    "attention": "Attention is fused already: use more threads",
    "convolutions": "Use more threads, `channels_last`, or bf16 on a CPU that multiplies it",
    "communication": "Send fewer bytes; a rank that is late makes the others wait",
    "other": "No kind of work is known for these operators",
    **dict.fromkeys(("elementwise", "reductions", "copies"), FUSE),
}
# What limits a CPU by an annotation, and the host.
NAMED = {
    "input": "its input",
    "saving": "saving",
    "compilation": "compilation",
    "host": "the host",
}
UNEVEN = 2  # The longest step, in times of the shortest, from which a verdict tells both.


def attribute(source: Source) -> StepCauses:
    """The parts of a mean step, or of a whole file that has no steps; they add up to its time."""
    causes = waits.attribute(source) or _of_cpu(source)
    times = _step_ms(source)
    if times and max(times) >= UNEVEN * min(times):
        range_of_steps = " to ".join(map(tables.format_time, (min(times), max(times))))
        causes.verdict["sentence"] += f" Steps took {range_of_steps}: all is of their mean."
    return causes


def _step_ms(source: Source) -> list[float]:
    """Of each step; empty where the file marks none, or holds attention only."""
    if source.profile:
        only_attention = source.profile["attention_only"]
        return [] if only_attention else [us / 1e3 for us in source.profile["step_us"]]
    return [ns / 1e6 for ns in source.trace.step_ns()] if source.trace else []


def _of_cpu(source: Source) -> StepCauses:
    """Operators that work, by kind; the longest annotation that names a cause, with what is in it;
    and the rest.
    """
    steps = source.steps or 1
    table = source.table
    named = _longest_annotation(source)
    inside = numpy.zeros(len(table), dtype=bool)
    for event in named:
        inside |= table.time_ns.between(event.start, event.end).to_numpy()
    outside = table[~inside]
    sums = outside.groupby(outside.name.map(kernel_names.kind))[["duration_ns", "calls"]].sum()
    parts: list[Part] = []
    for kind, ns, calls in sums.itertuples():
        ms = ns / steps / 1e6
        parts.append({"cause": "work", "kind": kind, "ms": ms, "count": calls / steps, "where": ""})
    if named:
        cause = CAUSES[named_code(named[0])]
        ms = sum(event.duration for event in named) / steps / 1e6
        count = len(named) / steps
        where = named[0].name
        parts.append({"cause": cause, "kind": "", "ms": ms, "count": count, "where": where})
    added = sum(part["ms"] for part in parts)
    step_ms = added
    if source.steps:
        step_ms = sum(_step_ms(source)) / steps or added
    elif source.trace:
        step_ms = max(event.end for event in source.trace.host) / 1e6
    for part in parts:
        part["ms"] *= min(added, step_ms) / added  # Several threads run at the same time.
    parts.sort(key=lambda part: -part["ms"])
    verdict = _verdict(source, step_ms, parts)
    if step_ms > added:
        rest = step_ms - added
        parts.append({"cause": "host", "kind": "", "ms": rest, "count": 0, "where": OUTSIDE})
    gaps = pandas.DataFrame(columns=waits.GAP_COLUMNS)
    return StepCauses(step_ms, parts, verdict, gaps, bool(source.steps))


def _longest_annotation(source: Source) -> list[Event]:
    """The annotations of one name that take longest, of those that name a cause."""
    by_name: dict[str, list[Event]] = defaultdict(list)
    for event in source.trace.host if source.trace and not source.profile else ():
        counts = event.kind == "annotation" and (event.step >= 0 or not source.steps)
        if counts and CAUSES[named_code(event)] in NAMED:
            by_name[event.name].append(event)
    return max(by_name.values(), key=lambda events: sum(e.duration for e in events), default=[])


def _verdict(source: Source, step_ms: float, parts: list[Part]) -> Verdict:
    """What limits a CPU: its longest part, or what is outside of all if that takes longer."""
    if source.trace and any(map(_launches, source.trace.host)):
        sentence = (
            "The file has launches of a GPU and none of its kernels, so it does not tell what "
            "limits the step: profile with activities of the CPU and the GPU."
        )
        return {"cause": "unknown", "ms": 0.0, "gain": 1.0, "sentence": sentence}
    whole = "step" if source.steps else "recorded time"
    if source.profile and source.profile["attention_only"]:
        whole = "attention"
    rest = step_ms - sum(part["ms"] for part in parts)
    longest = parts[0]
    cause = longest["cause"] if longest["ms"] >= rest else "host"
    ms = max(longest["ms"], rest)
    if cause == "work":
        beside = f", {_share(rest, step_ms)} {OUTSIDE}" if rest > 0 else ""
        sentence = (
            f"Limited by the CPU's work: {_share(ms, step_ms)} of the {whole} is "
            f"{label(longest)}{beside}. {ADVICE[longest['kind']]}."
        )
        return {"cause": cause, "ms": ms, "gain": 1.0, "sentence": sentence}
    place = OUTSIDE if cause == "host" else f"in {longest['where']}"
    advice = "Give each operator more work (a larger batch)."
    if cause != "host":
        advice = cure(cause, longest["where"])
    gain = step_ms / (step_ms - ms) if ms < step_ms else 1.0
    sentence = (
        f"Limited by {NAMED[cause]}: {_share(ms, step_ms)} of the {whole} is {place}. Without it, "
        f"at most {gain:.2f} times as fast. {advice}"
    )
    return {"cause": cause, "ms": ms, "gain": gain, "sentence": sentence}


def _launches(event: Event) -> bool:
    return event.kind == "launch" and "Launch" in event.name


def _share(ms: float, whole_ms: float) -> str:
    return f"{100 * ms / whole_ms:.0f} % ({tables.format_time(ms)})"


def label(part: Part) -> str:
    """The name of a part: a kind of work, or a cause."""
    name = part["kind"] or part["cause"].replace("_", " ")
    return "other work" if name == "other" else name


def add_sections(page: Report, causes: StepCauses, trace: Trace | None = None) -> None:
    """Adds the verdict, the bar, the table and the longest waits."""
    page.verdict(causes.verdict["sentence"])
    shares = []
    for part in sorted(causes.parts, key=lambda part: (part["cause"] != "work", -part["ms"])):
        share = 100 * part["ms"] / (causes.step_ms or 1)
        name = label(part)
        if share >= SHOWN:
            text = f"{name} {tables.format_time(part['ms'])}, {share:.0f} %"
            shares.append((name, share, text))
    page.bar(shares)
    page.section("Where the step goes" if causes.of_steps else "Where the time goes")
    page.table(*rows(causes))
    moments = longest_waits(causes, trace) if trace else []
    if moments:
        page.moments("The longest waits:", moments)


def rows(causes: StepCauses) -> tables.Table:
    """Header and a row for each part, the longest first."""
    body: list[list[Any]] = []
    for part in sorted(causes.parts, key=lambda part: -part["ms"]):
        share = 100 * part["ms"] / (causes.step_ms or 1)
        place = shortened(part["where"], PLACE)
        body.append([label(part), part["ms"], share, part["count"] or None, place])
    if not causes.of_steps:
        return ["cause", "ms", "% of time", "number", "where"], body
    return ["cause", "ms", "% of step", "per step", "where"], body


def longest_waits(causes: StepCauses, trace: Trace) -> list[tuple[str, int, int]]:
    """The longest waits of the verdict's cause, or of all where the device works: a text with
    duration, place and the step of its longest piece, and start and end in ns.
    """
    gaps = causes.gaps
    cause = causes.verdict["cause"]
    if cause != "work":
        gaps = gaps[gaps.cause == cause]
    if gaps.empty:
        return []
    # Most of a wait can lie in the step after the one in which it begins.
    gaps = gaps.sort_values("duration_ns", ascending=False)
    ends = gaps.start_ns + gaps.duration_ns
    gaps = gaps.assign(end_ns=ends, middle_ns=(gaps.start_ns + ends) / 2)
    starts = [start for start, _ in trace.step_times()]
    rows = waits.single_waits(gaps).agg(
        start_ns=("start_ns", "min"),
        end_ns=("end_ns", "max"),
        middle_ns=("middle_ns", "first"),
        ns=("duration_ns", "sum"),
        cause=("cause", "first"),
        where=("where", "first"),
    )
    moments = []
    for wait in rows.nlargest(LONGEST, "ns").itertuples():
        number = sum(start <= wait.middle_ns for start in starts)
        place = f" in step {number}" if starts else ""
        text = f"{tables.format_time(wait.ns / 1e6)}{place}: {wait_name(wait)}"
        moments.append((text, int(wait.start_ns), int(wait.end_ns)))
    return moments


def wait_name(gap: Any) -> str:
    """Cause and place of a row of `StepCauses.gaps`."""
    name = gap.cause.replace("_", " ")
    return f"{name}, {shortened(gap.where, PLACE)}" if gap.where else name


def add_changes(page: Report, first: StepCauses, second: StepCauses) -> None:
    """Adds how much each cause takes of a step on both sides, if any changed, the largest change
    first.
    """
    body = changes(first, second)
    if any(change for *_, change in body):
        page.section("Where the step goes" if first.of_steps else "Where the time goes")
        page.table(["cause", "ms in 1", "ms in 2", "change ms"], body)


def changes(first: StepCauses, second: StepCauses) -> list[list[Any]]:
    """Rows of a part's name, its ms on both sides and their difference; the last is the whole."""
    times: dict[str, list[float]] = {}
    for number, side in enumerate((first, second)):
        for part in side.parts:
            times.setdefault(label(part), [0.0, 0.0])[number] += part["ms"]
    body: list[list[Any]] = []
    for name, (before, after) in times.items():
        body.append([name, before, after, after - before])
    body.sort(key=lambda row: -abs(row[3]))
    whole = "the step" if first.of_steps else "all"
    return [*body, [whole, first.step_ms, second.step_ms, second.step_ms - first.step_ms]]
