"""Set-up keeps the torch and triton that are installed, pins everything else, and refuses in one
line what cannot work.

Each test runs the real setup.sh or Makefile in a small clone, on a machine whose PATH holds only
what the test puts there.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT, finished

import pytest

PARTS = ("Makefile", "setup.sh", "pyproject.toml", "constraints.txt")
TOOLS = ("awk", "bash", "cat", "dirname", "make", "sed", "sh", "uname")


# A Python whose environments have, in place of pip, a module that notes what it is asked for.


class Clone:
    """A copy of the set-up files in a folder with a space in its name, and the environment to run
    them in.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.path = folder / "a clone", folder / "bin", folder / "path"
        for new in (self.folder, self.bin, self.path):
            new.mkdir()
        for part in PARTS:
            shutil.copy(ROOT / part, self.folder / part)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PIP_", "MAKE", "TORCH"))
        }
        self.environment |= {
            "PATH": str(self.bin),
            "PYTHON": sys.executable,
            "PYTHONPATH": str(self.path),
        }

    def tool(self, name: str, script: str = "true") -> None:
        """Puts a command on PATH."""
        (self.bin / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / name).chmod(0o755)

    def python(self, file: str, source: str) -> None:
        """Puts a module on PYTHONPATH."""
        (self.path / file).parent.mkdir(parents=True, exist_ok=True)
        (self.path / file).write_text(source)

    def run(self, *command: str, check: int = 0, **environment: str) -> subprocess.CompletedProcess:
        return finished(command, self.folder, self.environment | environment, check)

    def plan(self, **environment: str) -> str:
        done = self.run("sh", "setup.sh", "--plan", **environment)
        assert not (self.folder / ".venv").exists()
        return done.stdout.removeprefix("set-up: ").strip()

    def refusal(self, **environment: str) -> str:
        done = self.run("sh", "setup.sh", check=2, **environment)
        assert (
            not done.stdout and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        ), done.stderr
        return done.stderr


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


@pytest.mark.parametrize(
    "module, source, message",
    [
        ("", "", "no-such-python is no Python 3.10 or newer"),
        (
            "torch/__init__",
            "raise ImportError('libamdhip64.so.7: cannot open')",
            "torch does not import (libamdhip64.so.7: cannot",
        ),
    ],
    ids=["missing", "with a torch that does not import"],
)
def test_a_python_that_cannot_be_used_is_refused(clone, module, source, message):
    if module:
        clone.python(f"{module}.py", source)
    assert message in clone.refusal(**({} if module else {"PYTHON": "no-such-python"}))
    assert not (clone.folder / ".venv").exists()


def test_an_environment_that_is_active_or_not_of_set_up_is_not_erased(clone):
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", clone.folder / ".venv"], check=True
    )
    assert "run 'deactivate' first" in clone.refusal(PYTHON=str(clone.folder / ".venv/bin/python"))
    assert ".venv is not of setup.sh, which would erase it" in clone.refusal()
    assert (clone.folder / ".venv/pyvenv.cfg").exists()


def test_amd_gpu_without_torch_is_refused(clone):
    clone.python("sitecustomize.py", "import sys\nsys.modules['torch'] = None\n")
    clone.tool("rocminfo")
    assert "load a module that has it, or pass TORCH_BUILD=rocmX.Y or cpu" in clone.refusal()


@pytest.mark.parametrize(
    "tool, build, plan",
    [
        ("rocminfo", "rocm7.2", "2.13.0+rocm7.2"),
        ("", "", "2.13.0 for the CPU"),
    ],
)
def test_the_build_that_is_installed(clone, tool, build, plan):
    clone.python("sitecustomize.py", "import sys\nsys.modules['torch'] = None\n")
    if tool:
        clone.tool(tool)
    elif sys.platform != "linux" or Path("/dev/kfd").exists():
        pytest.skip("needs Linux without an AMD GPU")
    found = clone.plan(TORCH_BUILD=build).replace(
        " (PyTorch's CPU index does not answer, so what pip finds)", " for the CPU"
    )
    assert found == f"installs torch {plan}"


def test_failed_install_leaves_an_empty_stamp_and_kept_torch_is_seen(clone):
    clone.python("torch/__init__.py", "__version__ = '2.12.0'")
    clone.python("numpy/__init__.py", "__version__ = '1.26.4'")
    done = clone.run("make", "setup", check=2, PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull)
    assert (
        "keeps torch 2.12.0" in done.stdout
        and "error: pip could not install this, as its lines above say" in done.stderr
    )
    assert (clone.folder / ".venv/set-up").read_text() == ""
    assert "sh setup.sh" in clone.run("make", "-n", "setup").stdout
    seen = clone.run(
        ".venv/bin/python", "-c", "import torch; print(torch.__file__)", PYTHONPATH=""
    ).stdout
    assert seen == f"{clone.path / 'torch/__init__.py'}\n"
    assert (clone.folder / ".venv/kept.txt").read_text().split() == [
        "torch<0",
        "triton<0",
        "numpy==1.26.4",
    ]


@pytest.mark.slow
def test_whole_set_up_keeps_torch(clone):
    """Downloads everything but torch (a minute or two)."""
    base = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    clone.environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE")
    }
    clone.environment |= {"PYTHON": str(base), "PYTHONPATH": str(clone.path)}
    for house in ("common", "tracepage"):
        shutil.copytree(ROOT / house, clone.folder / house)
    clone.python("torch/__init__.py", "__version__ = '2.12.0+rocm7.1'")
    clone.run("make", "setup")
    for name in ("torch", "triton"):
        assert not list(clone.folder.glob(f".venv/lib/python*/site-packages/{name}*")), (
            f"a second {name}"
        )
    code = "import common, pandas, pydantic, pytest, tensorboard, tokenizers, torch\nprint(torch.__version__, common.__path__[0])"
    seen = clone.run(str(clone.folder / ".venv/bin/python"), "-c", code, PYTHONPATH="").stdout
    assert seen == f"2.12.0+rocm7.1 {clone.folder / 'common'}\n"
    assert "Nothing to be done" in clone.run("make", "setup").stdout


@pytest.mark.parametrize("changed", ("", "pyproject.toml", "setup.sh", "the folder"))
def test_set_up_is_done_once_and_again_when_its_files_or_its_folder_change(clone, changed):
    folder = "/somewhere/else" if changed == "the folder" else clone.folder.resolve()
    (clone.folder / ".venv").mkdir()
    (clone.folder / ".venv/set-up").write_text(f"{folder}\n")
    if (clone.folder / changed).is_file():
        stamp = (clone.folder / ".venv/set-up").stat().st_mtime
        os.utime(clone.folder / changed, (stamp + 10, stamp + 10))
    assert clone.run("make", "-n", "test").stdout.startswith("sh setup.sh\n") == bool(changed)
