"""Slides as one HTML file that needs no network, made from slides/slides.md (`make slides`).

The source is Markdown. `# Title` begins the first slide and `## Title` every other one; what follows a line `Note:` is the
speaker's notes. Tables and pictures stand between the markers of `common.documents.rewrite`, which keeps them current. The
template of the page is slides.html beside this module.
"""

import base64
import re
from pathlib import Path
from typing import NamedTuple

from common import cli
from common.documents.rewrite import MARKED, ROOT
from common.errors import UsageError
from common.files import opened, writable_file, write_text

import jinja2
import markdown

SOURCE, PAGE = ROOT / "slides" / "slides.md", ROOT / "slides" / "slides.html"
MOST_WORDS = 40  # on a slide, beside its title and what stands between markers
TITLE = re.compile(r"(?:\A#|^##) (.+)\n", re.MULTILINE)
NOTE = re.compile(r"^Note:", re.MULTILINE)


class Slide(NamedTuple):
    """A slide; `title`, `body` and `notes` are HTML, and `words` counts the text that is not generated."""

    title: str
    body: str
    notes: str
    words: int


def slides(source: Path) -> list[Slide]:
    """The slides of a source. UsageError: the source does not begin with a title, or a slide has more than MOST_WORDS words."""
    with opened(source) as file:
        before, *parts = TITLE.split(file.read().decode("utf-8"))
    if before.strip() or not parts:
        raise UsageError(f"{source}: the first line must be `# Title`, and `## Title` begins each slide after it")
    found = [_slide(title, text, source.parent) for title, text in zip(parts[::2], parts[1::2], strict=True)]
    for number, slide in enumerate(found, 1):
        if slide.words > MOST_WORDS:
            raise UsageError(f"{source}: slide {number}, {slide.title}, has {slide.words} words; at most {MOST_WORDS} are read")
    return found


def _slide(title: str, text: str, folder: Path) -> Slide:
    text, *notes = NOTE.split(text, maxsplit=1)
    words = len(re.sub(r"<[^>]+>", " ", _html(MARKED.sub("", text), folder)).split())
    body = _html(MARKED.sub(lambda marked: f"<figure>{_html(marked[0], folder)}</figure>", text), folder)
    return Slide(_html(title, folder)[len("<p>") : -len("</p>")], body, _html("".join(notes), folder), words)


def _html(text: str, folder: Path) -> str:
    """The text as HTML; the file of a picture becomes a part of it."""

    def embedded(match: re.Match) -> str:
        return f'src="data:image/svg+xml;base64,{base64.b64encode((folder / match[1]).read_bytes()).decode()}"'

    return re.sub(r'src="([^":]+\.svg)"', embedded, markdown.markdown(text, extensions=["tables", "fenced_code"]))


def page(found: list[Slide]) -> str:
    """The HTML page."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("slides.html").render(slides=found)


def main() -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument("--output", type=Path, default=PAGE, help="the HTML file to write (default: slides/slides.html)")
    output = writable_file(parser.parse_args().output, "--output")
    found = slides(SOURCE)
    write_text(output, page(found))
    print(f"written: {output} ({len(found)} slides)")


if __name__ == "__main__":
    cli.command(main)
