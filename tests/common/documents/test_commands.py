"""The list of commands: what counts as one, and that none is missing."""

import re

from common.documents import commands
from tests.conftest import ROOT

import pytest


def parser(purpose: str, *flags: str) -> str:
    lines = "\n".join(f'    parser.add_argument("{flag}")' for flag in flags)
    head = f'"""{purpose}"""\nimport argparse\n\nif __name__ == "__main__":\n'
    return f"{head}    parser = argparse.ArgumentParser(description=__doc__)\n{lines}\n    parser.parse_args()\n"


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A repository with one command of each kind, and one file of each kind that is none."""
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    files = {
        "Makefile": "all: main ## make all, and more\nmain:\n\ttrue\n",
        "setup.sh": "#!/bin/sh\n# Makes it.\n#\n#     sh setup.sh\ntrue\n",
        "version1_x/tiny_llama_v1.py": parser("Version 1: plain.", "--seed", "--steps"),
        "version1_x/run.py": parser("Runs\nit. And more.", "--seed", "--top", "--enable-x", "--disable-x"),
        "version1_x/module.py": '"""Is imported."""\n',
        "version1_x/all.sh": "#!/bin/sh\n# Runs all, twice:\n#\n#     sh all.sh\ntrue\n",
        "version1_x/part.sh": "# Is sourced.\n",
        "version2_x/tiny_llama_v2.py": parser("Version 2: fused.", "--seed", "--steps", "--fuse"),
        "version2_x/run.py": parser("Runs it."),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    commands.help_of.cache_clear()


def test_a_command_stands_beside_its_purpose_and_its_own_flags(small):
    """Flags of training stand once, at the version that has them first; a script of an earlier version stands there alone."""
    assert re.findall(r"^- (.*)$", commands.commands(), re.MULTILINE) == [
        "`make all`: make all, and more",
        "`bash setup.sh`: Makes it.",
        "`bash all.sh`: Runs all, twice.",
        "`python run.py`: Runs it. `--top --enable-x`",
        "`python tiny_llama_v1.py`: Version 1: plain. `--seed --steps`",
        "`python tiny_llama_v2.py`: Version 2: fused. `--fuse`",
    ]


def test_no_command_is_missing_and_each_has_a_purpose():
    listed = set(commands.scripts())
    expected = {path for path in ROOT.glob("version*_*/**/*.py") if '\nif __name__ == "__main__":\n' in path.read_text()}
    expected |= {path for path in ROOT.glob("version*_*/**/*.sh") if path.read_text().startswith("#!")}
    expected = {path for path in expected if not {"common", "handouts", "tests"} & {*path.relative_to(ROOT).parts}}
    assert len(expected) > 40 and expected <= listed
    assert all(commands.purpose(path).endswith((".", "?", '."')) for path in listed)
