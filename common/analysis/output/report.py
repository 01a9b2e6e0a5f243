"""One report of an analysis, written as terminal text, Markdown, CSV, JSON, PNG and a self-contained HTML page.

An analysis is a function that reads its input, adds what it found to a Report in reading order, and returns it:

    report = Report("Batch scaling")
    report.text("Step times are medians.")
    report.table(["B", "ms/step"], [[8, 12.3], [16, 20.1]], csv="batch_scaling")
    report.figure(lambda: draw(rows), "batch_scaling", "Step time over the batch size")
    print(report.publish(folder, "batch_scaling"))

The template of the HTML page is report.html beside this module.
"""

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.analysis.output import plots, tables
from common.files import writable_folder, write_json, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("csv", "json", "md", "png")
PAGE_INCHES = 5  # letters of 10 points are then 10 pixels high where a phone's 360 pixels show the whole figure


class Item(NamedTuple):
    """A part of a section: its kind, which the page's template knows, its text in both forms, and its content for the page."""

    kind: str
    terminal: str
    markdown: str
    content: Any


class Section(NamedTuple):
    """A heading, empty for what stands before the first one, its anchor, and the items below it in reading order."""

    title: str
    anchor: str
    items: list[Item]


class Table(NamedTuple):
    """The content of a table item: the rows that are shown, and which columns are numbers and which are code."""

    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str
    numeric: Sequence[bool]
    code: Sequence[str]


class Picture(NamedTuple):
    """The content of a figure item."""

    draw: Callable[[], "Figure"]
    stem: str
    description: str

    def svg(self) -> str:
        figure = self.draw()
        figure.set_figwidth(PAGE_INCHES)
        return plots.svg(figure, f"{self.stem}-figure", self.description)


