"""Scripts start from any directory, use the code that they came with, and say in one line what
their Python lacks.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT, TINY, V1, finished
from tests.pages import SCRIPTS
from tracepage.files import read_json

import pytest

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
    "CUDA_VISIBLE_DEVICES": "-1"
}


def start(folder: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess:
    """Python with these arguments, in a folder, where PYTHONPATH names nothing."""
    return finished(
        [sys.executable, *arguments], folder, ENVIRONMENT | environment, check=None, seconds=300
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of the repository's code, in a folder with a space in its name."""
    folder = tmp_path_factory.mktemp("elsewhere") / "a copy"
    for path in (
        *(ROOT / name for name in ("common", "tracepage", "studies", "exercise_tools.py")),
        *ROOT.glob("version*_*"),
    ):
        copied = shutil.copytree if path.is_dir() else shutil.copy
        copied(path, folder / path.name)
    return folder


def test_every_script_begins_with_the_root_of_its_clone():
    assert {path.parts[0] for path in SCRIPTS} == {path.name for path in ROOT.glob("version*_*")}
    assert len(SCRIPTS) > 30
    for script in SCRIPTS:
        root = f"sys.path.insert(0, str(Path(__file__).resolve().parents[{len(script.parts) - 1}]))"
        assert root in (ROOT / script).read_text(encoding="utf-8"), script


@pytest.mark.parametrize(
    "script",
    ["version1_pytorch_baseline/run_pytorch_profiler.py", "version4_ultra_fused/tiny_llama_v4.py"],
)
def test_without_packages_it_ends_in_one_line(copy, tmp_path, script):
    """-S leaves out what is installed."""
    done = start(tmp_path, "-S", copy / script, "--help")
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1, done.stderr
    assert (
        " is not installed in this Python" in done.stderr
        and f"`make setup` in {copy}, " in done.stderr
    )


@pytest.mark.parametrize(
    "script", ["version3_triton/tiny_llama_v3.py", "version4_ultra_fused/tiny_llama_v4.py"]
)
def test_where_there_is_no_triton_a_version_trains(script, tmp_path):
    """As on macOS."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['triton'] = None\n")
    flags = ("--device", "cpu", *TINY, "--num-steps", 2, "--data", "synthetic")
    done = start(tmp_path, ROOT / script, *flags, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0 and "no Triton kernels: triton is not installed" in done.stderr, (
        done.stderr
    )


@pytest.mark.parametrize("safe", ["", "1"])
def test_a_run_from_another_directory_uses_the_code_that_it_came_with(copy, tmp_path, safe):
    """Though another package of that name and another clone are on the path; -v names the file of
    every module.
    """
    (tmp_path / "other/common").mkdir(parents=True)
    (tmp_path / "other/common/__init__.py").touch()
    script, flags = (
        copy / "version1_pytorch_baseline/run_pytorch_profiler.py",
        (*TINY, "--data", "synthetic", "--num-steps", "4"),
    )
    path = os.pathsep.join((str(tmp_path / "other"), str(ROOT)))
    done = start(
        tmp_path, "-v", script, *flags, "--device", "cpu", PYTHONPATH=path, PYTHONSAFEPATH=safe
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert read_json(tmp_path / "metrics_v1.json")["status"] == "completed"
    assert str(copy / "version1_pytorch_baseline/tiny_llama_v1.py") in done.stderr
    assert not any(
        f"{folder}/" in done.stderr
        for folder in (ROOT / "common", ROOT / V1.name, tmp_path / "other/common")
    )


# ------------------------------------------------------------------------------------------- the path to the first line

COUNT = """
import io, os, runpy, sys


class First(io.StringIO):
    def write(self, text):
        if text.strip():
            print(*{str(getattr(module, "__file__", "")) for module in sys.modules.values()}, sep="\\n", file=sys.stderr)
            os._exit(0)


sys.argv, sys.stdout = sys.argv[1:], First()
runpy.run_path(sys.argv[0], run_name="__main__")
"""
LIMITS = {
    "version1_pytorch_baseline/tiny_llama_v1.py": (22, 3500),
    "version4_ultra_fused/tiny_llama_v4.py": (38, 6000),
}


@pytest.mark.parametrize("script", LIMITS)
def test_few_files_are_loaded_before_the_first_line(script, tmp_path):
    """Of ours, on one device. What a flag asks for is imported when it is given."""
    done = start(
        tmp_path,
        "-c",
        COUNT,
        ROOT / script,
        *TINY,
        "--data",
        "synthetic",
        "--num-steps",
        1,
        TRITON_INTERPRET="",
    )
    assert done.returncode == 0 and "/common/training/run.py" in done.stderr, done.stderr
    ours = {
        path.relative_to(ROOT)
        for path in map(Path, done.stderr.splitlines())
        if path.is_relative_to(ROOT)
    } | {Path(script)}
    lines = {
        str(path): len((ROOT / path).read_text(encoding="utf-8").splitlines())
        for path in ours
        if ".venv" not in path.parts
    }
    files, most = LIMITS[script]
    assert len(lines) <= files and sum(lines.values()) <= most, (
        f"{len(lines)} files, {sum(lines.values())} lines: {lines}"
    )
