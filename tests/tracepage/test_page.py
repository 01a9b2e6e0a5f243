"""The page of anyone's trace needs no PyTorch, from the clone and from an installed package."""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from tests.conftest import ROOT
from tests.kernel_files import FIXTURES, write_gpu_trace

import pytest

WITHOUT_TORCH = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""


@pytest.fixture
def run_page(tmp_path):
    """Runs page.py in tmp_path, where torch cannot be imported."""
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked/sitecustomize.py").write_text(WITHOUT_TORCH)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "blocked")}

    def run(*arguments: Path | str) -> subprocess.CompletedProcess:
        command = [sys.executable, ROOT / "page.py", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    return run


def test_the_page_of_a_trace_needs_no_torch(tmp_path, run_page):
    trace, other = (write_gpu_trace(tmp_path / name) for name in ("trace.json", "other.json"))
    for paths in (
        (trace,),
        (trace, other),
        (FIXTURES / "ncu_raw.csv",),
        (ROOT / "results/h200/v1_tiny_profile.json.gz",),
    ):
        (tmp_path / "run.html").unlink(missing_ok=True)
        done = run_page(*paths)
        assert (done.returncode, done.stdout, done.stderr) == (0, "written: run.html\n", "")
        assert "<html" in (tmp_path / "run.html").read_text()
    done = run_page(ROOT / "README.md")
    assert (
        done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    )


@pytest.mark.slow
def test_an_installed_package_has_the_command(tmp_path):
    """`pip install .` without extras, not editable, in an environment of its own."""
    venv.create(tmp_path / "venv", with_pip=True)
    shutil.copytree(
        ROOT,
        tmp_path / "clone",
        ignore=shutil.ignore_patterns(".*", "results", "build", "*.egg-info"),
    )
    install = [tmp_path / "venv/bin/python", "-m", "pip", "install", "--quiet", tmp_path / "clone"]
    installed = subprocess.run(install, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"needs a package index: {installed.stderr.strip().splitlines()[-1]}")
    trace = tmp_path / "trace.json"
    trace.write_text(
        json.dumps([{"ph": "X", "name": "work", "pid": 1, "tid": 1, "ts": 0, "dur": 5}])
    )
    for path in (trace, write_gpu_trace(tmp_path / "gpu.json")):
        subprocess.run([tmp_path / "venv/bin/tiny-llama-page", path], cwd=tmp_path, check=True)
        assert "<html" in (tmp_path / "run.html").read_text()
