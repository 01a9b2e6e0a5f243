"""The launches that a fused version saves: two profiled runs, counted per training step.

Two profiles (profile_*.json) are best: they know for each kernel the span and phase that launched it. Other sources of
`common.analysis.reports.launches` are compared by name only. On a CPU, which launches no kernels, operator calls that do work are
counted.

Names are grouped into kinds of work (`kernel_names.kind`). A library picks another kernel for another shape, so where one larger
product replaces three smaller ones, names are gone and new, and the kinds show that there are two matrix products fewer.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.analysis.formulas import operators
from common.analysis.output import plots, run_facts, tables
from common.analysis.output.report import Report
from common.analysis.profiles import kernel_names, kernel_table, load_kernels
from common.analysis.reports import launches
from common.errors import UsageError
from common.records import run_record, step_profile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# `table` is total, kind, span or name; `detail` the phase of a span or the kind of a name. Per step where the sources know steps.
CSV_COLUMNS = (
    "table", "name", "detail", "calls_before", "calls_after", "calls_difference", "us_before", "us_after", "us_difference",
)  # fmt: skip

SAME_WORK = "a library picks another kernel for another shape, so names that are gone and new can do the same work: see the kinds"
NO_SPANS = "torch.compile leaves no spans in what it compiles: that work is under `other`"
UNKNOWN = "one of the files does not say what it ran on, so device, shapes and precision were not compared"
TOTALS = "these sources do not know training steps: counts are of whole files and compare only if both runs had as many steps"


class Difference(NamedTuple):
    """Calls and time before and after, per step if the Reduction is; a run of its own has 0 on the other side."""

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


class Reduction(NamedTuple):
    """The differences between the launches of two runs. In all lists the largest change in calls comes first."""

    conditions: list[str]  # on what both ran, and the two files
    counted: str  # `kernels` or `operator calls`
    per_step: bool  # whether numbers are per training step; else they are sums over the files
    by_span: list[Difference]  # by span and phase; empty unless both sources are profiles
    by_name: list[Difference]  # by kernel or operator, names in full
    notes: list[str]  # what to know before reading the numbers

    @property
    def by_kind(self) -> list[Difference]:
        """A row per kind of work."""
        return grouped(self.by_name, lambda row: (row.detail, ""))

    @property
    def total(self) -> Difference:
        """The sum of all rows of any of the lists."""
        return grouped(self.by_name, lambda _: ("all", ""))[0]

    @property
    def what(self) -> str:
        """`counted`, with its unit: per step, or in the whole file."""
        return f"{self.counted} {'per step' if self.per_step else 'in the whole file'}"


def analyze(baseline: Path, fused: Path, top: int) -> Report:
    """Compares two runs; the report has tables (the `top` first names), a figure, and a CSV with all names in full.

    Raises:
        UsageError: the two cannot be compared.
    """
    reduction = compare(baseline, fused)
    unit, factor = _time_unit(reduction)
    numbers = ["calls before", "after", "change", f"{unit} before", "after", "change"]

    def body(rows: Iterable[Difference], *labels: str) -> list[list[Any]]:
        return [[*(getattr(row, label) for label in labels), *row.numbers(factor)] for row in rows]

    report = Report("Kernel reduction")
    report.text(*reduction.conditions, headline(reduction))
    report.figure(lambda: figure(reduction), "kernel_reduction", "Calls and time before and after, by kind of work and by span")
    what, total = reduction.what, reduction.total
    report.table(["kind", *numbers], body([*reduction.by_kind, total], "name"), f"{what}, by kind of work")
    if reduction.by_span:
        report.table(
            ["span", "phase", *numbers], body([*reduction.by_span, total], "name", "detail"), f"{what}, by span and phase"
        )
    short = [row._replace(name=kernel_names.short_name(row.name)) for row in reduction.by_name]
    changed = [row for row in short if row.change != "same"]
    by_time = sorted(short, key=lambda row: -abs(row.us_difference))
    header = [reduction.counted.removesuffix(" calls").removesuffix("s"), "kind", "status", *numbers]
    for measure, rows in (("calls", changed), ("time", by_time)):
        title = f"{what}, largest changes in {measure} ({min(top, len(rows))} of {len(rows)})"
        report.table(header, body(rows[:top], "name", "detail", "change"), title, code=header[:1])
    report.text(*(f"Note: {note}." for note in reduction.notes))
    groups = {"total": [total], "kind": reduction.by_kind, "span": reduction.by_span, "name": reduction.by_name}
    rows = ([table, row.name, row.detail, *row.numbers()] for table, rows in groups.items() for row in rows)
    report.csv("kernel_reduction", CSV_COLUMNS, rows)
    return report


def compare(baseline: Path, fused: Path) -> Reduction:
    """Compares the newest profiles of two folders, or other sources of `launches.load`; each can also be a file.

    Raises:
        UsageError: there is nothing to read, or the two cannot be compared; names the reason.
    """
    before, after = _load(baseline), _load(fused)
    if before.path.samefile(after.path):
        raise UsageError(f"{before.path} was given twice: give the profiles of two runs")
    counted, other = ("operator calls" if each.are_operators else "kernels" for each in (before, after))
    if counted != other:
        raise UsageError(f"{before.path} counts {counted} and {after.path} {other}: profile both on the same device")
    if bool(before.steps) != bool(after.steps):
        without = after.path if before.steps else before.path
        raise UsageError(f"only one of the two counts per step, {without} does not: take both with the same profiler")
    profiles = [step_profile.read(each.path) if each.source == "profile" else None for each in (before, after)]
    conditions, by_span, notes = [], [], list(dict.fromkeys([*before.notes, *after.notes]))
    if all(profiles):
        settings = [run_record.conditions(each["run"]) | {"attention only": each["attention_only"]} for each in profiles]
        run_record.require_equal((before.path, after.path), settings, "the version")
        conditions = [run_facts.describe(profiles[0]["run"])]
        by_span = _differences(*(_spans(*each) for each in zip(profiles, (before, after), strict=True)))
    else:
        notes += [UNKNOWN] if before.steps else [UNKNOWN, TOTALS]
    notes += [SAME_WORK] if counted == "kernels" else []
    names = (operator["name"] for profile in profiles if profile for operator in profile["operators"])
    notes += [NO_SPANS] if any(name.startswith(operators.COMPILER_FRAMES) for name in names) else []
    conditions += [f"before: {_source(before, profiles[0])}", f"after: {_source(after, profiles[1])}"]
    return Reduction(conditions, counted, bool(before.steps), by_span, _differences(_names(before), _names(after)), notes)


# ------------------------------------------------------------------------------------------------------------- adding up

Calls = Iterable[tuple[str, str, float, float]]  # name, detail, calls and us


def _load(path: Path) -> kernel_table.Kernels:
    """A file, or the newest profile of a folder, or what `launches.load` takes where the folder has none."""
    profiles = load_kernels.find(path).get("profile") if path.is_dir() else None
    return load_kernels.load(profiles[0] if profiles else path)


def _source(found: kernel_table.Kernels, profile: dict[str, Any] | None) -> str:
    """The run or the profiler that wrote the file, its path, and how many steps are in it."""
    origin = f"{profile['run']['version']}, `{profile['run']['command']}`" if profile else found.source
    return f"{origin}, {found.path}" + (f", steps: {found.steps}" if found.steps else "")


def _names(found: kernel_table.Kernels) -> Calls:
    """By name and kind, per step where the source knows steps."""
    steps = found.steps or 1
    for row in launches.summary(found):
        yield row.name, kernel_names.kind(row.name), row.calls / steps, row.total_ns / 1e3 / steps


def _spans(profile: dict[str, Any], found: kernel_table.Kernels) -> Calls:
    """By span and phase, per step, of the rows that `found`, read from the same profile, counts."""
    if found.are_operators:
        names = set(found.table.name)
        return [(row.span, row.phase, row.calls, row.us) for row in operators.rows(profile) if row.works and row.name in names]
    steps = profile["profiled_steps"]
    return [(row["span"], row["phase"], row["calls"] / steps, row["device_us"] / steps) for row in profile["kernels"]]


def _differences(before: Calls, after: Calls) -> list[Difference]:
    """A row for each name and detail in either."""
    rows = [Difference(*labels, calls, 0, us, 0) for *labels, calls, us in before]
    rows += [Difference(*labels, 0, calls, 0, us) for *labels, calls, us in after]
    return grouped(rows, lambda row: (row.name, row.detail))


def grouped(rows: Iterable[Difference], labels: Callable[[Difference], tuple[str, str]]) -> list[Difference]:
    """The sums of the rows with the same name and detail by `labels`, the largest change in calls first, then in time."""
    sums: dict[tuple[str, str], Sequence[float]] = defaultdict(lambda: (0.0,) * 4)
    for row in rows:
        sums[labels(row)] = [added + value for added, value in zip(sums[labels(row)], row[2:], strict=True)]
    found = [Difference(*names, *numbers) for names, numbers in sums.items()]
    return sorted(found, key=lambda row: (-abs(row.calls_difference), -abs(row.us_difference)))


# --------------------------------------------------------------------------------------------------------------- showing


def _time_unit(reduction: Reduction) -> tuple[str, float]:
    """The unit of all times, and how many of it a us is."""
    unit, factor = tables.time_unit(max(reduction.total.us_before, reduction.total.us_after) / 1e3)
    return unit, factor / 1e3


def headline(reduction: Reduction) -> str:
    """The totals in a paragraph."""
    total, changes = reduction.total, [row.change for row in reduction.by_name]
    calls = f"{tables.format_number(total.calls_before)} to {tables.format_number(total.calls_after)}"
    times = f"{tables.format_time(total.us_before / 1e3)} to {tables.format_time(total.us_after / 1e3)}"
    share = 100 * total.calls_difference / total.calls_before
    change = f"{abs(share):.1f} % {'fewer' if share < 0 else 'more'}" if share else "as many"
    return (
        f"{calls} {reduction.what}: {change}. Their time: {times}. Names: {len(changes)}, gone {changes.count('gone')}, new "
        f"{changes.count('new')}, with fewer calls {changes.count('fewer')}, with more {changes.count('more')}."
    )


def figure(reduction: Reduction) -> "Figure":
    """Calls (left) and time (right) before and after: by kind of work above, by span below where spans are known."""
    unit, factor = _time_unit(reduction)
    spans = grouped(reduction.by_span, lambda row: (row.name, ""))
    groups = [rows for rows in (reduction.by_kind, spans) if rows]
    heights = [0.6 + 0.32 * len(rows) for rows in groups]
    result = plots.new(6.4, 0.6 + sum(heights))
    panels = result.subplots(len(groups), 2, squeeze=False, sharey="row", height_ratios=heights)
    where = reduction.what.removeprefix(reduction.counted)
    for rows, (calls, times) in zip(groups, panels, strict=True):
        numbers = [row.numbers(factor) for row in rows]
        for axes, first, label in ((calls, 0, reduction.what), (times, 3, f"{unit}{where}")):
            for i, (name, colour) in enumerate((("before", plots.BLUE), ("after", plots.ORANGE))):
                places = [place - 0.2 + 0.4 * i for place in range(len(rows))]
                axes.barh(places, [row[first + i] for row in numbers], 0.4, color=colour, label=name)
            axes.set_yticks(range(len(rows)), [row.name for row in rows])
            axes.set_xlabel(label)
        calls.invert_yaxis()
    result.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return result
