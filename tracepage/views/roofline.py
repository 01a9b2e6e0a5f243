"""The roofline of a device, and measured work under it (Williams, Waterman and Patterson 2009,
doi:10.1145/1498765.1498785).

Work of F FLOPs that moves B bytes has the arithmetic intensity F / B, and a rate of at most
min(peak FLOP/s, F / B x bytes/s). Left of the ridge point, peak FLOP/s / bytes/s, it is
memory-bound, right of it compute-bound. Peak and bandwidth are those of a large matrix product in
the run's precision and of a large copy, measured, never those of a data sheet. FLOPs and bytes
follow from the shapes of the operators (`operators.cost`), with every tensor moved once.
"""

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tracepage.cost import operators
from tracepage.errors import UsageError
from tracepage.records.fields import Ceilings
from tracepage.records.step_profile import Profile
from tracepage.show import plots, tables
from tracepage.show.report import Report

from matplotlib.axes import Axes
from matplotlib.figure import Figure

HEADER = ["group", "name", "GFLOP", "MB", "FLOP/byte", "ridge", "side"]
HEADER += ["ms", "TFLOP/s", "GB/s", "% of bound"]
HOW_TO_READ = (
    "FLOPs and bytes follow from the shapes, with every tensor moved once. `side` is the ceiling "
    "that binds at this intensity, and `% of bound` the rate relative to it. Above 100 % data came "
    "from a cache, or the work ran in another precision than the measured product; far below it, "
    "calls may be too small to fill the device. Cells are empty where a trace has no shapes."
)


class Point(NamedTuple):
    """Timed work: FLOPs, bytes and seconds of the same calls. FLOPs and bytes are None where they
    are not known.
    """

    name: str
    flops: float | None
    bytes: float | None
    seconds: float
    group: str = ""  # A span or an operator of a mean step.
    calls: float = 0


def roofline_report(points: Sequence[Point], ceilings: Ceilings | None, conditions: str) -> Report:
    """The intensity of a mean step by span and by operator (`from_profile`); it writes roofline.csv
    and roofline.png. UsageError: no ceilings were measured.
    """
    roof = measured(ceilings)
    report = Report("Computational intensity of a mean step")
    report.text(f"{conditions}.", f"{describe(roof)}.")
    report.figure(lambda: figure(points, roof, conditions), "roofline", "Roofline of a mean step")
    report.table(*table(points, roof), csv="roofline", least=["ridge", "MB"])
    report.text(HOW_TO_READ)
    return report


def from_profile(profile: Profile, top: int = 10) -> list[Point]:
    """A mean step by span (group `span`), and its `top` longest operators by name (group
    `operator`), the longest first.

    The time of a span is that of all its operators, with views and other overhead. Operators whose
    cost is not known, such as code of torch.compile, are separated from the rest of their span.
    """
    spans = defaultdict(list)
    names = defaultdict(list)
    for row in operators.rows(profile):
        spans[row.span if row.flops is not None else f"{row.span}, cost not known"].append(row)
        if row.works:
            names[row.name].append(row)
    return points(spans, "span") + points(names, "operator")[:top]


def points(rows: dict[str, list[operators.OperatorCalls]], group: str = "") -> list[Point]:
    """A point for each name in a mean step, the longest first."""
    result = []
    for name, calls in rows.items():
        number, seconds, flops, moved = operators.sums(calls)
        work: tuple[float | None, float | None] = (flops, moved)
        if any(row.flops is None for row in calls):
            work = (None, None)
        result.append(Point(name, *work, seconds, group, number))
    return sorted(result, key=lambda point: -point.seconds)


def measured(ceilings: Ceilings | None) -> Ceilings:
    """The ceilings; UsageError if there are none."""
    if not ceilings:
        raise UsageError("there are no measured ceilings: profile again with --measure-peak")
    return ceilings


def ridge(ceilings: Ceilings) -> float:
    """The ridge point in FLOP/byte."""
    return ceilings["flops_per_second"] / ceilings["bytes_per_second"]


