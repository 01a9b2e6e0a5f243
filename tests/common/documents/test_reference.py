"""The table of commands: what counts as one, and that none is missing."""

import re

from common.documents import reference
from common.errors import UsageError
from tests.conftest import ROOT, cells

import pytest


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A repository with one command of each kind, and one file of each kind that is none."""
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    guard = '\nif __name__ == "__main__":\n    pass\n'
    files = {
        "Makefile": "all: main ## make all, and more\nmain:\n\ttrue\n",
        "setup.sh": "#!/bin/sh\n# Makes it.\n#\n#     sh setup.sh\ntrue\n",
        "common/tool.py": f'"""Checks it. Slowly.\n\n    python -m common.tool\n"""\n{guard}',
        "common/part.py": f'"""Runs as a child."""\n{guard}',
        "common/room/__main__.py": '"""Writes it."""\n',
        "version1_x/run.py": f'"""Runs\nit. And more."""\n{guard}',
        "version1_x/module.py": '"""Is imported."""\n',
        "version1_x/all.sh": "#!/usr/bin/env bash\n# Runs all, twice:\n#\n#     bash all.sh\n",
        "version1_x/part.sh": "# shellcheck shell=bash\n# Is sourced.\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)


def test_a_command_stands_beside_its_first_sentence(small):
    assert re.findall(r"^- `([^`]+)`: (.*)$", reference.commands(), re.MULTILINE) == [
        ("make all", "Make all, and more."),
        ("bash setup.sh", "Makes it."),
        ("python -m common.room", "Writes it."),
        ("python -m common.tool", "Checks it."),
        ("bash all.sh", "Runs all, twice."),
        ("python run.py", "Runs it."),
    ]


def test_a_script_that_a_version_before_has_too_is_only_named(small, tmp_path):
    (tmp_path / "version2_x").mkdir()
    (tmp_path / "version2_x/run.py").write_text((tmp_path / "version1_x/run.py").read_text())
    assert reference.commands().endswith("In `version2_x/`:\n\n- as in a version before: `python run.py`\n")


def test_no_command_is_missing_and_each_has_a_purpose():
    """Each script with a guard in its last lines, and each shell script, of the version folders."""
    listed = {(command.folder, command.line.split()[-1]) for command in reference.all_commands()}
    scripts = [path for path in ROOT.glob("version*_*/**/*.py") if '\nif __name__ == "__main__":\n' in path.read_text()]
    scripts += [path for path in ROOT.glob("version*_*/**/*.sh") if path.read_text().startswith("#!")]
    elsewhere = {"handouts"}  # a copy that make_handouts.py writes
    expected = {(path.parent, path.name) for path in scripts if not elsewhere & {*path.relative_to(ROOT).parts[:-1]}}
    assert len(expected) > 50 and expected <= listed
    assert all(command.purpose.endswith((".", "?", '."')) for command in reference.all_commands())


def test_every_target_of_make_is_listed():
    shown = {command.line for command in reference.all_commands() if command.line.startswith("make ")}
    phony = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY: help"))
    assert shown == {f"make {target}" for target in phony.split()[1:]}


# ---------------------------------------------------------------------------------------------------------------- problems

PAGE = """# Exercise 1: words

```bash
## Problem (code): not a heading
```

## Problem (first): how it starts

*10 min on a laptop, 8 min on a GPU. Must. Needs nothing before.*

### Problem 2 (flat)

*15 min on a laptop, 20 min on a
GPU. Optional. After (first), and (setup) of exercise 1.*
{more}
"""


def write_page(folder, more: str = "") -> None:
    page = folder / "version1_x/exercises/lab/page.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(PAGE.format(more=more))


def test_problems_are_headings_with_a_line_of_minutes(small, tmp_path):
    write_page(
        tmp_path,
        "\n## Problem (third): how it ends\n\n*3 min on a laptop, 4 min on a GPU. Must. After (flat) or [a page](../x.md#y).*\n",
    )
    found = [problem[1:] for problem in reference.problems()]
    assert found == [
        ("", "first", "how it starts", "problem-first-how-it-starts", 10, 8, True, "Needs nothing before"),
        ("2", "flat", "", "problem-2-flat", 15, 20, False, "After (first), and (setup) of exercise 1"),
        ("", "third", "how it ends", "problem-third-how-it-ends", 3, 4, True, "After (flat) or a page"),
    ]
    (row,) = cells(reference.all_problems())[1:]
    must, optional = (re.findall(r"\[\((\w+)\)\]\([^)]+\) (\d+)", cell) for cell in row[1:])
    assert (must, optional) == ([("first", "10"), ("third", "3")], [("flat", "15")])


def test_a_problem_without_minutes_is_refused(small, tmp_path):
    write_page(tmp_path, "\n### Problem 3: no time\n\nText.\n")
    with pytest.raises(UsageError, match="page.md: Problem 3: no time: no line such as"):
        reference.problems()
