"""The documents tell the truth: generated parts are fresh, paths exist, and commands are accepted;
test_walk.py runs them.
"""

import itertools
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from documents import rewrite
from tests.conftest import ROOT
from tests.pages import CALL, LINK, TESTS, commands, help_of

import pytest

VERSIONS = sorted({path.parent for path in ROOT.glob("version*/tiny_llama_v*.py")}, reverse=True)
DOCUMENTS = rewrite.documents()
each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)
ANCHORED_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#([^)]+)\)")
PATH = re.compile(
    r"(?:\.\./)*\b(?:tracepage|common|studies|documents|tests|results)/(?!NAME)[\w./-]*\w(?![\w*{$[])"
)
LOSE = "version4_ultra_fused/exercises/exercise1_ultra_fusion.md"
MODULE = re.compile(r"\b(?:tracepage|common|studies|documents)(?:\.\w+)+(?!\.md)")
RECORDED = re.compile(r"\.\./results/\S+\.(?:json|gz)\b|\.\./tests/fixtures/")
# Scripts that hand flags which are not theirs to a version.
HAND_ON = (
    "validate_numerical_accuracy.py",
    "optimize_batch_size.py",
    "run_all_profilers.sh",
    "run_rocprof*.sh",
)


def calls(line: str) -> list[list[str]]:
    """[script, arguments...] of each `python script.py`, `torchrun ... script.py` and `bash
    script.sh` in a shell line.

    A command after `--` is a call of its own.
    """
    return [
        shlex.split(call)
        for part in re.split(r" -- (?=python|bash|torchrun)", line)
        for call in CALL.findall(part)
    ]


def find_script(document: Path, script: str) -> Path | None:
    """As seen from the document's folder, from the version folder above it, or else from the newest
    version that has it.
    """
    above = [folder for folder in VERSIONS if folder in document.parents]
    return next(
        (
            folder / script
            for folder in (document.parent, *above, *VERSIONS)
            if (folder / script).is_file()
        ),
        None,
    )


def flags(script: Path) -> set[str]:
    """All that its --help names."""
    found = set(re.findall(r"--[\w-]+", help_of(script)))
    return (
        found | flags(VERSIONS[0] / "tiny_llama_v4.py") | {"--disable-flash-attention"}
        if any(map(script.match, HAND_ON))
        else found
    )


@each_document
def test_generated_parts_are_fresh_and_pictures_load_fast(document):
    text = document.read_text(encoding="utf-8")
    assert rewrite.refreshed(text, document.parent) == text, "run python -m documents"
    for picture in rewrite.shown_in(text):
        path = rewrite.file_of(picture)
        assert picture.is_current(path), f"{path}: run python -m documents"
        assert path.stat().st_size < 150_000, path


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(document: Path) -> set[str]:
    """Its anchors, and those that GitHub makes of its headings: lower case, without punctuation,
    hyphens for spaces.
    """
    text = document.read_text(encoding="utf-8")
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE
    )
    return {slug(heading) for heading in headings} | set(re.findall(r'<a id="([\w-]+)"></a>', text))


@each_document
def test_links_lead_to_files_and_anchors_that_exist(document):
    text = document.read_text(encoding="utf-8")
    for target in LINK.findall(text):
        assert (document.parent / target).exists(), target
    for target, anchor in ANCHORED_LINK.findall(text):
        assert anchor in anchors(document.parent / target if target else document), (
            f"{target}#{anchor}"
        )


@each_document
def test_named_files_and_modules_exist(document):
    text = document.read_text(encoding="utf-8")
    for path in PATH.findall(text):
        assert any((base / path).exists() for base in (document.parent, ROOT, *VERSIONS)), path
    for name in MODULE.findall(text):
        assert pkgutil.resolve_name(name), name


def test_every_picture_is_shown():
    shown = {
        name
        for path in DOCUMENTS
        for name in re.findall(r"pictures/([\w-]+\.\w+)", path.read_text(encoding="utf-8"))
    }
    assert {path.name for path in (ROOT / "pictures").iterdir()} == shown


# one test, so that each script is asked for its flags once
def test_documented_scripts_and_flags_exist():
    pytest.importorskip("triton", reason="needs Triton")
    for document, line in [(path, line) for path in DOCUMENTS for line in commands(path)]:
        place = f"in {document.relative_to(ROOT)}: {line}"
        for script, *arguments in calls(line):
            path = find_script(document, script)
            assert path, f"no {script}, {place}"
            unknown = (
                {argument.split("=")[0] for argument in arguments if argument.startswith("--")}
                - flags(path)
                - {"--"}
            )
            assert not unknown, f"{unknown} {place}"
        for script, chosen in TESTS.findall(line):
            path = find_script(document, script)
            assert path, f"no {script}, {place}"
            assert f"def test_{chosen}" in path.read_text(), f"no test is called {chosen}, {place}"
        if line.startswith("make "):
            target = line.split()[1]
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), place


def shown_of_recorded_files() -> Iterator[tuple[Path, str, str]]:
    """Page, commands and shown output where all commands of a block read files of the repository."""
    for document in DOCUMENTS:
        blocks = document.read_text().split("```")[1::2]
        for block, output in itertools.pairwise(blocks):
            lines = block.splitlines()[1:]
            if (
                block.startswith("bash\n")
                and output.startswith("text\n")
                and all(RECORDED.search(line) for line in lines)
            ):
                yield document, "\n".join(lines), output.removeprefix("text\n")


