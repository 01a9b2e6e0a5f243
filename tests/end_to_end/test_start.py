"""Scripts start from any directory, use the code that they came with, and say in one line what their Python lacks."""

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

from common import loading, progress, terminal
from common.files import read_json
from tests.conftest import ROOT, TINY, finished
from tests.pages import SCRIPTS

import pytest

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"CUDA_VISIBLE_DEVICES": ""}


def start(folder: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess:
    """Python with these arguments, in a folder, where PYTHONPATH names nothing."""
    return finished([sys.executable, *arguments], folder, ENVIRONMENT | environment, check=None, seconds=300)


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of the repository's code, in a folder with a space in its name."""
    folder = tmp_path_factory.mktemp("elsewhere") / "a copy"
    for path in (ROOT / "common", *ROOT.glob("version*_*")):
        shutil.copytree(path, folder / path.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_every_folder_with_scripts_has_some():
    assert {path.parts[0] for path in SCRIPTS} == {path.name for path in ROOT.glob("version*_*")} and len(SCRIPTS) > 30


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_without_torch_it_ends_in_one_line(copy, tmp_path, script):
    """-S leaves out what is installed: torch among other things."""
    done = start(tmp_path, "-S", copy / script, "--help")
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: torch, ") and f"`make setup` in {copy}, " in done.stderr


@pytest.mark.parametrize("script", ["version3_triton/tiny_llama_v3.py", "version4_ultra_fused/tiny_llama_v4.py"])
def test_where_there_is_no_triton_a_version_trains(script, tmp_path):
    """As on macOS."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['triton'] = None\n")
    flags = ("--device", "cpu", *TINY, "--num-steps", 2, "--data", "synthetic")
    done = start(tmp_path, ROOT / script, *flags, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0 and "no Triton kernels: triton is not installed" in done.stderr, done.stderr


def test_ctrl_c_during_imports_is_one_line(copy, tmp_path):
    """A module that is imported early interrupts the process, as Ctrl-C would."""
    (tmp_path / "pydantic.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    done = start(tmp_path, copy / "version1_pytorch_baseline/tiny_llama_v1.py", "--help", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "interrupted\n")


def test_slow_imports_say_what_they_wait_for(monkeypatch, capsys):
    spoken, show = threading.Event(), terminal.Line.show
    monkeypatch.setattr(progress, "SECONDS", 1e-3)
    monkeypatch.setattr(terminal.Line, "show", lambda *text: (show(*text), spoken.set()))
    monkeypatch.setattr(importlib, "import_module", lambda name: spoken.wait(300))
    importlib.reload(loading)
    assert re.match(r"loading PyTorch: \d+ s\n", capsys.readouterr().err)


def test_a_run_from_another_directory_uses_its_own_code_though_another_clone_is_on_the_path(copy, tmp_path):
    """-v names the file of every module."""
    script, flags = copy / "version1_pytorch_baseline/run_pytorch_profiler.py", (*TINY, "--data", "synthetic", "--num-steps", "4")
    done = start(tmp_path, "-v", script, *flags, "--device", "cpu", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-2000:]
    assert read_json(tmp_path / "metrics_v1.json")["status"] == "completed"
    assert str(copy / "version1_pytorch_baseline/tiny_llama_v1.py") in done.stderr
    assert not any(f"{ROOT / name}/" in done.stderr for name in ("common", "version1_pytorch_baseline"))


def test_it_uses_the_code_that_it_came_with(copy, tmp_path):
    done = start(tmp_path, "-v", copy / "version3_triton/exercises/performance_debugging/v3_stage5_optimized.py", "--help")
    assert done.returncode == 0 and "--num-steps" in done.stdout
    assert str(copy / "version3_triton/tiny_llama_v3.py") in done.stderr
    assert str(copy / "version3_triton/kernels/__init__.py") in done.stderr
    assert not any(f"{ROOT / name}/" in done.stderr for name in ("common", "version3_triton"))


@pytest.mark.parametrize("lost", ["link", "folder"])
def test_the_code_of_another_clone_is_refused(copy, tmp_path, lost):
    """The other one is found as an environment of its own would find it: last on the path."""
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone/common").symlink_to(copy / "common")
    folder = tmp_path / "clone/version1_pytorch_baseline"
    shutil.copytree(copy / folder.name, folder, symlinks=True)
    if lost == "link":
        (folder / "common").unlink()
        (folder / "common").write_text("../common")  # as git writes it where it makes no links
    else:
        (folder / "common").unlink()
        (folder / "common").symlink_to(ROOT / "common")
    done = start(tmp_path, folder / "tiny_llama_v1.py", "--help", PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"error: this script is part of {tmp_path / 'clone'}, but `common` was found in {ROOT}: ")
