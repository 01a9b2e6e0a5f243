"""The documents tell the truth: tables are fresh, paths exist, and commands are accepted; test_walk.py runs them."""

import ast
import collections
import contextlib
import functools
import io
import itertools
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from common.documents import reference, rewrite
from tests.conftest import ROOT
from tests.pages import CALL, LINK, TESTS, V2, commands

import pytest

VERSIONS = sorted({path.parent for path in ROOT.glob("version*/tiny_llama_v*.py")}, reverse=True)
DOCUMENTS = rewrite.documents()
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
ANCHORED_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#([^)]+)\)")
ANCHOR = re.compile(r'<a id="([\w-]+)"></a>')
PATH = re.compile(r"(?:\.\./)*\b(?:common|tests|results)/(?!NAME)[\w./-]*\w(?![\w*{$])")
MODULE = re.compile(r"\bcommon(?:\.\w+)+(?!\.md)")
PYTHON = re.compile(r'^python -c "(.*)"$', re.MULTILINE)
RECORDED = re.compile(r"\bresults/\S+\.(?:json|gz)\b|\btests/fixtures/")
# Scripts that hand flags which are not theirs to a version.
HAND_ON = (
    "validate_numerical_accuracy.py", "optimize_batch_size.py", "run_all_profilers.sh", "run_rocprofv3.sh", "run_rocprof_sys.sh",
    "run_rocprof_compute.sh", "run_rocprof_triton.sh",
)  # fmt: skip


def calls(line: str) -> list[list[str]]:
    """[script, arguments...] of each `python script.py`, `torchrun ... script.py` and `bash script.sh` in a shell line.

    A command after `--` is a call of its own.
    """
    return [shlex.split(call) for part in re.split(r" -- (?=python|bash|torchrun)", line) for call in CALL.findall(part)]


def find_script(document: Path, script: str) -> Path | None:
    """As seen from the document's folder, from the version folder above it, or else from the newest version that has it."""
    above = [folder for folder in VERSIONS if folder in document.parents]
    return next((folder / script for folder in (document.parent, *above, *VERSIONS) if (folder / script).is_file()), None)


@functools.cache
def flags(script: Path) -> frozenset[str]:
    """All that its --help names. A Python script runs in this process, which has imported PyTorch already."""
    if script.suffix == ".sh":
        shown = subprocess.run(["bash", str(script), "--help"], capture_output=True, text=True, check=True).stdout
    else:
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
            patch.setattr(sys, "argv", [str(script), "--help"])
            with contextlib.suppress(SystemExit):
                runpy.run_path(str(script), run_name="__main__")
        shown = output.getvalue()
    known = frozenset(re.findall(r"--[\w-]+", shown))
    return known | flags(V2 / "tiny_llama_v2.py") if script.name in HAND_ON else known


@each_document
def test_generated_tables_are_fresh(document):
    text = document.read_text(encoding="utf-8")
    assert rewrite.refreshed(text, document.parent) == text, "run python -m common.documents"


def test_each_table_and_picture_stands_on_one_page():
    """Another page links it. The slides repeat some."""
    text = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS if path.parent.name != "slides")
    markers = collections.Counter(marked[1].strip() for marked in rewrite.MARKED.finditer(text))
    assert [marker for marker, times in markers.items() if times > 1] == []


def anchors(document: Path) -> set[str]:
    """Its anchors, and those that GitHub makes of its headings."""
    text = document.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {reference.anchor(heading) for heading in headings} | set(ANCHOR.findall(text))


@each_document
def test_links_lead_to_files_and_anchors_that_exist(document):
    text = document.read_text(encoding="utf-8")
    for target in LINK.findall(text):
        assert (document.parent / target).exists(), target
    for target, anchor in ANCHORED_LINK.findall(text):
        assert anchor in anchors(document.parent / target if target else document), f"{target}#{anchor}"


