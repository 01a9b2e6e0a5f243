"""Fixtures: scripts run as a user runs them, in a folder of their own, on the CPU."""

import functools
import importlib.util
import os
import runpy
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from common import data, ranks
from common.options import RunOptions
from tests import processes
from tracepage import terminal

import numpy
import pytest
import torch

# a terminal that is narrower would leave out columns that tests look for
os.environ["COLUMNS"] = "120"
ROOT = Path(__file__).parents[1]
V1 = ROOT / "version1_pytorch_baseline"
# what a script of ours needs to see
PATHS = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
markov = functools.cache(data.markov)  # scripts that run in one process share the synthetic source
TINY = (
    "--num-layers",
    "2",
    "--hidden-dim",
    "32",
    "--num-heads",
    "4",
    "--intermediate-dim",
    "64",
    "--batch-size",
    "2",
    "--seq-len",
    "16",
)

torch.set_num_threads(1)  # sizes here are small, and tests may share the machine
# which a shell takes away from what it starts in the background
signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():
    # Triton's kernels are interpreted if this is set when they are imported, and PyTorch's FLOP
    # counter imports some: so it is set before any test module is imported.
    os.environ["TRITON_INTERPRET"] = "1"


def interpreter_fails() -> bool:
    """Triton before 3.7 makes an int of an array that holds the index of a loop; NumPy refuses that
    from 2.4 on.
    """
    if not importlib.util.find_spec("triton"):
        return False
    import triton

    old, new = (
        tuple(map(int, version.split(".")[:2]))
        for version in (triton.__version__, numpy.__version__)
    )
    return old < (3, 7) and new >= (2, 4)


INTERPRETER_FAILS = interpreter_fails()
WHY = "needs Triton from 3.7 on or NumPy before 2.4, to interpret kernels"
# A script that the test starts interprets kernels; or the test does so itself, where no GPU runs
# them.
needs_interpreter = pytest.mark.skipif(INTERPRETER_FAILS, reason=WHY)
runs_kernels = pytest.mark.skipif(INTERPRETER_FAILS and not torch.cuda.is_available(), reason=WHY)
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