@pytest.mark.parametrize(
    "document, script, shown",
    [*shown_of_recorded_files()],
    ids=lambda value: getattr(value, "stem", ""),
)
def test_an_output_shown_of_recorded_files_is_what_its_commands_print(
    document, script, shown, tmp_path
):
    script = script.replace("python ", f"{shlex.quote(sys.executable)} ").replace(
        "--output-dir ", f"--output-dir {tmp_path}/"
    )
    folder = next(folder for folder in VERSIONS if folder in document.parents)
    done = subprocess.run(
        ["bash", "-ec", script], cwd=folder, capture_output=True, text=True, check=True
    )
    printed = {" ".join(line.split()) for line in done.stdout.splitlines()}
    assert {" ".join(line.split()) for line in shown.splitlines()} - {""} <= printed


def problem(page: Path, anchor: str) -> str:
    """The text of a problem from its heading on."""
    text = page.read_text(encoding="utf-8")
    [start] = [
        found.end()
        for found in re.finditer(r"^## (.*)$", text, re.MULTILINE)
        if slug(found[1]) == anchor
    ]
    return text[start:]


def rows_of_table(text: str, first: str) -> list[list[str]]:
    """The cells of the table whose first heading is `first`, without its headings."""
    table = text.partition(f"\n| {first} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]


def test_the_route_of_four_hours_adds_up_and_has_the_minutes_of_its_problems():
    total = 0
    for stop, reading, problems, minutes in rows_of_table(
        (ROOT / "README.md").read_text(encoding="utf-8"), "stop"
    ):
        own = [
            (page, anchor, int(number))
            for page, anchor, number in re.findall(r"\]\(([^)#]+)#([^)]+)\) (\d+)", problems)
        ]
        for page, anchor, number in own:
            assert problem(ROOT / page, anchor).lstrip().startswith(f"*{number} min on a laptop"), (
                anchor
            )
        assert int(reading) + sum(number for *_, number in own) == int(minutes), stop
        total += int(minutes)
    assert total == 4 * 60


def minutes_in(cell: str) -> int:
    """The sum of a cell's numbers, without those that name a problem."""
    return sum(map(int, re.findall(r"\d+", re.sub(r"\(\w+\)|problem \d", "", cell))))


def test_the_instructors_agendas_add_up_and_have_the_minutes_of_the_problems():
    """So do the slides."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in DOCUMENTS)
    known = set(
        re.findall(
            r"^##+ Problem (?:\d )?\((\w+)\).*\n+\*(\d+) min on a laptop", pages, re.MULTILINE
        )
    )
    guide = (ROOT / "INSTRUCTOR_GUIDE.md").read_text(encoding="utf-8")
    for text in (guide, (ROOT / "slides/slides.md").read_text(encoding="utf-8")):
        named = set(re.findall(r"\((\w+)\),? (\d+)", text))
        assert named and named <= known
    clock = 0
    for start, minutes, block, talk, problems in rows_of_table(guide, "start"):
        assert start == f"{clock // 60}:{clock % 60:02}"
        assert block == "Break" or int(minutes) == int(talk) + minutes_in(problems), block
        clock += int(minutes)
    assert clock == 4 * 60
    whole_day = sum(minutes_in(cell) for _, cell in rows_of_table(guide, "block"))
    assert f"## A full day: {whole_day} minutes\n" in guide


def numbers(text: str) -> set[str]:
    """Numbers with a unit of the measurements, and those that fill a cell of a table."""
    return set(re.findall(r"(\d[\d,]*(?:\.\d+)?)(?:%| ms\b| us\b| kernels\b|(?= \|))", text))


@pytest.mark.parametrize("version", VERSIONS, ids=lambda folder: folder.name)
def test_the_story_of_a_version_has_the_numbers_of_the_tables(version):
    """Or what they round to, or a product or quotient that the page writes out. Tables of the first
    page, of the appendix, of the log and of (lose) count as well.
    """
    page = (version / "README.md").read_text(encoding="utf-8")
    story = "".join(
        page.partition(f"\n## {part}\n")[2].partition("\n## ")[0]
        for part in ("Measured", "What limits it now")
    )
    shown = [
        page,
        *(
            (ROOT / name).read_text(encoding="utf-8")
            for name in ("README.md", "TECHNICAL_APPENDICES.md", "LOG.md", LOSE)
        ),
    ]
    rows = re.findall(r"^\|.*|host, median of all runs: .* mm\b", "\n".join(shown), re.MULTILINE)
    known = {
        float(number.replace(",", ""))
        for number in re.findall(r"\b\d[\d,]*(?:\.\d+)?", "\n".join(rows))
    }
    for kernels, us in re.findall(r"([\d,]+) x ([\d.]+) us\s+= ", story):
        known.add(float(kernels.replace(",", "")) * float(us) / 1e3)
    for ms, part, whole in re.findall(r"([\d.]+) ms\s+x\s+([\d,]+) / ([\d,]+)\s+= ", story):
        known.add(float(ms) * float(part.replace(",", "")) / float(whole.replace(",", "")))
    for gflop, rate in re.findall(r"([\d,.]+) GFLOP / (\d+)\s+TFLOP/s\s+= ", story):
        ms = float(gflop.replace(",", "")) / float(rate)
        known |= {ms, 1e3 * ms}
    for number in numbers(rewrite.MARKED.sub("", story)):
        _, _, decimals = number.partition(".")
        assert float(number.replace(",", "")) in {round(value, len(decimals)) for value in known}, (
            number
        )