LOOKED_UP = ("CHANGELOG", "COMMANDS", "CONTRIBUTING", "INSTRUCTOR", "INSTRUCTOR_GUIDE", "LOG", "TECHNICAL_APPENDICES", "slides")


def next_pages(document: Path) -> list[Path]:
    """The pages that its last paragraph links, if it begins with "Next:"."""
    last = document.read_text(encoding="utf-8").rstrip().rpartition("\n\n")[2]
    return [(document.parent / target).resolve() for target in LINK.findall(last) if last.startswith("Next: ")]


@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if path.stem not in LOOKED_UP], ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_page_that_is_read_in_order_ends_with_what_follows(document):
    assert next_pages(document)
    if document.parent in VERSIONS[1:] and document.name == "README.md":
        assert next_pages(document)[0].parent == VERSIONS[VERSIONS.index(document.parent) - 1]


@each_document
def test_pictures_are_current_and_load_fast(document):
    for picture in rewrite.pictures(document.read_text(encoding="utf-8")):
        path = rewrite.file_of(picture)
        assert picture.is_current(path), f"{path}: run python -m common.documents"
        assert path.stat().st_size < 150_000, path


def test_every_term_is_in_the_glossary():
    """Each term that CONCEPTS.md explains, and no other, and each once."""
    text, before, glossary = (ROOT / "CONCEPTS.md").read_text(encoding="utf-8").partition("\n## Glossary\n")
    listed = re.findall(r"^\| \[[^]]+\]\(#([\w-]+)\) \|", before + glossary, re.MULTILINE)
    assert listed and sorted(listed) == sorted(ANCHOR.findall(text))


@pytest.mark.parametrize(
    "document", [ROOT / "README.md", *(folder / "README.md" for folder in VERSIONS)], ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_readme_links_the_concepts(document):
    linked = [anchor for target, anchor in ANCHORED_LINK.findall(document.read_text()) if target.endswith("CONCEPTS.md")]
    assert set(linked) & set(ANCHOR.findall((ROOT / "CONCEPTS.md").read_text()))


@each_document
def test_named_files_and_modules_exist(document):
    text = document.read_text(encoding="utf-8")
    for path in PATH.findall(text):
        assert any((base / path).exists() for base in (document.parent, ROOT, *VERSIONS)), path
    for name in MODULE.findall(text):
        assert pkgutil.resolve_name(name), name
    for code in PYTHON.findall(text):
        imports = [node for node in ast.parse(code).body if isinstance(node, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), document.name, "exec"), {})


def test_documented_scripts_and_flags_exist():  # one test, so that each script is asked for its flags once
    for document, line in [(path, line) for path in DOCUMENTS for line in commands(path)]:
        place = f"in {document.relative_to(ROOT)}: {line}"
        for script, *arguments in calls(line):
            path = find_script(document, script)
            assert path, f"no {script}, {place}"
            unknown = {argument.split("=")[0] for argument in arguments if argument.startswith("--")} - flags(path) - {"--"}
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
            if block.startswith("bash\n") and output.startswith("text\n") and all(RECORDED.search(line) for line in lines):
                yield document, "\n".join(lines), output.removeprefix("text\n")


@pytest.mark.parametrize("document, script, shown", [*shown_of_recorded_files()], ids=lambda value: getattr(value, "stem", ""))
def test_an_output_that_a_page_shows_of_recorded_files_is_what_its_commands_print(document, script, shown, tmp_path):
    script = script.replace("python ", f"{shlex.quote(sys.executable)} ").replace("--output-dir ", f"--output-dir {tmp_path}/")
    folder = next((folder for folder in VERSIONS if folder in document.parents), ROOT)
    done = subprocess.run(["bash", "-ec", script], cwd=folder, capture_output=True, text=True, check=True)
    printed = {" ".join(line.split()) for line in done.stdout.splitlines()}
    assert {" ".join(line.split()) for line in shown.splitlines()} - {""} <= printed


def test_there_are_such_outputs():
    assert len([*shown_of_recorded_files()]) >= 2
