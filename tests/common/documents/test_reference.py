"""The table of commands: what counts as one, and that none is missing."""

from common.documents import reference
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
    (tmp_path / "version1_x/common").symlink_to("../common")


def test_a_command_stands_beside_its_first_sentence(small):
    assert [row for row in cells(reference.commands()) if row[0] != "command"] == [
        ["`make all`", "Make all, and more."],
        ["`bash setup.sh`", "Makes it."],
        ["`python -m common.room`", "Writes it."],
        ["`python -m common.tool`", "Checks it."],
        ["`bash all.sh`", "Runs all, twice."],
        ["`python run.py`", "Runs it."],
    ]


def test_no_command_is_missing_and_each_has_a_purpose():
    """Each script with a guard in its last lines, and each shell script, of the version folders."""
    listed = {(command.folder, command.line.split()[-1]) for command in reference.all_commands()}
    scripts = [path for path in ROOT.glob("version*_*/**/*.py") if '\nif __name__ == "__main__":\n' in path.read_text()]
    scripts += [path for path in ROOT.glob("version*_*/**/*.sh") if path.read_text().startswith("#!")]
    expected = {(path.parent, path.name) for path in scripts if "common" not in path.relative_to(ROOT).parts[:-1]}
    assert len(expected) > 50 and expected <= listed
    assert all(command.purpose.endswith((".", "?", '."')) for command in reference.all_commands())


def test_every_target_of_make_is_listed():
    shown = {command.line for command in reference.all_commands() if command.line.startswith("make ")}
    phony = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY: help"))
    assert shown == {f"make {target}" for target in phony.split()[1:]}
