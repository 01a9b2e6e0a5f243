"""Runs Python's commands in processes that are forked from one that has imported PyTorch.

The import takes most of the time of a small run. A command otherwise runs as in an interpreter of
its own: with its folder, environment, path, arguments, output and exit code.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from unittest.mock import patch

import torch

SERVER = multiprocessing.get_context("forkserver")
IMPORTED = ["torch._dynamo", "torch.distributed.run", "pandas", "matplotlib.pyplot", "pytest"]
# Triton reads the second when it is imported; kernels of ours read it again.
READ_BY_IMPORTS = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
# A process that is forked cannot use a GPU if the one before it has looked for one.
AVAILABLE = sys.platform == "linux" and not torch.cuda.is_available()


def interpret(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    outputs: Sequence[Path],
    session: bool = False,
) -> None:
    """In the new process: `python *command`, a script or -m and a module."""
    if session:
        os.setsid()
    for descriptor, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    is_module = command[0] == "-m"
    first = folder if is_module else Path(command[0]).parent
    added = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    # set-up shows a PyTorch that it keeps, and the packages beside it, from a place of their own
    own = (sys.prefix, sys.base_prefix)
    installed = [path for path in sys.path if path.startswith(own) or "-packages" in path]
    sys.path[:] = [str(first.absolute()), *added, *installed]
    sys.argv[:] = command[is_module:]
    torchrun = patch(
        "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler._popen",
        Rank,
    )
    try:
        with torchrun:
            if is_module:
                runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(command[0], run_name="__main__")
    finally:  # As at the end of an interpreter.
        threading._shutdown()
        atexit._run_exitfuncs()


def start(
    command: Sequence[object],
    folder: Path,
    environment: Mapping[str, str],
    outputs: Sequence[Path] = (),
) -> BaseProcess:
    """`python *command`, which writes to these files, or where this process does."""
    with patch.dict(os.environ, READ_BY_IMPORTS):
        SERVER.set_forkserver_preload(IMPORTED)
        forkserver.ensure_running()
    arguments = [*map(str, command)], folder, environment, outputs
    process = SERVER.Process(target=interpret, args=arguments)
    with patch.dict(sys.modules, {"__main__": ModuleType("__main__")}):  # pytest is not run again.
        process.start()
    return process


class Rank:
    """What torchrun needs of a subprocess.Popen."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        arguments = command[2:], Path.cwd(), environment, (), True
        self.process = multiprocessing.get_context("fork").Process(target=interpret, args=arguments)
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, seconds: float) -> None:
        self.process.join(seconds)


def run(
    command: Sequence[object], folder: Path, environment: dict[str, str], seconds: float
) -> subprocess.CompletedProcess:
    """As subprocess.run([sys.executable, *command]), with text."""
    with TemporaryDirectory() as written:
        outputs = Path(written, "out"), Path(written, "err")
        process = start(command, folder, environment, outputs)
        process.join(seconds)
        code = process.exitcode
        if code is None:
            os.kill(process.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired([*map(str, command)], seconds)
        return subprocess.CompletedProcess(command, code, *(path.read_text() for path in outputs))