def cells(table: str) -> list[list[str]]:
    """Header and rows of a Markdown table."""
    lines = [line for line in table.splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def texts(svg: str) -> set[str]:
    return {
        text.text for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    }


def pytest_collection_finish() -> None:
    """All test modules are imported. A script that a test starts interprets kernels only if the
    test sets the variable.
    """
    if os.environ.pop("TRITON_INTERPRET", None) and "triton" in sys.modules:
        sys.modules["triton"].knobs.runtime.interpret = True
        os.environ.pop("TRITON_INTERPRET", None)  # the line before sets it again


@pytest.fixture(autouse=True)
def same_settings() -> Iterator[None]:
    """A test draws the same random numbers whichever tests ran before it, and leaves no setting of
    PyTorch changed.
    """
    torch.manual_seed(0)
    yield
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    ranks.gloo_started = False  # or `cli.command` would end the process of the tests


def finished(
    command: Sequence[object],
    folder: Path,
    environment: Mapping[str, str],
    check: int | None = 0,
    seconds: float = 900,
) -> subprocess.CompletedProcess:
    """Runs a command in a folder and asserts its exit code, unless `check` is None."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    return with_code(done, check)


def with_code(done: subprocess.CompletedProcess, check: int | None) -> subprocess.CompletedProcess:
    assert check in (None, done.returncode), (
        f"exit code {done.returncode}, not {check}\n{done.stdout}\n{done.stderr}"
    )
    return done


def python(
    arguments: Sequence[object],
    folder: Path,
    environment: dict[str, str],
    check: int | None = 0,
    seconds: float = 900,
) -> subprocess.CompletedProcess:
    """As `finished`, for a script or a module that may begin with PyTorch imported."""
    if not processes.AVAILABLE or arguments[0] == "-c":
        return finished([sys.executable, *arguments], folder, environment, check, seconds)
    return with_code(processes.run(arguments, folder, environment, seconds), check)


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """run_script(script, *arguments, check=0, **variables): runs it in tmp_path and asserts its
    exit code.

    It runs on the CPU unless variables of its environment are given.
    """

    def run(
        *arguments: object, check: int = 0, seconds: float = 900, **variables: str
    ) -> subprocess.CompletedProcess:
        # an empty list would hide no GPU of AMD's
        plain = {"CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1"}
        environment = os.environ | {"PYTHONPATH": PATHS} | (variables or plain)
        if variables:
            command = [sys.executable, *arguments]
            return finished(command, tmp_path, environment, check, seconds)
        return python(arguments, tmp_path, environment, check, seconds)

    return run


@pytest.fixture
def execute(monkeypatch, capfd, tmp_path: Path) -> Callable:
    """execute(script, *arguments, check=0): what it prints, as `out` and `err`; as `run_script`
    without a new process.
    """
    monkeypatch.setattr(data, "markov", markov)
    # a busy machine's lines of progress would stand between what is asserted
    monkeypatch.setattr(terminal, "SECONDS", 1e6)

    def run(script: Path, *arguments: object, check: int = 0):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
        printed = capfd.readouterr()
        assert ended.value.code == check, printed
        return printed

    return run


@pytest.fixture
def refused(execute) -> Callable[..., str]:
    """refused(script, *arguments): the one line with which it ends, exit code 2."""

    def run(script: Path, *arguments: object) -> str:
        printed = execute(script, *arguments, check=2)
        assert (printed.out, printed.err.count("\n")) == ("", 1), printed
        assert printed.err.startswith("error: ")
        return printed.err

    return run


@pytest.fixture
def no_kernels(monkeypatch) -> None:
    """PyTorch's operations run in place of the kernels, as without a GPU where nobody asks for the
    interpreter.
    """
    monkeypatch.setattr("version3_triton.kernels.INTERPRETED", False)


@pytest.fixture
def as_rank(monkeypatch) -> Callable[..., None]:
    """as_rank(rank, world_size): this process becomes one of a job, as far as its environment
    tells.
    """

    def become(rank: int, world_size: int = 2) -> None:
        for name, value in zip(
            ranks.VARIABLES, (rank, rank, world_size, "localhost", 29500), strict=True
        ):
            monkeypatch.setenv(name, str(value))

    return become


@pytest.fixture
def known_ceilings(monkeypatch) -> None:
    """Runs take the device's ceilings from here: to measure them takes longer than a small run."""
    from common.training import ceilings
    from tests.small_traces import CEILINGS

    monkeypatch.setattr(ceilings, "measure", lambda *_: CEILINGS)


def run_options(version: ModuleType, *flags: object) -> RunOptions:
    """The options of a version's run from these flags."""
    from common import cli
    from studies import version_files

    parsed = cli.parse(version_files.run_parser(version, None), [str(flag) for flag in flags])
    return version_files.run_options(version, parsed)


@pytest.fixture
def at_step(monkeypatch) -> Callable[[int, Callable], None]:
    """at_step(number, action): the first run that reaches this training step calls action() in it."""
    from common.training.run import Run

    real = Run.check_and_capture

    def interpose(number: int, action: Callable[[], None]) -> None:
        actions = [action]

        def check_and_capture(run: Run, step):
            step, calls = real(run, step), []

            def watched(batch):
                calls.append(batch)
                if len(calls) == number and actions:
                    actions.pop()()
                return step(batch)

            return watched

        monkeypatch.setattr(Run, "check_and_capture", check_and_capture)

    return interpose


ALTERED = """
import os

from version1_pytorch_baseline import tiny_llama_v1
from version1_pytorch_baseline.tiny_llama_v1 import TinyLlama, make_model, make_optimizer

import torch


def make_step(*arguments):
    step = tiny_llama_v1.make_step(*arguments)

    def altered(batch):
        {statement}
        return step(batch)

    return altered
"""


def altered_version(folder: Path, statement: str) -> Path:
    """A version file: Version 1, whose training step begins with a statement, which may use
    `batch`, `os` and `torch`.
    """
    path = folder / "tiny_llama_altered.py"
    path.write_text(ALTERED.format(statement=statement))
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
