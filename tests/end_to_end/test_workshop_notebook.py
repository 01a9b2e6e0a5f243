"""The notebook: its cells run in order, in one process, and what it says is there."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT, TINY, V1, finished
from tracepage.files import read_json

import pytest

NOTEBOOK = ROOT / "workshop.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
TEXT = "\n".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")

# Runs the cells of a JSON file one after the other.
RUNNER = """
import json, sys

space = {"__name__": "__main__"}
for number, cell in enumerate(json.load(open(sys.argv[1]))):
    exec(compile(cell, f"cell {number}", "exec"), space)
"""


def in_a_process(cells: list[str], folder: Path, check: int = 0) -> subprocess.CompletedProcess:
    """Runs code cells in a folder, on the CPU."""
    (folder / "cells.json").write_text(json.dumps(cells))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"CUDA_VISIBLE_DEVICES": "-1", "MPLBACKEND": "agg"}
    return finished([sys.executable, "-c", RUNNER, "cells.json"], folder, environment, check)


@pytest.mark.usefixtures("known_ceilings")
def test_every_cell_runs_with_a_small_model(execute, tmp_path, monkeypatch):
    """Here the scripts run in this process, in place of one each."""
    (tmp_path / "common").mkdir()
    (tmp_path / "common/__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    space, printed = {}, []

    def run(script: str, *flags: object) -> None:
        small = (*TINY, "--data", "synthetic") if script == "tiny_llama_v1.py" else ()
        printed.append(execute(V1 / script, *flags, *small).out)

    for cell in CODE:
        exec(compile(cell, "cell", "exec"), space)
        if "run" in space:
            space |= {"run": run, "OUTPUT": tmp_path}
    assert [text.count("\nv1: completed") for text in printed] == [1, 1, 1, 0]
    assert "setup ok: " in printed[0] and re.search(
        r"^attention +[\d.]+ ", printed[3], re.MULTILINE
    )
    assert space["first"]["loss"]["all"] == space["second"]["loss"]["all"]
    assert len(space["first"]["step_ms"]["all"]) == 20
    space["plt"].close("all")


@pytest.fixture
def clone(tmp_path) -> Path:
    """What of the repository the notebook uses, in a folder with a space in its name."""
    folder = tmp_path / "a clone"
    for name in ("common", "tracepage", "studies", "version1_pytorch_baseline"):
        shutil.copytree(
            ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    return folder


@pytest.mark.slow
def test_every_cell_runs_as_written(clone):
    printed = in_a_process(CODE, clone).stdout
    for file in ("first.json", "second.json", "profiled.json"):
        assert read_json(clone / "workshop_notebook" / file)["status"] == "completed"
    assert "setup ok: " in printed and "the same losses, bit for bit: True" in printed
    assert re.search(r"^attention +[\d.]+ ", printed, re.MULTILINE), "no table of spans"
    assert printed.splitlines()[-1].startswith(str(clone / "workshop_notebook/profile/trace_"))


def test_without_a_repository_it_is_cloned(tmp_path):
    source, folder = tmp_path / "source", tmp_path / "folder"
    (source / "common").mkdir(parents=True)
    (source / "common/__init__.py").touch()
    folder.mkdir()
    git = ["git", "-C", str(source), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "a"]):
        subprocess.run([*git, *arguments], check=True)
    assert (
        "put the address to clone from into REPOSITORY"
        in in_a_process(CODE[:1], folder, check=1).stderr
    )

    setup = CODE[0].replace('REPOSITORY = ""', f"REPOSITORY = {f'file://{source}'!r}")
    for _ in range(2):  # the second time it is there
        assert (
            in_a_process([setup], folder).stdout
            == f"repository: {folder / 'tiny-llama-workshop'}\n"
        )


def test_measured_shares_are_those_of_the_appendix():
    appendix = (ROOT / "TECHNICAL_APPENDICES.md").read_text(encoding="utf-8")
    table = appendix.partition("### A.3")[2].partition("<!-- /rows")[0]
    quoted = re.findall(r"([\d.]+)%", TEXT)
    assert quoted and set(quoted) <= set(re.findall(r"[\d.]+", table))


def test_it_is_stored_without_what_a_run_left_and_its_links_lead_somewhere():
    assert not any(
        cell["outputs"] or cell["execution_count"] for cell in CELLS if cell["cell_type"] == "code"
    )
    links = re.findall(r"\]\((?!https?:)([^)#]+)", TEXT)
    assert links and all((ROOT / target).exists() for target in links)
