"""The roofline of a device and what was measured under it (Williams, Waterman and Patterson 2009, doi:10.1145/1498765.1498785).

Work of F FLOPs that moves B bytes has the arithmetic intensity F / B, and runs at most at

    min(peak FLOP/s, F / B x bytes/s)                   the roof
    peak FLOP/s / bytes/s                               the ridge point, FLOP/byte: where both meet

Left of the ridge point memory binds, right of it compute. Peak and bandwidth are ceilings that were measured, never those of a
data sheet: a large matrix product in the run's precision, and a large copy. FLOPs and bytes are what the operators' shapes say
(`operators.cost`): every tensor moved once. Data that stays in a cache can beat such a bound, and so can an operator that does
not compute in that precision; work too small to fill the device stays far below it.
"""

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from common.analysis.formulas import operators
from common.analysis.output import plots, tables
from common.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEADER = ["group", "name", "GFLOP", "MB", "FLOP/byte", "ridge", "side", "ms", "TFLOP/s", "GB/s", "% of bound"]
COLOURS = (plots.BLUE, plots.ORANGE, plots.GREEN, plots.VERMILION, plots.PURPLE, plots.SKY, plots.BLACK)
READ = """FLOPs and bytes follow from the operators' shapes, every tensor moved once. `side` is what binds at this intensity, and
"% of bound" how near that is: above 100 % data came from a cache, or work ran in another precision than the measured product;
far below, calls may be too small to fill the device. Cells are empty where a trace does not record what ran: code of
torch.compile, operators on long lists of tensors."""
MARKERS = ("o", "s", "^", "D", "v", "P")


class Point(NamedTuple):
    """Some work that was timed: FLOPs, bytes and seconds of the same calls; None where FLOPs and bytes are not known."""

    name: str
    flops: float | None
    bytes: float | None
    seconds: float
    group: str = ""  # points of a group share a marker

    @property
    def intensity(self) -> float | None:
        """FLOP/byte."""
        return self.flops / self.bytes if self.bytes else None


def from_profile(profile: dict[str, Any], top: int = 10) -> list[Point]:
    """A mean step by span (group `span`), and its `top` longest operators by name (group `operator`), the longest first.

    The time of a span is that of all its operators, with views and other overhead. Operators whose cost is not known, such as
    what torch.compile makes, stand apart from the rest of their span. `profile`: schema tiny-llama-profile/1.
    """
    spans, names = defaultdict(list), defaultdict(list)
    for row in operators.rows(profile):
        spans[row.span if row.flops is not None else f"{row.span}, cost not known"].append(row)
        if row.works:
            names[row.name].append(row)
    by_span = _longest(_added(name, rows, "span") for name, rows in spans.items())
    return by_span + _longest(_added(name, rows, "operator") for name, rows in names.items())[:top]


def _added(name: str, rows: Sequence[operators.Row], group: str) -> Point:
    seconds = sum(row.us for row in rows) / 1e6
    if any(row.flops is None for row in rows):
        return Point(name, None, None, seconds, group)
    return Point(name, sum(row.flops * row.calls for row in rows), sum(row.bytes * row.calls for row in rows), seconds, group)


def _longest(points: Iterable[Point]) -> list[Point]:
    return sorted(points, key=lambda point: -point.seconds)


def ridge(ceilings: Mapping[str, Any] | None) -> float:
    """The ridge point in FLOP/byte.

    Args:
        ceilings: flops_per_second, bytes_per_second and precision, from `common.training.ceilings.measure`.

    Raises:
        UsageError: there are none.
    """
    if not ceilings:
        raise UsageError("there are no measured ceilings: profile again with --measure-peak")
    return ceilings["flops_per_second"] / ceilings["bytes_per_second"]


def bound_seconds(point: Point, ceilings: Mapping[str, Any]) -> float:
    """What the work takes at least under the roof."""
    return max(point.flops / ceilings["flops_per_second"], point.bytes / ceilings["bytes_per_second"])


