"""Figures as PNG files or inline SVG, drawn without a display and without pyplot's global state."""

import html
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracepage.files import write_bytes

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

# Letters of 10 points are then 10 pixels high where a phone's 360 pixels show the whole figure.
PAGE_INCHES = 5
MIB = 2**20
POINTS = 1500  # of memory: of more events, the one with the largest total in each interval

# Colours that people with any colour vision tell apart (Okabe and Ito 2008, "Color Universal
# Design").
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
BLACK = "#000000"
LINES = (BLACK, BLUE, SKY, VERMILION, GREEN, ORANGE, PURPLE)
MARKERS = "osD^v<>"
CATEGORIES = {
    "forward": SKY,
    "backward": VERMILION,
    "optimizer": GREEN,
    "other": PURPLE,
    "no stack": ORANGE,
}
EARLIER = "0.75"  # of what was allocated before


def style(number: int) -> dict[str, Any]:
    """Colour and marker of a figure's line by its number; 49 lines can be told apart."""
    return {"color": LINES[number % 7], "marker": MARKERS[(number + number // 7) % 7]}


def new(width: float, height: float) -> "Figure":
    """An empty figure of width x height inches that arranges its axes and cuts off no label."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def memory(
    times: "pandas.Series",
    alive: "pandas.DataFrame",
    total: "pandas.Series",
    reserved: "pandas.Series | None" = None,
) -> "Figure":
    """Areas of the bytes that are alive after each event, stacked by the category that allocated
    them, and a line of those that the pools reserve; `times` begin at 0.
    """
    end = times.iloc[-1] or 1
    kept = total.groupby((times / end * (POINTS - 1)).astype(int)).idxmax()
    areas = alive.loc[kept, alive.any()] / MIB
    figure = new(PAGE_INCHES, 3.4)
    axes = figure.add_subplot()
    colours = [CATEGORIES.get(str(name), EARLIER) for name in areas]
    axes.stackplot(times[kept], areas.T, labels=[*areas], colors=colours, step="post")
    if reserved is not None:
        axes.step(times[kept], reserved[kept] / MIB, BLACK, where="post", label="reserved")
    axes.set(xlim=(0, end), ylabel="allocated, MiB")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    return figure


def save(path: Path, figure: "Figure") -> None:
    """Draws the PNG, and writes it as `files.write_bytes` does."""
    drawing = io.BytesIO()
    figure.savefig(drawing, format="png", dpi=140)
    write_bytes(path, drawing.getvalue())


def svg(figure: "Figure", name: str, description: str) -> str:
    """The figure as an <svg> element for an HTML page: it fills the page's width, and text stays
    text.

    A figure made anew from the same data gives the same string: no date, and no random ids. All ids
    begin with `name`, which is unique in the page; the description is for those who cannot see the
    figure.
    """
    import matplotlib

    text = io.StringIO()
    undated = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata=undated)
    drawing = re.sub(r'((?<= id=")|(?<=url\(#)|(?<=href="#))', f"{name}-", text.getvalue())
    head, body = drawing[drawing.index("<svg") :].split(">", 1)
    size = head[head.index('viewBox="') :].split('"')[1]
    return (
        f'<svg id="{name}" role="img" viewBox="{size}" xmlns:xlink="http://www.w3.org/1999/xlink">'
        f"<title>{html.escape(description)}</title>{body}"
    )
