"""The tables in the documents: generated between markers, from formulas or from the files in results/.

    <!-- section: FILE...#ANCHOR -->      a section of the report on a file; several files (or a pattern, `*.json`) are joined
    <!-- table: NAME PATH... -->          a table that joins files of several kinds, or comes from formulas
    <!-- picture: NAME PATH... -->        a picture, whose file is in pictures/

A section ends at `<!-- /section -->`, and so on. Everything between two markers is overwritten:

    python -m common.documents            # rewrites every document
    python -m common.documents --check    # changes nothing; exit code 1 and a line for each document that is out of date
"""

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path

from common import ROOT, cli
from common.documents import appendix, architecture, concepts, lab_dashboard, reference, sections
from common.documents import pictures as drawings
from common.documents import result_tables as results
from common.documents.pictures import Picture
from common.errors import RunError, UsageError
from common.files import write_text

MARKED = re.compile(r"(<!-- (section|table|picture): ([\w./*# -]+?) -->\n).*?(<!-- /\2 -->)", re.DOTALL)
# By the name in a marker: functions of the marker's paths. A table's returns Markdown.
TABLES: dict[str, Callable[..., str]] = lab_dashboard.TABLES | {function.__name__: function for function in (
    architecture.presets, architecture.shapes, architecture.parameters, architecture.forward_flops, architecture.states,
    architecture.activations, architecture.quadratic, architecture.intensity, architecture.balance, architecture.limits,
    architecture.fusion, appendix.fusion_bytes, appendix.intensities, appendix.attention_io, appendix.memory_saved,
    appendix.launches, appendix.amdahl, appendix.optimizer, appendix.profiler_cost, results.training,
    results.phases, results.spans, results.ceilings, results.efficiency, results.trials, results.curves, results.number_formats,
    results.format_curves, results.versions_and_peers, results.versions_and_peers_spread, results.lengths, results.weak_scaling,
    results.clocks, concepts.chip, reference.commands,
    reference.all_problems, reference.answers,
)}  # fmt: skip
PICTURES: dict[str, Callable[..., Picture]] = {function.__name__: function for function in (
    drawings.ladder, drawings.memory, drawings.step_spans, drawings.layer_kernels, drawings.fusions, drawings.kernel_rates,
    drawings.scaling_efficiency, concepts.roofline, concepts.timeline, concepts.causal_tiles,
)}  # fmt: skip


def documents() -> list[Path]:
    """All Markdown files of the repository."""
    paths = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
    return sorted(ROOT / path for path in paths if not any(part.startswith(".") for part in path.parts))


def refreshed(text: str, folder: Path = ROOT) -> str:
    """The text of a document in `folder` with its tables made anew and links to its pictures. UsageError: a name is unknown."""

    def replace(match: re.Match) -> str:
        opening, kind, named, closing = match.groups()
        if kind == "section":
            patterns, _, anchor = named.partition("#")
            return f"{opening}\n{sections.section(anchor, *(ROOT / pattern for pattern in patterns.split()))}\n{closing}"
        name, *arguments = named.split()
        known = TABLES if kind == "table" else PICTURES
        if name not in known:
            raise UsageError(f"no {kind} is called {name}; there are {', '.join(sorted(known))}")
        paths = tuple(ROOT / argument for argument in arguments)
        if kind == "table":
            content = TABLES[name](*paths)
        else:
            shown = picture(name, paths)
            content = f"![{shown.description}]({Path(os.path.relpath(file_of(shown), folder)).as_posix()})\n"
        return f"{opening}\n{content}\n{closing}"

    return MARKED.sub(replace, text)


def file_of(picture: Picture) -> Path:
    return ROOT / "pictures" / f"{picture.name}.svg"


@functools.cache
def picture(name: str, paths: tuple[Path, ...]) -> Picture:
    """A picture of these files, which are read once: both the document and the picture's own file need it."""
    return PICTURES[name](*paths)


def pictures(text: str) -> list[Picture]:
    """The pictures that a document shows."""
    shown = [named.split() for _, kind, named, _ in (match.groups() for match in MARKED.finditer(text)) if kind == "picture"]
    return [picture(name, tuple(ROOT / path for path in paths)) for name, *paths in shown]


def main() -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument("--check", action="store_true", help="only say what is out of date")
    check, stale = parser.parse_args().check, {}
    for path in documents():
        text = path.read_text(encoding="utf-8")
        if (new := refreshed(text, path.parent)) != text:
            stale[path] = new
        outdated = (picture for picture in pictures(text) if not picture.is_current(file_of(picture)))
        stale |= {file_of(picture): picture.drawn() for picture in outdated}
    for path, content in stale.items():
        if not check:
            path.parent.mkdir(exist_ok=True)
            write_text(path, content)
        print(f"{'out of date' if check else 'rewritten'}: {path.relative_to(ROOT)}")
    if check and stale:
        raise RunError("run python -m common.documents")