def describe(ceilings: Mapping[str, Any] | None) -> str:
    """The ceilings, where they come from, and the ridge point."""
    meet = ridge(ceilings)
    return (
        f"measured ceilings: {ceilings['precision']} GEMM {tables.figure(ceilings['flops_per_second'] / 1e12)} TFLOP/s, "
        f"copy {tables.figure(ceilings['bytes_per_second'] / 1e9)} GB/s; ridge point {tables.figure(meet)} FLOP/byte"
    )


def table(points: Sequence[Point], ceilings: Mapping[str, Any] | None) -> tuple[list[str], list[list[Any]]]:
    """Header and a row for each point; cells are None where FLOPs and bytes are not known, or 0.

    `side` is the ceiling that is reached first at this intensity, `% of bound` the shortest time under it over the measured one.

    Raises:
        UsageError: there are no ceilings.
    """
    meet, rows = ridge(ceilings), []
    for point in points:
        figures: list[Any] = [None] * 7
        if point.bytes:
            rates = [point.flops / point.seconds / 1e12, point.bytes / point.seconds / 1e9]
            percent = 100 * bound_seconds(point, ceilings) / point.seconds
            side = "memory" if point.intensity < meet else "compute"
            figures = [point.flops / 1e9, point.bytes / 1e6, point.intensity, side, *rates, percent]
        rows.append([point.group, point.name, *figures[:3], meet, figures[3], 1e3 * point.seconds, *figures[4:]])
    return HEADER, rows


def draw_roof(axes: "Axes", ceilings: Mapping[str, Any] | None, intensities: Iterable[float]) -> None:
    """The roof over these intensities (FLOP/byte), on logarithmic axes in TFLOP/s.

    Raises:
        UsageError: there are no ceilings.
    """
    meet, peak = ridge(ceilings), ceilings["flops_per_second"] / 1e12
    intensities = [meet, *intensities]
    low, high = min(intensities) / 3, max(intensities) * 3
    axes.plot([low, meet, high], [low / meet * peak, peak, peak], color=plots.BLACK, linewidth=1.5)
    axes.axvline(meet, color="0.6", linestyle=":", linewidth=1)
    axes.set(xscale="log", yscale="log", xlim=(low, high), xlabel="arithmetic intensity, FLOP/byte", ylabel="TFLOP/s")
    axes.grid(True, which="both", color="0.9")


def figure(points: Sequence[Point], ceilings: Mapping[str, Any] | None, title: str = "Roofline") -> "Figure":
    """The roof, each point at its rate, and a thin line from there up to what bounds it.

    Points without FLOPs, such as copies, have no place on these axes, and those below 1 % of the time of their group are left
    out; the table has all.

    Raises:
        UsageError: there are no ceilings.
    """
    whole = defaultdict(float)
    for point in points:
        whole[point.group] += point.seconds
    drawn = [point for point in points if point.flops and point.bytes and point.seconds >= 0.01 * whole[point.group]]
    columns = 2 if all(len(point.name) < 30 for point in drawn) else 1  # of the legend
    result = plots.new(6.4, 4.6 + 0.2 * math.ceil(len(drawn) / columns))
    axes = result.add_subplot()
    draw_roof(axes, ceilings, [point.intensity for point in drawn])
    groups = list(dict.fromkeys(point.group for point in drawn))
    for number, point in enumerate(drawn):
        achieved, possible = (point.flops / seconds / 1e12 for seconds in (point.seconds, bound_seconds(point, ceilings)))
        label = f"{number + 1} {point.name}: {tables.figure(100 * achieved / possible)} %"
        colour, group = COLOURS[number % len(COLOURS)], groups.index(point.group)
        axes.plot([point.intensity] * 2, [achieved, possible], color=colour, linewidth=0.7)
        axes.plot(
            point.intensity, achieved, marker=MARKERS[group % len(MARKERS)], markersize=8, color=colour, linestyle="none",
            markerfacecolor="none" if group else colour, label=label,
        )  # fmt: skip
        axes.annotate(str(number + 1), (point.intensity, achieved), (5, -8), textcoords="offset points", fontsize=8)
    axes.set_title("\n".join([*textwrap.wrap(title, 100), *textwrap.wrap(describe(ceilings), 100)]), fontsize=8)
    if drawn:
        result.legend(loc="outside lower center", ncols=columns, fontsize=8, title="% of its bound", title_fontsize=8)
    return result
