"""A report of sections as Markdown, and as one HTML page with figures that needs no network and no script.

Markdown leaves the figures out: the tables hold the same values. The page's template is report.html beside this module.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from common.analysis.output import plots, tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE_INCHES = 5  # letters of 10 points are then 10 pixels high where a phone's 360 pixels show the whole figure


class Table(NamedTuple):
    """A table as `common.analysis.output.tables` takes it, with a title or an empty one."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold only numbers."""
        return [all(isinstance(row[i], int | float | None) for row in self.rows) for i in range(len(self.header))]


class Section(NamedTuple):
    """A heading and what stands below it, in this order; whatever is empty is left out."""

    name: str  # its anchor, and the beginning of all ids in its figure
    title: str
    text: Sequence[str]  # paragraphs; what is between backticks is code
    figure: "Figure | None" = None
    description: str = ""  # of the figure, for those who cannot see it
    tables: Sequence[Table] = ()
    commands: Sequence[str] = ()  # shell lines


def markdown(title: str, sections: Sequence[Section]) -> str:
    """The report without its figures."""
    parts = [f"# {title}"]
    for section in sections:
        parts += [f"## {section.title}", *section.text]
        for table in section.tables:
            parts += [f"**{table.title}**"] * bool(table.title) + [tables.markdown(table.header, table.rows).strip()]
        if section.commands:
            parts.append("\n".join(["```sh", *section.commands, "```"]))
    return "\n\n".join(parts) + "\n"


def html(title: str, sections: Sequence[Section]) -> str:
    """The page, figures drawn as SVG."""
    import jinja2
    from markupsafe import Markup, escape

    def with_code(text: str) -> Markup:
        return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(text))))

    def drawn(section: Section) -> Markup:
        section.figure.set_figwidth(FIGURE_INCHES)
        return Markup(plots.svg(section.figure, f"{section.name}-figure", section.description))

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"figure": tables.figure, "with_code": with_code, "drawn": drawn}
    return environment.get_template("report.html").render(title=title, sections=sections)
