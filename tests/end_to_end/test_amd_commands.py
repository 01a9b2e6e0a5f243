"""Every command line of AMD's profilers in a page, a script or a message is one that a ROCm release takes, and says which."""

import contextlib
import io
import re
from pathlib import Path

from common.documents import rewrite
from tests.amd_options import COMPUTE, RELEASES, TOOLS, Parser
from tests.conftest import ROOT

import pytest

PROGRAMS = [
    path for folder in ("common", "version*", "slurm", "results") for path in sorted(ROOT.glob(f"{folder}/**/*.[ps][yh]"))
]
FILES = [path for path in [*rewrite.documents(), *PROGRAMS] if "rocprof" in path.read_text(encoding="utf-8")]
COMMAND = re.compile(rf"(?:^|[\s(]){'(' + '|'.join(TOOLS) + ')'}((?: -[^`]*)?)$")
OLDEST = RELEASES[0]


def sections(path: Path) -> list[str]:
    """Of a page, by its headings; any other file is one. Of a shell script the comments: test_profiler_scripts.py runs it."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return re.split(r"^#+ ", text, flags=re.MULTILINE)
    return [text if path.suffix == ".py" else "\n".join(re.findall(r"^ *# ?(.*)", text, re.MULTILINE))]


def commands(section: str) -> list[tuple[str, list[str]]]:
    """(tool, options) of its lines and of its code in backticks, each up to the program that is profiled."""
    code = [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", section)]
    pieces = [piece for part in [*code, *section.splitlines()] for piece in part.split('"')]
    found = [COMMAND.search(re.split(r" -- | --$|  #|;", piece)[0].rstrip()) for piece in pieces]
    return [(match[1], [word.rstrip(".,:)'") for word in match[2].split()]) for match in found if match and match[2]]


def accepted(tool: str, words: list[str], release: str) -> bool:
    """Words that are no options and no values of one belong to the sentence around the command."""
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            unknown = Parser(tool, release).parse_known_args(words)[1]
        except SystemExit:
            return False
    return not any(word.startswith("-") for word in unknown)


def names(section: str, release: str, tool: str) -> bool:
    """Whether a section names the release, as ROCm's or as rocprof-compute's own."""
    own = [COMPUTE[release]] if tool.startswith("rocprof-compute") and release in COMPUTE else []
    return any(re.search(rf"(?<![\d.]){re.escape(number)}(?![\d]|\.[1-9])", section) for number in (release, *own))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_release_takes_each_command_and_is_named_beside_it_if_it_is_not_the_oldest(path):
    for section in sections(path):
        for tool, words in commands(section):
            taking = [release for release in RELEASES if accepted(tool, words, release)]
            assert taking, f"no release takes {tool} {words}"
            assert taking[0] == OLDEST or names(section, taking[0], tool), f"say that {tool} {words} needs {taking[0]}"
            if taking[-1] != RELEASES[-1]:
                ended = RELEASES[RELEASES.index(taking[-1]) + 1]
                assert names(section, ended, tool), f"say that {tool} {words} is refused since {ended}"
