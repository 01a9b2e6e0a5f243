"""Rewrites the generated parts of all documents: tables and pictures between markers.

    <!-- rows: FILE... | COLUMN | ... -->             a row for each record, or for each row of a
                                                      list in it (`rows.rows`)
    <!-- section: FILE...#ANCHOR | COLUMN | ... -->   a section of the report on each file, all
                                                      columns or these
    <!-- table: MODULE.FUNCTION FILE... -->           the table that a function of this room returns
    <!-- picture: FUNCTION FILE... -->                the picture that a function of pictures.py
                                                      returns, in a file in pictures/

FILE may be a pattern, such as results/h100/versions_*_bf16.json. A generated part ends at
`<!-- /rows -->`, and so on. Everything between two markers is overwritten:

    python -m documents            # rewrites every document
    python -m documents --check    # changes nothing; exit code 1 and a line for each file that is
                                   # out of date
"""

import argparse
import functools
import os
import pkgutil
import re
from pathlib import Path
from typing import Any

from common import ROOT, cli
from documents import pictures, rows, sections
from documents.pictures import Picture
from tracepage.errors import RunError
from tracepage.files import write_text

import matplotlib

MARKED = re.compile(
    r"(<!-- (rows|section|table|picture): ([^\n]+?) -->\n).*?(<!-- /\2 -->)", re.DOTALL
)


def documents() -> list[Path]:
    """All Markdown files of the repository."""
    hidden = re.compile(r"(^|/)\.")
    paths = sorted(ROOT.rglob("*.md"))
    return [path for path in paths if not hidden.search(path.relative_to(ROOT).as_posix())]


def refreshed(text: str, folder: Path = ROOT) -> str:
    """The text of a document in `folder` with all generated parts made anew."""

    def replace(match: re.Match) -> str:
        opening, kind, content, closing = match.groups()
        return f"{opening}\n{render_part(kind, content, folder).strip()}\n\n{closing}"

    return MARKED.sub(replace, text)


def render_part(kind: str, content: str, folder: Path) -> str:
    """The Markdown of a generated part by the text of its marker."""
    source, *columns = content.split(" | ")
    patterns, _, part = source.partition("#")
    if kind == "rows":
        return rows.rows(columns, rows.find(patterns.split()), part)
    if kind == "section":
        return sections.section(part, rows.find(patterns.split()), columns)
    if kind == "table":
        return call(source)
    picture = draw_picture(source)
    file = Path(os.path.relpath(file_of(picture), folder)).as_posix()
    return f"![{picture.description}]({file})"


@functools.cache
def draw_picture(source: str) -> Picture:
    """The picture of a marker, whose files are read once: both the document and the picture's own
    file need it.
    """
    with matplotlib.rc_context(pictures.STYLE):
        return call(f"pictures.{source}")


def call(source: str) -> Any:
    """The result of a function of this room for the files of the patterns after its name."""
    name, *patterns = source.split()
    return pkgutil.resolve_name(f"documents.{name}")(*rows.find(patterns))


def file_of(picture: Picture) -> Path:
    return ROOT / "pictures" / f"{picture.name}.svg"


def shown_in(text: str) -> list[Picture]:
    """The pictures that a document shows."""
    markers = MARKED.findall(text)
    return [draw_picture(content) for _, kind, content, _ in markers if kind == "picture"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say what is out of date")
    check = cli.parse(parser).check
    stale = {}
    for path in documents():
        text = path.read_text(encoding="utf-8")
        new = refreshed(text, path.parent)
        if new != text:
            stale[path] = new
        for picture in shown_in(text):
            file = file_of(picture)
            if not picture.is_current(file):
                stale[file] = picture.svg()
    for path, content in stale.items():
        if not check:
            write_text(path, content)
        print(f"{'out of date' if check else 'rewritten'}: {path.relative_to(ROOT)}")
    if check and stale:
        raise RunError("run python -m documents")
