"""What a fused version no longer launches: two profiled runs, counted per training step.

Best are two profiles (profile_*.json), which know for each kernel the span and phase that launched it. Of other sources of
`common.analysis.reports.launches` only names are compared. On a CPU, which launches no kernels, operator calls that do work are counted.

Names are grouped into kinds of work (`kernel_kinds`): a library picks another kernel for another shape, so where one larger
product replaces three smaller ones, names are gone and new, and the kinds say that there are two matrix products fewer.

Writes kernel_reduction.csv, .md and .png. Columns of the CSV: table (total, kind, span or name), name, detail (the phase of a
span, the kind of a name), and calls and us before, after and their difference; per step where the sources know steps.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.analysis.formulas import operators
from common.analysis.output import plots, tables
from common.analysis.profiles import kernel_names, kernel_table, load_kernels, run_record, step_profile
from common.analysis.profiles.kernel_names import kind
from common.analysis.reports import launches
from common.errors import UsageError
from common.files import writable_folder, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CSV_COLUMNS = (
    "table", "name", "detail", "calls_before", "calls_after", "calls_difference", "us_before", "us_after", "us_difference",
)  # fmt: skip

SAME_WORK = "a library picks another kernel for another shape, so names that are gone and new can do the same work: see the kinds"
NO_SPANS = "torch.compile leaves no spans in what it compiles: that work is under `other`"
UNKNOWN = "not both files say on what they ran: whether device, shapes and precision are the same is not checked"
TOTALS = "these sources do not know training steps: the counts are of whole files, alike only if both runs took as many steps"


class Row(NamedTuple):
    """Calls and time before and after; per step if the Reduction is."""

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


@dataclass(frozen=True)
class Reduction:
    """What differs between the launches of two runs. In all lists the largest change in calls comes first.

    Attributes:
        conditions: on what both ran, and the two files; a line each.
        counted: `kernels` or `operator calls`.
        per_step: whether figures are per training step; else they are sums over the files.
        by_span: a row per span and phase; empty unless both sources are profiles.
        by_kind: a row per kind of work.
        by_name: a row per kernel or operator, names in full.
        total: the sum of all rows of any of the lists.
        notes: what to know before reading the figures.
    """

    conditions: str
    counted: str
    per_step: bool
    by_span: list[Row]
    by_kind: list[Row]
    by_name: list[Row]
    total: Row
    notes: list[str]


def compare(baseline: Path, fused: Path) -> Reduction:
    """Compares the newest profiles of two folders, or other sources of `launches.load`; each can also be a file.

    Raises:
        UsageError: there is nothing to read, or the two cannot be compared; names the reason.
    """
    before, after = _load(baseline), _load(fused)
    if before.path.samefile(after.path):
        raise UsageError(f"{before.path} was given twice: give the profiles of two runs")
    counted, other = (_counted(each) for each in (before, after))
    if counted != other:
        raise UsageError(f"{before.path} counts {counted} and {after.path} {other}: profile both on the same device")
    if bool(before.steps) != bool(after.steps):
        without = after.path if before.steps else before.path
        raise UsageError(f"only one of the two counts per step, {without} does not: take both with the same profiler")
    profiles = [step_profile.read(each.path) if each.source == "profile" else None for each in (before, after)]
    conditions, by_span, notes = [], [], list(dict.fromkeys([*before.notes, *after.notes]))
    if all(profiles):
        _same_conditions(before.path, after.path, *profiles)
        conditions = [run_record.setting(profiles[0]["run"])]
        by_span = _rows(_spans(profiles[0], before), _spans(profiles[1], after))
    else:
        notes += [UNKNOWN] if before.steps else [UNKNOWN, TOTALS]
    notes += [SAME_WORK] if counted == "kernels" else []
    notes += [NO_SPANS] if any(profile and _compiled(profile) for profile in profiles) else []
    conditions += [f"before: {_described(before, profiles[0])}", f"after: {_described(after, profiles[1])}"]
    names = [_names(each) for each in (before, after)]
    kinds = [_added(((what, ""), *figures) for (_, what), figures in each.items()) for each in names]
    totals = [_added((("all", ""), *figures) for figures in each.values()) for each in names]
    return Reduction(
        conditions="\n".join(conditions), counted=counted, per_step=bool(before.steps), by_span=by_span,
        by_kind=_rows(*kinds), by_name=_rows(*names), total=_rows(*totals)[0], notes=notes,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- adding up

Labels = tuple[str, str]  # name and detail of a Row
Sums = dict[Labels, tuple[float, float]]  # calls and us


def _load(path: Path) -> kernel_table.Kernels:
    """A file, or of a folder its newest profile, or what `launches.load` takes where it has none."""
    profiles = load_kernels.find(path).get("profile") if path.is_dir() else None
    return load_kernels.load(profiles[0] if profiles else path)


def _counted(found: kernel_table.Kernels) -> str:
    return "operator calls" if found.are_operators else "kernels"


def _same_conditions(before: Path, after: Path, *profiles: dict[str, Any]) -> None:
    """Raises UsageError if two profiles differ in what launches depend on besides the version."""
    conditions = [run_record.conditions(each["run"]) | {"attention only": each["attention_only"]} for each in profiles]
    if differing := run_record.differences(*conditions):
        raise UsageError(f"{before} and {after} cannot be compared: {'; '.join(differing)}; profile both again, alike")


def _compiled(profile: dict[str, Any]) -> bool:
    return any(operator["name"].startswith(operators.COMPILER_FRAMES) for operator in profile["operators"])


def _added(items: Iterable[tuple[Labels, float, float]]) -> Sums:
    sums: Sums = {}
    for labels, calls, us in items:
        calls_before, us_before = sums.get(labels, (0.0, 0.0))
        sums[labels] = calls_before + calls, us_before + us
    return sums


def _names(found: kernel_table.Kernels) -> Sums:
    """By name, per step where the source knows steps."""
    steps = found.steps or 1
    rows = launches.summary(found)
    return _added(((row.name, kind(row.name)), row.calls / steps, row.total_ns / 1e3 / steps) for row in rows)


def _spans(profile: dict[str, Any], found: kernel_table.Kernels) -> Sums:
    """By span and phase, per step: of what `found`, read from the same profile, counts."""
    if found.are_operators:
        names = set(found.table.name)
        rows = (row for row in operators.rows(profile) if row.works and row.name in names)
        return _added(((row.span, row.phase), row.calls, row.us) for row in rows)
    steps = profile["profiled_steps"]
    return _added(((row["span"], row["phase"]), row["calls"] / steps, row["device_us"] / steps) for row in profile["kernels"])


def _rows(before: Sums, after: Sums) -> list[Row]:
    """A row for each that is in either, the largest change in calls first, then the largest in time."""
    rows = []
    for labels in dict.fromkeys([*before, *after]):
        (calls_before, us_before), (calls_after, us_after) = (each.get(labels, (0.0, 0.0)) for each in (before, after))
        rows.append(Row(*labels, calls_before, calls_after, us_before, us_after))
    return sorted(rows, key=lambda row: (-abs(row.calls_difference), -abs(row.us_difference)))


# --------------------------------------------------------------------------------------------------------------- showing


def _described(found: kernel_table.Kernels, profile: dict[str, Any] | None) -> str:
    """What wrote the file, its path, and how many steps are in it."""
    who = f"{profile['run']['version']}, `{profile['run']['command']}`" if profile else found.source
    return f"{who}, {found.path}" + (f", steps: {found.steps}" if found.steps else "")


def headline(reduction: Reduction) -> str:
    """The totals in a sentence."""
    total, changes = reduction.total, [row.change for row in reduction.by_name]
    calls, us = (
        " to ".join(map(tables.figure, pair))
        for pair in ((total.calls_before, total.calls_after), (total.us_before, total.us_after))
    )
    share = 100 * total.calls_difference / total.calls_before
    change = f"{abs(share):.1f} % {'fewer' if share < 0 else 'more'}" if share else "as many"
    return (
        f"{calls} {reduction.counted} {_unit(reduction)}: {change}. Their time: {us} us. Names: {len(changes)}, "
        f"gone {changes.count('gone')}, new {changes.count('new')}, with fewer calls {changes.count('fewer')}, with more "
        f"{changes.count('more')}."
    )


def _unit(reduction: Reduction) -> str:
    return "per step" if reduction.per_step else "in the whole file"


def sections(reduction: Reduction, top: int, markdown: bool) -> list[tuple[str, str]]:
    """Heading and table of each part; names shortened, the `top` first of them."""
    table = tables.markdown if markdown else tables.text
    figures = ["calls before", "after", "difference", "us before", "after", "difference"]

    def body(rows: Iterable[Row], *labels: str) -> list[list[Any]]:
        return [[*(getattr(row, label) for label in labels), *_figures(row)] for row in rows]

    def named(rows: list[Row]) -> list[list[Any]]:
        short = ((kernel_names.short_name(name), cells) for name, *cells in body(rows[:top], "name", "detail", "change"))
        return [[f"`{name}`" if markdown else name, *cells] for name, cells in short]

    changed = [row for row in reduction.by_name if row.change != "same"]
    by_time = sorted(reduction.by_name, key=lambda row: -abs(row.us_difference))
    what = f"{reduction.counted} {_unit(reduction)}"
    named_columns = ["operator" if reduction.counted == "operator calls" else "kernel", "kind", "change"]
    parts = [(f"{what}, by kind of work", ["kind"], body([*reduction.by_kind, reduction.total], "name"))]
    if reduction.by_span:
        rows = body([*reduction.by_span, reduction.total], "name", "detail")
        parts.append((f"{what}, by span and phase", ["span", "phase"], rows))
    for measure, rows in (("calls", changed), ("time", by_time)):
        heading = f"{what}, largest changes in {measure} ({min(top, len(rows))} of {len(rows)})"
        parts.append((heading, named_columns, named(rows)))
    return [(heading, table([*labels, *figures], rows).rstrip()) for heading, labels, rows in parts]


def _figures(row: Row) -> tuple[float, ...]:
    return row.calls_before, row.calls_after, row.calls_difference, row.us_before, row.us_after, row.us_difference


def report(reduction: Reduction, top: int) -> str:
    """The Markdown report."""
    parts = ["# Kernel reduction", *reduction.conditions.splitlines(), headline(reduction)]
    parts.append("![Calls and time before and after, by kind of work and by span](kernel_reduction.png)")
    for heading, table in sections(reduction, top, markdown=True):
        parts += [f"## {heading[0].upper()}{heading[1:]}", table]
    return "\n\n".join([*parts, *(f"Note: {note}." for note in reduction.notes)]) + "\n"


def figure(reduction: Reduction) -> "Figure":
    """Calls (left) and time (right) before and after: by kind of work above, by span below where spans are known."""
    spans = _rows(
        _added(((row.name, ""), row.calls_before, row.us_before) for row in reduction.by_span),
        _added(((row.name, ""), row.calls_after, row.us_after) for row in reduction.by_span),
    )
    groups = [rows for rows in (reduction.by_kind, spans) if rows]
    heights = [0.6 + 0.32 * len(rows) for rows in groups]
    result = plots.new(6.4, 0.6 + sum(heights))
    panels = result.subplots(len(groups), 2, squeeze=False, sharey="row", height_ratios=heights)
    for rows, (calls, times) in zip(groups, panels, strict=True):
        _bars(calls, rows, ("calls_before", "calls_after"), f"{reduction.counted} {_unit(reduction)}")
        _bars(times, rows, ("us_before", "us_after"), f"ms {_unit(reduction)}", 1e3)
        calls.invert_yaxis()
    result.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return result


def _bars(axes: Any, rows: list[Row], keys: tuple[str, str], label: str, scale: float = 1.0) -> None:
    for key, shift, colour in zip(keys, (-0.2, 0.2), (plots.BLUE, plots.ORANGE), strict=True):
        places = [i + shift for i in range(len(rows))]
        axes.barh(places, [getattr(row, key) / scale for row in rows], 0.4, color=colour, label=key.split("_")[1])
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_xlabel(label)


def analyze(baseline: Path, fused: Path, output: Path, top: int) -> str:
    """The text for a terminal; writes kernel_reduction.csv (all names, in full), .md and .png into `output`.

    Raises:
        UsageError: the two cannot be compared, or `output` cannot be written.
    """
    reduction = compare(baseline, fused)
    writable_folder(output, "--output-dir")
    write_text(output / "kernel_reduction.csv", _csv(reduction))
    write_text(output / "kernel_reduction.md", report(reduction, top))
    plots.save(figure(reduction), output / "kernel_reduction.png")
    written = ", ".join(str(output / f"kernel_reduction.{suffix}") for suffix in ("csv", "md", "png"))
    parts = [f"{heading}\n{table}" for heading, table in sections(reduction, top, markdown=False)]
    notes = "\n".join(f"note: {note}" for note in reduction.notes)
    return "\n\n".join([reduction.conditions, headline(reduction), *parts, notes, f"written: {written}"])


def _csv(reduction: Reduction) -> str:
    groups = {"total": [reduction.total], "kind": reduction.by_kind, "span": reduction.by_span, "name": reduction.by_name}
    body = ([table, row.name, row.detail, *_figures(row)] for table, rows in groups.items() for row in rows)
    return tables.csv_text(CSV_COLUMNS, body)
