"""The launches that a fused version saves: two profiled runs, counted per training step.

Two profiles (profile_*.json) are best: they know for each kernel the span that launched it. Files
of other profilers (`load_kernels`) are compared by name only. On a CPU, which launches no kernels,
operator calls that do work are counted.

Names are grouped into kinds of work (`kernel_names.kind`). A library picks another kernel for
another shape, so where one larger product replaces three smaller ones, names are gone and new, and
the kinds show that there are two matrix products fewer.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracepage.cost import operators
from tracepage.errors import UsageError
from tracepage.readers import kernel_names
from tracepage.readers.source import Source
from tracepage.records import run_record
from tracepage.records.step_profile import Profile, Profiled
from tracepage.show import run_facts, tables
from tracepage.show.report import Report
from tracepage.span_names import FORWARD_SPANS

import numpy
import pandas

NUMBERS = ["calls_before", "calls_after", "us_before", "us_after"]
SAME_WORK = (
    "A library picks another kernel for another shape, so names that are gone and new can do the "
    "same work: see the kinds."
)
NO_SPANS = "torch.compile leaves no spans in what it compiles: that work is under `other`."
UNKNOWN = "Shapes and precision were not compared: not both files say what they were."
NO_DEVICE = "Not both files name their device, so these were not compared."
TOTALS = (
    "These sources do not know training steps: counts are of whole files and compare only if both "
    "runs had as many steps."
)


@dataclass(frozen=True)
class Reduction:
    """The launches of two runs, per training step where both sources know steps, and else of the
    whole files.
    """

    paths: list[Path]
    conditions: list[str]  # What both ran on, and the two files.
    counted: str  # `kernels` or `operator calls`
    extent: str  # `per step` or `in the whole file`
    # A row per name, kind and span (empty where not known), with NUMBERS.
    launches: pandas.DataFrame
    notes: list[str]  # Sentences to read before the numbers.

    def by(self, *labels: str) -> pandas.DataFrame:
        """The sums over equal values of these columns, and `change` (gone, new, fewer, more or
        same), the largest change in calls first, then in time.
        """
        sums = self.launches.groupby(list(labels), as_index=False, sort=False)[NUMBERS].sum()
        before = sums.calls_before
        after = sums.calls_after
        cases = [after == 0, before == 0, before == after, after < before]
        sums["change"] = numpy.select(cases, ["gone", "new", "same", "fewer"], "more")
        more_us = (sums.us_after - sums.us_before).abs()
        return sums.loc[numpy.lexsort((-more_us, -(after - before).abs()))]


def compare_launches(before: Source, after: Source, may_differ: bool = False) -> Reduction:
    """Two sources side by side. Other conditions are refused, or noted if they may differ."""
    sources = (before, after)
    paths = [source.path for source in sources]
    if paths[0].samefile(paths[1]):
        raise UsageError(f"{paths[0]} was given twice: give the profiles of two runs")
    counted = require_one_measure(before, after)
    conditions = []
    notes = [f"{note[0].upper()}{note[1:]}." for note in dict.fromkeys(before.notes + after.notes)]
    profiles = [source.profile for source in sources if source.profile]
    if len(profiles) == 2:
        notes += _differences(before, after, may_differ)
        conditions.append(run_facts.describe(profiles[0]["run"]))
    else:
        notes += [*device_notes(before, after), UNKNOWN]
        if not before.steps:
            notes.append(TOTALS)
    if counted == "kernels":
        notes.append(SAME_WORK)
    names = [row["name"] for profile in profiles for row in profile["operators"]]
    if any(name.startswith(operators.COMPILER_FRAMES) for name in names):
        notes.append(NO_SPANS)
    sides = {"before": before, "after": after}
    launches = [_launches(side, source) for side, source in sides.items()]
    if not all(rows.span.isin(FORWARD_SPANS).any() for rows in launches):
        launches = [rows.assign(span="") for rows in launches]
    conditions += [f"{side}: {_origin(source)}" for side, source in sides.items()]
    extent = "per step" if before.steps else "in the whole file"
    return Reduction(paths, conditions, counted, extent, pandas.concat(launches).fillna(0.0), notes)


def require_one_measure(before: Source, after: Source) -> str:
    """What both count, `kernels` or `operator calls`. UsageError: only one does, or only one counts
    per step.
    """
    counted, other = (
        "operator calls" if side.are_operators else "kernels" for side in (before, after)
    )
    if counted != other:
        raise UsageError(
            f"{before.path} counts {counted} and {after.path} {other}: "
            "profile both on the same device"
        )
    if bool(before.steps) != bool(after.steps):
        without = after.path if before.steps else before.path
        raise UsageError(
            f"only one of the two counts per step, {without} does not: "
            "take both with the same profiler"
        )
    return counted


def conditions(profile: Profile | Profiled) -> dict[str, Any]:
    """The conditions that two profiles must share."""
    return run_record.conditions(profile["run"]) | {"attention only": profile["attention_only"]}


def device_notes(before: Source, after: Source) -> list[str]:
    """A warning where the two ran on different devices, or do not say."""
    if not before.device or not after.device:
        return [NO_DEVICE]
    if before.device == after.device:
        return []
    return [
        f"They ran on different devices, {before.device} and {after.device}: a change of a time "
        "can be that of the device."
    ]


def _differences(before: Source, after: Source, may_differ: bool) -> list[str]:
    """Refuses profiles that cannot be compared; notes of what differs where it may."""
    profiles = (before.profile, after.profile)
    ours, theirs = (conditions(profile) for profile in profiles if profile)
    if may_differ:
        differences = run_record.differences(ours, theirs)
        return [f"The two differ in {difference}." for difference in differences]
    run_record.require_equal((before.path, after.path), (ours, theirs), "the version")
    return []


def _origin(source: Source) -> str:
    origin = f"{source.kind}, {source.path}"
    if source.profile:
        run = source.profile["run"]
        origin = f"{run['version']}, `{run['command']}`, {source.path}"
    return f"{origin}, steps: {source.steps}" if source.steps else origin


def _launches(side: str, source: Source) -> pandas.DataFrame:
    """The rows of one side, with their kinds of work."""
    table = source.table
    steps = source.steps or 1
    return pandas.DataFrame(
        {
            "name": table.name,
            "span": table.span,
            "kind": table.name.map(kernel_names.kind),
            f"calls_{side}": table.calls / steps,
            f"us_{side}": table.duration_ns / 1e3 / steps,
        }
    )


def add_section(report: Report, reduction: Reduction, stem: str, top: int) -> None:
    """Adds totals, and tables by kind of work, by span, and of the `top` names with the largest
    changes; a CSV file has all names in full.
    """
    total = reduction.launches[NUMBERS].sum()
    counted = f"{reduction.counted} {reduction.extent}"
    names = reduction.by("name", "kind")
    unit, factor = tables.time_unit(max(total.us_before, total.us_after) / 1e3)

    def numbers(row) -> list[float]:
        calls = [row.calls_before, row.calls_after, row.calls_after - row.calls_before]
        return [*calls, row.us_before / 1e3 * factor, row.us_after / 1e3 * factor]

    header = ["calls before", "after", "change", f"{unit} before", "after"]
    report.text(headline(reduction))
    for label in ["kind", "span"] if reduction.launches.span.any() else ["kind"]:
        rows = [[row[1], *numbers(row)] for row in reduction.by(label).itertuples()]
        rows.append(["all", *numbers(total)])
        report.table([label, *header], rows, f"{counted}, by {label}")
    rows = [
        [kernel_names.short_name(str(row.name)), row.kind, row.change, *numbers(row)]
        for row in names[names.change != "same"].itertuples()
    ]
    label = "operator" if reduction.counted == "operator calls" else "kernel"
    title = f"{counted}, largest changes in calls"
    report.table([label, "kind", "status", *header], rows, title, code=[label], top=top)
    report.text(*reduction.notes)
    report.csv(stem, *tables.of_frame(names))


def headline(reduction: Reduction) -> str:
    """The totals in a paragraph."""
    total = reduction.launches[NUMBERS].sum()
    changes = list(reduction.by("name").change)
    before = tables.format_number(total.calls_before)
    after = tables.format_number(total.calls_after)
    time_before = tables.format_time(total.us_before / 1e3)
    time_after = tables.format_time(total.us_after / 1e3)
    share = 100 * (total.calls_after / total.calls_before - 1)
    change = f"{abs(share):.1f} % {'fewer' if share < 0 else 'more'}" if share else "as many"
    return (
        f"{before} to {after} {reduction.counted} {reduction.extent}: {change}. "
        f"Their time: {time_before} to {time_after}. "
        f"Names: {len(changes)}, gone {changes.count('gone')}, new {changes.count('new')}, "
        f"with fewer calls {changes.count('fewer')}, with more {changes.count('more')}."
    )
