"""The launches that a fused version saves: two profiled runs, counted per training step.

Two profiles (profile_*.json) are best: they know for each kernel the span and phase that launched it. Files of other profilers
(`load_kernels`) are compared by name only. On a CPU, which launches no kernels, operator calls that do work are counted.

Names are grouped into kinds of work (`kernel_names.kind`). A library picks another kernel for another shape, so where one larger
product replaces three smaller ones, names are gone and new, and the kinds show that there are two matrix products fewer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from common.analysis.formulas import operators
from common.analysis.output import plots, run_facts, tables
from common.analysis.output.report import Report
from common.analysis.profiles import kernel_names, load_kernels
from common.analysis.profiles.kernel_table import Kernels
from common.errors import UsageError
from common.records import run_record, step_profile
from common.records.step_profile import Profile
from common.span_names import FORWARD_SPANS

import pandas
from matplotlib.figure import Figure

# `table` is total, kind, span or name; `detail` the phase of a span or the kind of a name. Per step where the sources know steps.
CSV_COLUMNS = (
    "table", "name", "detail", "calls_before", "calls_after", "calls_difference", "us_before", "us_after", "us_difference",
)  # fmt: skip

NUMBERS = ["calls_before", "calls_after", "us_before", "us_after"]
SAME_WORK = "a library picks another kernel for another shape, so names that are gone and new can do the same work: see the kinds"
NO_SPANS = "torch.compile leaves no spans in what it compiles: that work is under `other`"
UNKNOWN = "one of the files does not say what it ran on, so device, shapes and precision were not compared"
TOTALS = "these sources do not know training steps: counts are of whole files and compare only if both runs had as many steps"


class Difference(NamedTuple):
    """Calls and time before and after; what only one of the runs launches has 0 on the other side."""

    name: str  # of a kind, a span, or a kernel or operator
    detail: str  # the phase of a span, the kind of a name, else empty
    calls_before: float
    calls_after: float
    us_before: float
    us_after: float

    @property
    def calls_difference(self) -> float:
        return self.calls_after - self.calls_before

    @property
    def us_difference(self) -> float:
        return self.us_after - self.us_before

    @property
    def change(self) -> str:
        if not self.calls_after or not self.calls_before:
            return "gone" if self.calls_before else "new"
        return "fewer" if self.calls_difference < 0 else "more" if self.calls_difference else "same"

    def numbers(self, factor: float = 1.0) -> tuple[float, ...]:
        """The last six columns of the CSV, the times multiplied by `factor`."""
        times = self.us_before, self.us_after, self.us_difference
        return self.calls_before, self.calls_after, self.calls_difference, *(factor * us for us in times)


@dataclass(frozen=True)
class Reduction:
    """The launches of two runs, per training step where both sources know steps, and else of the whole files."""

    paths: list[Path]
    conditions: list[str]  # on what both ran, and the two files
    counted: str  # `kernels` or `operator calls`
    per: str  # `per step` or `in the whole file`
    launches: pandas.DataFrame  # a row per name, kind, span and phase (empty where not known), with NUMBERS
    notes: list[str]  # sentences to read before the numbers

    def by(self, *labels: str) -> list[Difference]:
        """The sums over equal values of one or two columns, the largest change in calls first, then in time."""
        sums = self.launches.groupby(list(labels), sort=False)[NUMBERS].sum()
        found = [Difference(*(index if len(labels) > 1 else (index, "")), *row) for index, *row in sums.itertuples()]
        return sorted(found, key=lambda row: (-abs(row.calls_difference), -abs(row.us_difference)))

    @property
    def what(self) -> str:
        return f"{self.counted} {self.per}"

    @property
    def spans(self) -> list[Difference]:
        """By span and phase; empty where the sources do not know them."""
        return self.by("span", "phase") if self.launches.span.any() else []

    @property
    def total(self) -> Difference:
        return Difference("all", "", *self.launches[NUMBERS].sum())


def compare(before: Path, after: Path, varied: Sequence[str] | None = ()) -> Reduction:
    """Compares two files, or the newest in two folders. `varied` names conditions that may differ, besides the version (None: all
    may, and a note names them).
    """
    found = [load_kernels.load(path) for path in (before, after)]
    paths = [each.path for each in found]
    if paths[0].samefile(paths[1]):
        raise UsageError(f"{paths[0]} was given twice: give the profiles of two runs")
    counted, other = ("operator calls" if each.are_operators else "kernels" for each in found)
    if counted != other:
        raise UsageError(f"{paths[0]} counts {counted} and {paths[1]} {other}: profile both on the same device")
    if bool(found[0].steps) != bool(found[1].steps):
        without = paths[1] if found[0].steps else paths[0]
        raise UsageError(f"only one of the two counts per step, {without} does not: take both with the same profiler")
    profiles = [step_profile.read(each.path) if each.source == "profile" else None for each in found]
    conditions, notes = [], [*found[0].notes, *(note for note in found[1].notes if note not in found[0].notes)]
    if profiles[0] and profiles[1]:
        notes += _different(paths, [profiles[0], profiles[1]], varied)
        conditions.append(run_facts.describe(profiles[0]["run"]))
    else:
        notes += [UNKNOWN] if found[0].steps else [UNKNOWN, TOTALS]
    notes += [SAME_WORK] if counted == "kernels" else []
    names = [operator["name"] for profile in profiles if profile for operator in profile["operators"]]
    notes += [NO_SPANS] if any(name.startswith(operators.COMPILER_FRAMES) for name in names) else []
    sides = [_launches(*side) for side in zip(("before", "after"), found, strict=True)]
    if not all(side.span.isin(FORWARD_SPANS).any() for side in sides):
        sides = [side.assign(span="", phase="") for side in sides]
    conditions += [_source(*side) for side in zip(("before", "after"), found, profiles, strict=True)]
    per, notes = "per step" if found[0].steps else "in the whole file", [f"{note[0].upper()}{note[1:]}." for note in notes]
    return Reduction(paths, conditions, counted, per, pandas.concat(sides).fillna(0.0), notes)


def _different(paths: Sequence[Path], profiles: Sequence[Profile], varied: Sequence[str] | None) -> list[str]:
    """Refuses profiles that cannot be compared; notes of what may differ where everything may."""
    settings = [
        run_record.conditions(each["run"]) | {"attention only": each["attention_only"]} | dict.fromkeys(varied or ())
        for each in profiles
    ]
    if varied is None:
        return [f"the two differ in {each}" for each in run_record.differences(settings[0], settings[1])]
    run_record.require_equal((paths[0], paths[1]), (settings[0], settings[1]), " and ".join(["the version", *varied]))
    return []


def _source(side: str, found: Kernels, profile: Profile | None) -> str:
    """The run or the profiler that wrote the file, its path, and how many steps are in it."""
    origin = f"{profile['run']['version']}, `{profile['run']['command']}`" if profile else found.source
    return f"{side}: {origin}, {found.path}" + (f", steps: {found.steps}" if found.steps else "")


def _launches(side: str, found: Kernels) -> pandas.DataFrame:
    """The rows of one side, with their kinds of work."""
    rows, steps = found.table[["name", "span", "phase"]], found.steps or 1
    sums = {f"calls_{side}": found.table.calls / steps, f"us_{side}": found.table.duration_ns / 1e3 / steps}
    return rows.assign(kind=[kernel_names.kind(name) for name in rows.name], **sums)


def add_section(report: Report, reduction: Reduction, stem: str, top: int) -> None:
    """Adds totals, a figure, and tables by kind of work, by span, and of the `top` names with the largest changes; a CSV file, of
    the same stem as the figure, has all names in full.
    """
    unit, factor = _time_unit(reduction)
    total, kinds, spans, names = [reduction.total], reduction.by("kind"), reduction.spans, reduction.by("name", "kind")

    def add(title: str, labels: dict[str, str], rows: Sequence[Difference]) -> None:
        """`labels`: the attribute of a row in each of the first columns."""
        header = [*labels, "calls before", "after", "change", f"{unit} before", "after", "change"]
        body = [[*(getattr(row, label) for label in labels.values()), *row.numbers(factor)] for row in rows]
        report.table(header, body, f"{reduction.what}, {title}", code=("operator", "kernel"))

    report.text(headline(reduction))
    report.figure(lambda: figure(reduction), stem, "Calls and time before and after, by kind of work")
    add("by kind of work", {"kind": "name"}, kinds + total)
    if spans:
        add("by span and phase", {"span": "name", "phase": "detail"}, spans + total)
    short = [row._replace(name=kernel_names.short_name(row.name)) for row in names]
    changed = [row for row in short if row.change != "same"]
    by_time = sorted(short, key=lambda row: -abs(row.us_difference))
    labels = {reduction.counted.removesuffix(" calls").removesuffix("s"): "name", "kind": "detail", "status": "change"}
    for measure, rows in (("calls", changed), ("time", by_time)):
        add(f"largest changes in {measure} ({min(top, len(rows))} of {len(rows)})", labels, rows[:top])
    report.text(*reduction.notes)
    groups = {"total": total, "kind": kinds, "span": spans, "name": names}
    every = [[table, row.name, row.detail, *row.numbers()] for table, rows in groups.items() for row in rows]
    report.csv(stem, CSV_COLUMNS, every)


def _time_unit(reduction: Reduction) -> tuple[str, float]:
    """The unit of all times, and how many of it a us is."""
    unit, factor = tables.time_unit(max(reduction.total.us_before, reduction.total.us_after) / 1e3)
    return unit, factor / 1e3


def headline(reduction: Reduction) -> str:
    """The totals in a paragraph."""
    total, changes = reduction.total, [row.change for row in reduction.by("name")]
    calls = f"{tables.format_number(total.calls_before)} to {tables.format_number(total.calls_after)}"
    times = f"{tables.format_time(total.us_before / 1e3)} to {tables.format_time(total.us_after / 1e3)}"
    share = 100 * total.calls_difference / total.calls_before
    change = f"{abs(share):.1f} % {'fewer' if share < 0 else 'more'}" if share else "as many"
    return (
        f"{calls} {reduction.what}: {change}. Their time: {times}. Names: {len(changes)}, gone {changes.count('gone')}, new "
        f"{changes.count('new')}, with fewer calls {changes.count('fewer')}, with more {changes.count('more')}."
    )


def figure(reduction: Reduction) -> Figure:
    """Calls (left) and time (right) before and after, by kind of work."""
    (unit, factor), rows = _time_unit(reduction), reduction.by("kind")
    result = plots.new(6.4, 1.2 + 0.32 * len(rows))
    panels = result.subplots(1, 2, sharey=True)
    for axes, first, label in ((panels[0], 0, reduction.what), (panels[1], 3, f"{unit} {reduction.per}")):
        for i, (name, colour) in enumerate((("before", plots.BLUE), ("after", plots.ORANGE))):
            places = [place - 0.2 + 0.4 * i for place in range(len(rows))]
            axes.barh(places, [row.numbers(factor)[first + i] for row in rows], 0.4, color=colour, label=name)
        axes.set_yticks(range(len(rows)), [row.name for row in rows])
        axes.set_xlabel(label)
    panels[0].invert_yaxis()
    result.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return result
