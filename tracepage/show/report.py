"""One report of an analysis, written as terminal text, Markdown, CSV, JSON, PNG and a
self-contained HTML page.

An analysis is a function that reads its input, adds its results to a Report in reading order, and
returns it:

    report = Report("Batch scaling")
    report.text("Step times are medians.")
    report.table(["B", "ms/step"], [[8, 12.3], [16, 20.1]], csv="batch_scaling")
    report.figure(lambda: draw(rows), "roofline", "Roofline of a mean step")
    print(report.publish(folder, "batch_scaling"))

The template of the HTML page is report.html beside this module, and timeline.js draws a timeline
with the library in vendor/.
"""

import html
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tracepage.errors import UsageError
from tracepage.files import writable_file, write_json, write_text
from tracepage.show import plots, tables
from tracepage.terminal import wrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("csv", "json", "md", "png")


class Item(NamedTuple):
    """A part of a section: its kind, which the page's template knows, its text in both forms, and
    its content for the page.
    """

    kind: str
    terminal: str
    markdown: str
    content: Any


class Section(NamedTuple):
    """A heading, empty for what stands before the first one, its anchor, and the items below it in
    reading order.
    """

    title: str
    anchor: str
    items: list[Item]


class TableItem(NamedTuple):
    """The content of a table item: the rows that are shown, and which columns are numbers and which
    are code.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str
    numeric: Sequence[bool]
    code: Sequence[str]


class FigureItem(NamedTuple):
    """The content of a figure item."""

    draw: Callable[[], "Figure"]
    stem: str
    description: str

    def svg(self) -> str:
        """Without the title of the PNG, which lies alone: a page has its words in the text."""
        figure = self.draw()
        figure.set_figwidth(plots.PAGE_INCHES)
        for axes in figure.axes:
            axes.set_title("")
        return plots.svg(figure, f"{self.stem}-figure", self.description)


class Report:
    """The results of an analysis; every form of it holds the same sections, text and tables in the
    order they were added.
    """

    def __init__(self, title: str, inputs: Sequence[Path] = ()) -> None:
        """`inputs`: files that no file of the report may replace."""
        self.title = title
        self.inputs = inputs
        self.sections = [Section("", "", [])]
        self.files: dict[str, Any] = {}  # by name: text of a CSV file, or content of a JSON file

    def section(self, title: str, anchor: str = "") -> None:
        """A heading for what follows; its anchor in the page is made from the title if none is
        given.
        """
        anchor = anchor or re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
        self.sections.append(Section(title, anchor, []))

    def text(self, *paragraphs: str, kind: str = "text") -> None:
        """Paragraphs; text between backticks is code."""
        for paragraph in paragraphs:
            self._add(kind, wrapped(paragraph), tables.markdown_text(paragraph), paragraph)

    def verdict(self, sentence: str) -> None:
        """What a page says first, in large letters."""
        self.text(sentence, kind="verdict")

    def first_sentence(self) -> str:
        """The verdict, or the first text, of a report that begins with one."""
        return self.sections[0].items[0].content

    def bar(self, parts: Sequence[tuple[str, float, str]]) -> None:
        """A bar of parts (name, share of the whole in %, text), in the page alone: a table has the
        numbers.
        """
        self._add("bar", "", "", parts)

    def moments(self, title: str, moments: Sequence[tuple[str, int, int]]) -> None:
        """Moments of a timeline, each a text with its start and end in ns; in the page a link shows
        it there.
        """
        lines = [f"{number}. {text}" for number, (text, *_) in enumerate(moments, 1)]
        terminal = "\n".join(wrapped(line, 3) for line in (title, *lines))
        markdown = tables.markdown_text("\n".join((title, "", *lines)))
        self._add("moments", terminal, markdown, (title, moments))

    def facts(self, facts: Sequence[tuple[str, str]]) -> None:
        """Pairs of a label and a fact, one a line."""
        indent = 2 + max(len(label) for label, _ in facts)
        lines = [wrapped(f"{label:<{indent}}{fact}", indent) for label, fact in facts]
        items = [f"- {tables.markdown_text(f'{label}: {fact}')}" for label, fact in facts]
        self._add("facts", "\n".join(lines), "\n".join(items), facts)

    def table(
        self,
        header: Sequence[str],
        rows: Iterable[Sequence[object]],
        title: str = "",
        csv: str | None = None,
        code: Sequence[str] = (),
        least: Sequence[str] = (),
        top: int | None = None,
    ) -> None:
        """A table of numbers, text and None (an empty cell), of which the `top` first rows are
        shown; its title then says how many these are.

        A CSV file of the stem `csv` has all rows and columns in full precision. Text in the columns
        named in `code` is code, such as names of kernels. A terminal leaves out the columns of
        `least` first.
        """
        rows = list(rows)
        shown = rows[:top]
        terminal = tables.text(header, shown, least, f"{csv}.csv" if csv else "")
        markdown = tables.markdown(header, shown, code).strip()
        if title:
            if top:
                title += f", {len(shown)} of {len(rows)}"
            terminal = f"{wrapped(title)}\n{terminal}"
            markdown = f"**{tables.markdown_text(title)}**\n\n{markdown}"
        content = TableItem(header, shown, title, tables.numeric(header, shown), code)
        self._add("table", terminal, markdown, content)
        if csv:
            self.csv(csv, header, rows)

    def csv(self, stem: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A CSV file, in full precision, that no table of this report shows in this form."""
        self.files[f"{stem}.csv"] = tables.csv_text(header, rows)

    def json(self, stem: str, content: Any) -> None:
        """A JSON file."""
        self.files[f"{stem}.json"] = content

    def figure(self, draw: Callable[[], "Figure"], stem: str, description: str) -> None:
        """A figure, drawn where a picture is written and not where only text is asked for; `stem`
        is that of the PNG file, and the id of the figure in the page, and `description` is for
        readers who cannot see it.
        """
        content = FigureItem(draw, stem, description)
        self._add("figure", "", f"![{description}]({stem}.png)", content)

    def timeline(self, events: dict[str, Any], name: str) -> None:
        """A timeline (`tracepage.views.timeline`) to zoom, in the page alone."""
        self._add("timeline", "", "", (name, events))

    def commands(self, lines: Sequence[str]) -> None:
        """Shell lines to copy; a terminal shows each as one line, however long."""
        terminal = "\n".join(f"    {line}" for line in lines)
        self._add("commands", terminal, "\n".join(["```sh", *lines, "```"]), lines)

    def include(self, other: "Report", title: str = "", *anchors: str) -> None:
        """The sections of another report, all or those with these anchors; what stands before its
        first heading gets a heading of its own, if one is given.
        """
        before, *sections = other.sections
        if title:
            self.section(title)
            self.sections[-1].items.extend(before.items)
        for section in sections:
            if not anchors or section.anchor in anchors:
                self.sections.append(section)

    def _add(self, kind: str, terminal: str, markdown: str, content: Any) -> None:
        self.sections[-1].items.append(Item(kind, terminal, markdown, content))

    def terminal(self) -> str:
        """The report as text without figures, no wider than the terminal but for commands and words
        that are longer.
        """
        parts = [f"# {self.title}"]
        for section in self.sections:
            parts.append(f"## {section.title}" if section.title else "")
            parts += [item.terminal for item in section.items]
        return "\n\n".join(filter(None, parts))

    def markdown(self, figures: bool = False) -> str:
        """The report as Markdown; `figures`: with links to the PNG files, which lie beside it."""
        parts = [f"# {tables.markdown_text(self.title)}"]
        for section in self.sections:
            parts.append(f"## {tables.markdown_text(section.title)}" if section.title else "")
            parts += [item.markdown for item in section.items if figures or item.kind != "figure"]
        return "\n\n".join(filter(None, parts)) + "\n"

    def html(self) -> str:
        """One page that needs no network, with figures as SVG; only a timeline brings scripts."""
        import jinja2

        folder = Path(__file__).parent
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(folder),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters |= {
            "format_number": tables.format_number,
            "with_code": lambda text: re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(text)),
            "content": lambda name: (folder / name).read_text(encoding="utf-8"),
        }
        template = environment.get_template("report.html")
        return template.render(title=self.title, sections=self.sections)

    def write(
        self, folder: Path, stem: str, kinds: Sequence[str] = KINDS, flag: str = "--output-dir"
    ) -> list[Path]:
        """Writes the files of these kinds (also html) into `folder`, which the option `flag` named,
        and returns them in the order of the kinds; the Markdown file and the page are named `stem`,
        and the others have names of their own.
        """
        contents: dict[str, Any] = {}
        for kind in kinds:
            if kind == "md":
                contents[f"{stem}.md"] = self.markdown("png" in kinds)
            elif kind == "html":
                contents[f"{stem}.html"] = self.html()
            elif kind == "png":
                items = [item for section in self.sections for item in section.items]
                figures = [item.content for item in items if item.kind == "figure"]
                contents |= {f"{figure.stem}.png": figure.draw() for figure in figures}
            else:
                names = [name for name in self.files if name.endswith(f".{kind}")]
                contents |= {name: self.files[name] for name in names}
        for name in contents:
            writable_file(folder / name, flag, self.inputs)
        writers = {".json": write_json, ".png": plots.save}
        for name, content in contents.items():
            write = writers.get(Path(name).suffix, write_text)
            write(folder / name, content)
        return [folder / name for name in contents]

    def publish(
        self, folder: Path, stem: str, kinds: Sequence[str] = KINDS, flag: str = "--output-dir"
    ) -> str:
        """Writes the files as `write` does; returns the terminal text with a last line that names
        them.
        """
        written = self.write(folder, stem, kinds, flag)
        return f"{self.terminal()}\n\nwritten: {', '.join(map(str, written))}"

    def publish_as(self, path: Path, kinds: Sequence[str], flag: str) -> str:
        """As `publish`, under the name of the Markdown file that `flag` gives."""
        if path.suffix != ".md":
            raise UsageError(f"{flag} {path}: name a .md file")
        return self.publish(path.parent, path.stem, kinds, flag)
