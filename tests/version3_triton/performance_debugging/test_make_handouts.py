"""Handouts of the stages: they train with the stages' numbers, and their text does not tell the
cause.
"""

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import stages
from tests.conftest import ROOT, needs_interpreter
from tests.version3_triton.performance_debugging.conftest import FOLDER, NAMES, SMALL
from tracepage.files import read_json

import make_handouts
import pytest

LETTERS = list(make_handouts.STAGES)
TELLING = re.compile(
    r"broken|slow|fake|optimi[sz]ed|fast|not_training|fixed|caveat|contiguous|synchroni[sz]|initiali[sz]"
)


@pytest.fixture
def folder(tmp_path, execute) -> Path:
    """In a folder that looks like a clone."""
    (tmp_path / "common").symlink_to(ROOT / "common")
    execute(FOLDER / "make_handouts.py", "--output-dir", "handouts", check=0)
    return tmp_path / "handouts"


def source_of(letter: str) -> Path:
    return FOLDER / f"{NAMES[f'stage{make_handouts.STAGES[letter]}']}.py"


def test_no_name_and_no_line_of_a_handout_tells(folder):
    assert sorted(path.name for path in folder.glob("stage_*")) == [
        f"stage_{letter}.py" for letter in "abcdef"
    ]
    for path in folder.glob("[sk]*_?.py"):
        text = path.read_text()
        told = TELLING.findall(text if path.stem.startswith("stage") else path.stem)
        assert not told, (path.name, told)
        comments = [
            token
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type == tokenize.COMMENT
        ]
        documented = [
            node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)
        ]
        assert not comments and not documented, path.name
    for letter in LETTERS:
        report = ast.get_docstring(ast.parse(source_of(letter).read_text()))
        assert not set(report.splitlines()) & set(
            (folder / f"stage_{letter}.py").read_text().splitlines()
        ) - {""}


@pytest.mark.parametrize("letter", LETTERS)
def test_a_handout_trains_with_the_numbers_of_its_stage(folder, letter, execute, no_kernels):
    losses = []
    for number, path in enumerate((source_of(letter), folder / f"stage_{letter}.py")):
        skip = ["--skip-check"] if make_handouts.STAGES[letter] == 6 else []
        execute(path, *SMALL, *skip, "--metrics-out", f"{number}.json")
        losses.append(read_json(folder.parent / f"{number}.json")["loss"]["all"])
    assert losses[0] == losses[1]
    assert "--fixed" in execute(folder / f"stage_{letter}.py", "--fixed", check=2).err


@pytest.mark.parametrize("letter", LETTERS)
def test_a_handout_finds_the_clone_around_it(folder, letter):
    """In a plain process, in which nothing else says where the packages are."""
    for package in ("studies", "tracepage", "version3_triton"):
        (folder.parent / package).symlink_to(ROOT / package)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, folder / f"stage_{letter}.py", "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"stage_{letter}.py --diagnose" in done.stdout


@needs_interpreter
@pytest.mark.skipif(not stages.kernels.HAS_TRITON, reason="needs Triton")
def test_a_handout_runs_alone_with_its_kernel(folder, run_script, monkeypatch):
    """In a process that has only the folder of the handouts, in Triton's interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    [letter] = [letter for letter in LETTERS if make_handouts.STAGES[letter] == 6]
    assert "norm_kernel" in (folder / f"stage_{letter}.py").read_text()
    sizes = ("--num-layers", "1", "--seq-len", "8", "--batch-size", "1", "--num-steps", "1")
    run_script(
        folder / f"stage_{letter}.py", *SMALL, *sizes, "--skip-check", "--metrics-out", "run.json"
    )
    record = read_json(folder.parent / "run.json")
    assert record["status"] == "completed" and record["stage"]["updated"] == 1
