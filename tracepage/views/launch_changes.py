"""The launches that a fused version saves: two profiled runs, counted per training step.

Two profiles (profile_*.json) are best: they know for each kernel the span that launched it. Files
of other profilers (`load_kernels`) are compared by name only. On a CPU, which launches no kernels,
operator calls that do work are counted.

Names are grouped into kinds of work (`kernel_names.kind`). A library picks another kernel for
another shape, so where one larger product replaces three smaller ones, names are gone and new, and
the kinds show that there are two matrix products fewer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tracepage.cost import operators
from tracepage.errors import UsageError
from tracepage.readers import kernel_names, load_kernels
from tracepage.readers.kernel_table import Kernels
from tracepage.records import run_record, step_profile
from tracepage.records.step_profile import Profile
from tracepage.show import run_facts, tables
from tracepage.show.report import Report
from tracepage.span_names import FORWARD_SPANS

import pandas

NUMBERS = ["calls_before", "calls_after", "us_before", "us_after"]
SAME_WORK = "A library picks another kernel for another shape, so names that are gone and new can do the same work: see the kinds."
NO_SPANS = "torch.compile leaves no spans in what it compiles: that work is under `other`."
UNKNOWN = "One of the files does not say what it ran on, so device, shapes and precision were not compared."
TOTALS = "These sources do not know training steps: counts are of whole files and compare only if both runs had as many steps."


@dataclass(frozen=True)
class Reduction:
    """The launches of two runs, per training step where both sources know steps, and else of the
    whole files.
    """

    paths: list[Path]
    conditions: list[str]  # on what both ran, and the two files
    counted: str  # `kernels` or `operator calls`
    what: str  # the same, with `per step` or `in the whole file`
    # a row per name, kind and span (empty where not known), with NUMBERS
    launches: pandas.DataFrame
    notes: list[str]  # sentences to read before the numbers

    def by(self, *labels: str) -> pandas.DataFrame:
        """The sums over equal values of these columns, and `change` (gone, new, fewer, more or
        same), the largest change in calls first, then in time.
        """
        sums = self.launches.groupby(list(labels), as_index=False, sort=False)[NUMBERS].sum()
        sums["change"] = [
            _change(*calls) for calls in zip(sums.calls_before, sums.calls_after, strict=True)
        ]
        changes = pandas.DataFrame(
            {
                "calls": (sums.calls_after - sums.calls_before).abs(),
                "us": (sums.us_after - sums.us_before).abs(),
            }
        )
        return sums.loc[changes.sort_values(["calls", "us"], ascending=False, kind="stable").index]


def _change(before: float, after: float) -> str:
    if not before or not after:
        return "gone" if before else "new"
    return "fewer" if after < before else "more" if after > before else "same"


def compare(before: Path, after: Path, may_differ: bool = False) -> Reduction:
    """Compares two files, or the newest in two folders. Profiles of other conditions are refused,
    or noted if they may differ.
    """
    found = [load_kernels.load(path) for path in (before, after)]
    paths = [each.path for each in found]
    if paths[0].samefile(paths[1]):
        raise UsageError(f"{paths[0]} was given twice: give the profiles of two runs")
    counted, other = ("operator calls" if each.are_operators else "kernels" for each in found)
    if counted != other:
        raise UsageError(
            f"{paths[0]} counts {counted} and {paths[1]} {other}: profile both on the same device"
        )
    if bool(found[0].steps) != bool(found[1].steps):
        without = paths[1] if found[0].steps else paths[0]
        raise UsageError(
            f"only one of the two counts per step, {without} does not: take both with the same profiler"
        )
    profiles = [
        step_profile.read(each.path) if each.source == "profile" else None for each in found
    ]
    conditions = []
    notes = [
        f"{note[0].upper()}{note[1:]}."
        for note in dict.fromkeys((*found[0].notes, *found[1].notes))
    ]
    if profiles[0] and profiles[1]:
        notes += _different(paths, [profiles[0], profiles[1]], may_differ)
        conditions.append(run_facts.describe(profiles[0]["run"]))
    else:
        notes += [UNKNOWN] if found[0].steps else [UNKNOWN, TOTALS]
    notes += [SAME_WORK] if counted == "kernels" else []
    names = [
        operator["name"] for profile in profiles if profile for operator in profile["operators"]
    ]
    notes += [NO_SPANS] if any(name.startswith(operators.COMPILER_FRAMES) for name in names) else []
    sides = [_launches(*side) for side in zip(("before", "after"), found, strict=True)]
    if not all(side.span.isin(FORWARD_SPANS).any() for side in sides):
        sides = [side.assign(span="") for side in sides]
    for side, each, profile in zip(("before", "after"), found, profiles, strict=True):
        origin = (
            f"{profile['run']['version']}, `{profile['run']['command']}`"
            if profile
            else each.source
        )
        conditions.append(
            f"{side}: {origin}, {each.path}" + (f", steps: {each.steps}" if each.steps else "")
        )
    what = f"{counted} {'per step' if found[0].steps else 'in the whole file'}"
    return Reduction(paths, conditions, counted, what, pandas.concat(sides).fillna(0.0), notes)


def _different(paths: Sequence[Path], profiles: Sequence[Profile], may_differ: bool) -> list[str]:
    """Refuses profiles that cannot be compared; notes of what differs where it may."""
    settings = [
        run_record.conditions(each["run"]) | {"attention only": each["attention_only"]}
        for each in profiles
    ]
    if may_differ:
        return [
            f"The two differ in {each}."
            for each in run_record.differences(settings[0], settings[1])
        ]
    run_record.require_equal((paths[0], paths[1]), (settings[0], settings[1]), "the version")
    return []


def _launches(side: str, found: Kernels) -> pandas.DataFrame:
    """The rows of one side, with their kinds of work."""
    rows = found.table[["name", "span"]]
    steps = found.steps or 1
    sums = {
        f"calls_{side}": found.table.calls / steps,
        f"us_{side}": found.table.duration_ns / 1e3 / steps,
    }
    return rows.assign(kind=[kernel_names.kind(name) for name in rows.name], **sums)


def add_section(report: Report, reduction: Reduction, stem: str, top: int) -> None:
    """Adds totals, and tables by kind of work, by span, and of the `top` names with the largest
    changes; a CSV file has all names in full.
    """
    total = reduction.launches[NUMBERS].sum()
    names = reduction.by("name", "kind")
    unit, factor = tables.time_unit(max(total.us_before, total.us_after) / 1e3)

    def numbers(row) -> list[float]:
        us = [row.us_before / 1e3 * factor, row.us_after / 1e3 * factor]
        return [row.calls_before, row.calls_after, row.calls_after - row.calls_before, *us]

    header = ["calls before", "after", "change", f"{unit} before", "after"]
    report.text(headline(reduction))
    for label in ["kind", "span"] if reduction.launches.span.any() else ["kind"]:
        rows = [[row[1], *numbers(row)] for row in reduction.by(label).itertuples()]
        report.table(
            [label, *header], [*rows, ["all", *numbers(total)]], f"{reduction.what}, by {label}"
        )
    changed = names[names.change != "same"]
    rows = [
        [kernel_names.short_name(str(row.name)), row.kind, row.change, *numbers(row)]
        for row in changed.head(top).itertuples()
    ]
    label = "operator" if reduction.counted == "operator calls" else "kernel"
    title = f"{reduction.what}, largest changes in calls ({len(rows)} of {len(changed)})"
    report.table([label, "kind", "status", *header], rows, title, code=[label])
    report.text(*reduction.notes)
    report.csv(stem, ["name", "kind", *NUMBERS, "change"], names.values.tolist())


def headline(reduction: Reduction) -> str:
    """The totals in a paragraph."""
    total = reduction.launches[NUMBERS].sum()
    changes = list(reduction.by("name").change)
    calls = (
        f"{tables.format_number(total.calls_before)} to {tables.format_number(total.calls_after)}"
    )
    times = (
        f"{tables.format_time(total.us_before / 1e3)} to {tables.format_time(total.us_after / 1e3)}"
    )
    share = 100 * (total.calls_after / total.calls_before - 1)
    change = f"{abs(share):.1f} % {'fewer' if share < 0 else 'more'}" if share else "as many"
    return (
        f"{calls} {reduction.what}: {change}. Their time: {times}. Names: {len(changes)}, gone {changes.count('gone')}, new "
        f"{changes.count('new')}, with fewer calls {changes.count('fewer')}, with more {changes.count('more')}."
    )