class Report:
    """The results of an analysis; every form of it holds the same sections, text and tables in the order they were added."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.sections = [Section("", "", [])]
        self.files: dict[str, Any] = {}  # by name: text of a CSV file, or content of a JSON file

    def section(self, title: str, anchor: str = "") -> None:
        """A heading for what follows; its anchor in the page is made from the title if none is given."""
        self.sections.append(Section(title, anchor or re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-"), []))

    def text(self, *paragraphs: str) -> None:
        """Paragraphs; text between backticks is code."""
        for paragraph in paragraphs:
            self._add("text", _wrapped(paragraph), tables.markdown_text(paragraph), paragraph)

    def facts(self, facts: Sequence[tuple[str, str]]) -> None:
        """Pairs of a label and a fact, one a line."""
        indent = 2 + max(len(label) for label, _ in facts)
        lines = [_wrapped(f"{label:<{indent}}{fact}", indent) for label, fact in facts]
        items = [f"- {tables.markdown_text(f'{label}: {fact}')}" for label, fact in facts]
        self._add("facts", "\n".join(lines), "\n".join(items), facts)

    def table(
        self, header: Sequence[str], rows: Iterable[Sequence[object]], title: str = "", csv: str | None = None,
        csv_header: Sequence[str] | None = None, code: Sequence[str] = (), least: Sequence[str] = (), top: int | None = None,
    ) -> None:  # fmt: skip
        """A table of numbers, text and None (an empty cell).

        Args:
            csv: stem of a CSV file with all rows and columns in full precision.
            csv_header: names of the columns there, if they are not those of the table.
            code: names of the columns whose text is code, such as names of kernels.
            least: names of the columns that a terminal leaves out first if the table is too wide.
            top: how many rows are shown; the CSV has all.
        """
        rows = list(rows)
        shown = rows[:top]
        terminal = tables.text(header, shown, least, f"{csv}.csv" if csv else "")
        markdown = tables.markdown(header, shown, code).strip()
        if title:
            terminal, markdown = f"{_wrapped(title)}\n{terminal}", f"**{tables.markdown_text(title)}**\n\n{markdown}"
        self._add("table", terminal, markdown, Table(header, shown, title, tables.numeric(header, shown), code))
        if csv:
            self.csv(csv, csv_header or header, rows)

    def csv(self, stem: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A CSV file, in full precision, that no table of this report shows in this form."""
        self.files[f"{stem}.csv"] = tables.csv_text(header, rows)

    def json(self, stem: str, content: Any) -> None:
        """A JSON file."""
        self.files[f"{stem}.json"] = content

    def figure(self, draw: Callable[[], "Figure"], stem: str, description: str) -> None:
        """A figure, drawn where a picture is written and not where only text is asked for.

        Args:
            stem: of the PNG file, and the id of the figure in the page.
            description: for readers who cannot see the figure.
        """
        self._add("figure", "", f"![{description}]({stem}.png)", Picture(draw, stem, description))

    def commands(self, lines: Sequence[str]) -> None:
        """Shell lines to copy; a terminal shows each as one line, however long."""
        lines = [line.replace("\n", " ") for line in lines]
        self._add("commands", "\n".join(f"    {line}" for line in lines), "\n".join(["```sh", *lines, "```"]), lines)

    def _add(self, *item: Any) -> None:
        self.sections[-1].items.append(Item(*item))

    def terminal(self) -> str:
        """The report as text without figures, at most 120 columns wide but for commands and words that are longer."""
        parts = [f"# {self.title}"]
        for section in self.sections:
            parts += [f"## {section.title}" if section.title else "", *(item.terminal for item in section.items)]
        return tables.printable("\n\n".join(filter(None, parts)))

    def markdown(self, figures: bool = False) -> str:
        """The report as Markdown; `figures`: with links to the PNG files, which lie beside it."""
        parts = [f"# {tables.markdown_text(self.title)}"]
        for section in self.sections:
            parts += [f"## {tables.markdown_text(section.title)}"] * bool(section.title)
            parts += [item.markdown for item in section.items if figures or item.kind != "figure"]
        return tables.printable("\n\n".join(parts)) + "\n"

    def html(self) -> str:
        """One page that needs no network and no script, with the figures as SVG."""
        import jinja2
        from markupsafe import Markup, escape

        def with_code(text: str) -> Markup:
            return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(text))))

        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined,
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        environment.filters |= {"format_number": tables.format_number, "with_code": with_code}
        return environment.get_template("report.html").render(title=self.title, sections=self.sections)

    def write(self, folder: Path, stem: str, kinds: Sequence[str] = KINDS, flag: str = "--output-dir") -> list[Path]:
        """Writes the files of the given kinds (md, html, csv, json, png) into `folder`, each one whole.

        Args:
            stem: of the Markdown file and the page; the other files have names of their own.
            flag: the option that named the folder, for the message about one that cannot be written to.

        Returns:
            The files, in the order of `kinds`.

        Raises:
            UsageError: `folder` cannot be written to.
        """
        writable_folder(folder, flag)
        contents: dict[str, Any] = {}
        for kind in kinds:
            if kind == "md":
                contents[f"{stem}.md"] = self.markdown("png" in kinds)
            elif kind == "html":
                contents[f"{stem}.html"] = self.html()
            elif kind == "png":
                pictures = (item.content for section in self.sections for item in section.items if item.kind == "figure")
                contents |= {f"{picture.stem}.png": picture.draw() for picture in pictures}
            else:
                contents |= {name: content for name, content in self.files.items() if name.endswith(f".{kind}")}
        for name, content in contents.items():
            save = {".json": write_json, ".png": lambda path, figure: plots.save(figure, path)}.get(Path(name).suffix, write_text)
            save(folder / name, content)
        return [folder / name for name in contents]

    def publish(self, folder: Path, stem: str, kinds: Sequence[str] = KINDS, flag: str = "--output-dir") -> str:
        """Writes the files as `write` does; returns the terminal text with a last line that names them."""
        written = self.write(folder, stem, kinds, flag)
        return f"{self.terminal()}\n\nwritten: {', '.join(map(str, written))}"


def _wrapped(line: str, indent: int = 0) -> str:
    return textwrap.fill(line, tables.WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
