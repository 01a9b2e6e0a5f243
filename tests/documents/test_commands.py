"""The list of commands: what counts as one, and that none is missing."""

import re

from documents import commands
from tests.conftest import ROOT

import pytest


def program(purpose: str) -> str:
    return f'"""{purpose}"""\n\nif __name__ == "__main__":\n    main()\n'


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A repository with one command of each kind, and one file of each kind that is none."""
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    files = {
        "Makefile": "all: main ## make all, and more\nmain:\n\ttrue\n",
        "setup.sh": "#!/bin/sh\n# Makes it.\n#\n#     sh setup.sh\ntrue\n",
        "version1_x/tiny_llama_v1.py": program("Version 1: plain."),
        "version1_x/run.py": program("Runs\nit. And more."),
        "version1_x/module.py": '"""Is imported."""\n',
        "version1_x/all.sh": "#!/bin/sh\n# Runs all, twice:\n#\n#     sh all.sh\ntrue\n",
        "version1_x/part.sh": "# Is sourced.\n",
        "version2_x/tiny_llama_v2.py": program("Version 2: fused."),
        "version2_x/run.py": program("Runs it."),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)


def test_a_command_stands_beside_its_purpose(small):
    """A script that an earlier version has too stands there alone."""
    assert re.findall(r"^- (.*)$", commands.commands(), re.MULTILINE) == [
        "`make all`: make all, and more",
        "`bash setup.sh`: Makes it.",
        "`bash all.sh`: Runs all, twice.",
        "`python run.py`: Runs it.",
        "`python tiny_llama_v1.py`: Version 1: plain.",
        "`python tiny_llama_v2.py`: Version 2: fused.",
    ]


def test_no_command_is_missing_and_each_has_a_purpose():
    listed = set(commands.scripts())
    expected = {
        path
        for path in ROOT.glob("version*_*/*.py")
        if '\nif __name__ == "__main__":\n' in path.read_text()
    }
    expected |= {path for path in ROOT.glob("version*_*/*.sh") if path.read_text().startswith("#!")}
    assert len(expected) > 40 and expected <= listed
    assert all(commands.purpose(path).endswith((".", "?", '."')) for path in listed)
