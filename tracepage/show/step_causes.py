"""Where a step goes, by cause: the verdict, its bar, its table, and its longest waits.

`waits` attributes the time of a GPU. A CPU works while operators run, and the rest of a step is
the host's.
"""

from typing import Any

from tracepage.causes import waits
from tracepage.causes.waits import Part, StepCauses, Verdict
from tracepage.readers import kernel_names
from tracepage.readers.source import Source
from tracepage.readers.trace import Trace
from tracepage.show import tables
from tracepage.show.report import Report
from tracepage.terminal import shortened

import pandas

LONGEST = 3  # waits that a page lists
SHOWN = 0.5  # % of a step, from which a part is in the bar
PLACE = 100  # characters of a place
OUTSIDE = "in no operator that works (views, autograd, Python)"
ADVICE = {
    "matrix products": "Use more threads, or bf16 on a CPU that multiplies it",
    "attention": "Use `scaled_dot_product_attention`, which keeps its scores out of memory",
}
FUSE = "They are limited by bytes: fuse them (`torch.compile`)"


def attribute(source: Source) -> StepCauses:
    """The parts of a mean step, or of a whole file that has no steps; they add up to its time."""
    return waits.attribute(source) or _of_cpu(source)


def _of_cpu(source: Source) -> StepCauses:
    """Operators that work, by kind, and the rest."""
    steps = source.steps or 1
    table = source.table
    sums = table.groupby(table.name.map(kernel_names.kind))[["duration_ns", "calls"]].sum()
    sums = sums.sort_values("duration_ns", ascending=False)
    added = sums.duration_ns.sum() / steps / 1e6
    step_ms = added
    if source.trace and source.steps:
        step_ms = sum(source.trace.step_ns()) / steps / 1e6
    elif source.profile and not source.profile["attention_only"]:
        step_ms = sum(source.profile["step_us"]) / steps / 1e3
    busy = min(added, step_ms) / added  # Operators of several threads run at the same time.
    parts: list[Part] = []
    for kind, ns, calls in sums.itertuples():
        ms = ns / steps / 1e6 * busy
        parts.append({"cause": "work", "kind": kind, "ms": ms, "count": calls / steps, "where": ""})
    verdict = _verdict(source, step_ms, parts)
    if step_ms > added:
        rest = step_ms - added
        parts.append({"cause": "host", "kind": "", "ms": rest, "count": 0, "where": OUTSIDE})
    return StepCauses(step_ms, parts, verdict, pandas.DataFrame(columns=waits.GAP_COLUMNS))


def _verdict(source: Source, step_ms: float, parts: list[Part]) -> Verdict:
    """What limits a CPU: its longest kind of operators, or what is outside of all if that takes
    longer.
    """
    whole = "step" if source.steps else "recorded time"
    if source.profile and source.profile["attention_only"]:
        whole = "attention"
    rest = step_ms - sum(part["ms"] for part in parts)
    longest = parts[0]
    if rest > longest["ms"]:
        gain = step_ms / (step_ms - rest)
        sentence = (
            f"Limited by the host: {_share(rest, step_ms)} of the {whole} is {OUTSIDE}. Without "
            f"it, at most {gain:.2f} times as fast. Give each operator more work (a larger batch)."
        )
        return {"cause": "host", "ms": rest, "gain": gain, "sentence": sentence}
    beside = f", {_share(rest, step_ms)} {OUTSIDE}" if rest > 0 else ""
    sentence = (
        f"Limited by the CPU's work: {_share(longest['ms'], step_ms)} of the {whole} is "
        f"{longest['kind']}{beside}. {ADVICE.get(longest['kind'], FUSE)}."
    )
    return {"cause": "work", "ms": longest["ms"], "gain": 1.0, "sentence": sentence}


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
    page.section("Where the step goes")
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
        page.section("Where the step goes")
        page.table(["cause", "ms in 1", "ms in 2", "change ms"], body)


def changes(first: StepCauses, second: StepCauses) -> list[list[Any]]:
    """Rows of a part's name, its ms on both sides and their difference; the last is the step."""
    times: dict[str, list[float]] = {}
    for number, side in enumerate((first, second)):
        for part in side.parts:
            times.setdefault(label(part), [0.0, 0.0])[number] += part["ms"]
    body: list[list[Any]] = []
    for name, (before, after) in times.items():
        body.append([name, before, after, after - before])
    body.sort(key=lambda row: -abs(row[3]))
    return [*body, ["the step", first.step_ms, second.step_ms, second.step_ms - first.step_ms]]