def describe(ceilings: Ceilings) -> str:
    """The ceilings, their origin, and the ridge point."""
    meet = tables.format_number(ridge(ceilings))
    bandwidth = tables.format_number(ceilings["bytes_per_second"] / 1e9)
    peak = tables.format_rate(ceilings["flops_per_second"])
    work = f"{ceilings['precision']} {ceilings.get('work', 'GEMM')}"
    return f"measured ceilings: {work} {peak}, copy {bandwidth} GB/s; ridge point {meet} FLOP/byte"


def table(points: Sequence[Point], ceilings: Ceilings) -> tables.Table:
    """Header and a row for each point; cells are None where FLOPs and bytes are not known, or 0.

    `side` is the ceiling that binds at this intensity, `% of bound` the shortest time under it over
    the measured time.
    """
    meet = ridge(ceilings)
    rows: list[list[Any]] = []
    for point in points:
        work: list[Any] = [None, None, None]
        side = None
        rates: list[Any] = [None, None, None]
        if point.bytes and point.flops is not None:
            intensity = point.flops / point.bytes
            work = [point.flops / 1e9, point.bytes / 1e6, intensity]
            side = "memory" if intensity < meet else "compute"
            least = operators.least_seconds(point.flops, point.bytes, ceilings)
            rates = [
                point.flops / point.seconds / 1e12,
                point.bytes / point.seconds / 1e9,
                100 * least / point.seconds,
            ]
        milliseconds = 1e3 * point.seconds
        rows.append([point.group or None, point.name, *work, meet, side, milliseconds, *rates])
    return HEADER, rows


def draw_roof(axes: Axes, ceilings: Ceilings, intensities: Iterable[float]) -> None:
    """The roof over these intensities (FLOP/byte), on logarithmic axes in TFLOP/s, with the names
    of its two regions.
    """
    meet = ridge(ceilings)
    peak = ceilings["flops_per_second"] / 1e12
    intensities = [meet, *intensities]
    low = min(intensities) / 4
    high = max(intensities) * 4
    axes.plot([low, meet, high], [low / meet * peak, peak, peak], color=plots.BLACK, linewidth=1.5)
    axes.axvline(meet, color="0.6", linestyle=":", linewidth=1)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        xlabel="arithmetic intensity, FLOP/byte",
        ylabel="TFLOP/s",
    )
    axes.grid(True, which="both", color="0.9")
    axes.update_datalim([(meet, 4 * peak)])  # room above the roof, for the names of the regions
    for name, side, offset in (("memory-bound", "right", -5), ("compute-bound", "left", 5)):
        axes.annotate(
            name,
            (meet, 1),
            (offset, -4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha=side,
            va="top",
            fontsize=8,
            color="0.3",
        )


def figure(points: Sequence[Point], ceilings: Ceilings, title: str) -> Figure:
    """The roof, and each point at its rate.

    Points without FLOPs, such as copies, have no place on these axes, and points below 1 % of the
    time of their group are left out; the table has all points.
    """
    whole: dict[str, float] = defaultdict(float)
    for point in points:
        whole[point.group] += point.seconds
    drawn = []
    for point in points:
        if point.flops and point.bytes and point.seconds >= 0.01 * whole[point.group]:
            drawn.append((point, point.flops, point.bytes))
    result = plots.new(plots.PAGE_INCHES, 4.6 + 0.2 * len(drawn))
    axes = result.add_subplot()
    draw_roof(axes, ceilings, [flops / moved for _, flops, moved in drawn])
    for number, (point, flops, moved) in enumerate(drawn):
        achieved = flops / 1e12 / point.seconds
        possible = flops / 1e12 / operators.least_seconds(flops, moved, ceilings)
        share = tables.format_number(100 * achieved / possible)
        name = f"{point.group} {point.name}: {share} %".strip()
        axes.plot(flops / moved, achieved, linestyle="", label=name, **plots.style(number))
    lines = [*textwrap.wrap(title, 70), *textwrap.wrap(describe(ceilings), 70)]
    axes.set_title("\n".join(lines), fontsize=8)
    if drawn:
        result.legend(loc="outside lower center", fontsize=8, title="% of its bound")
    return result
