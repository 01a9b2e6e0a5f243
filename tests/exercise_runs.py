"""Runs an exercise's own tests on the starter or the solution, as an attendee does, and says what their functions are."""

import ast
import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

from tests.conftest import PATHS

import pytest

needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed")


def run_tests(
    folder: Path, which: str, results: Path, tests: str = "test_exercises.py"
) -> tuple[int, list[xml.etree.ElementTree.Element]]:
    """Exit code of `pytest TESTS` in the exercises' folder, and the test cases of its JUnit file."""
    command = [sys.executable, "-m", "pytest", tests, "-q", "-p", "no:cacheprovider", f"--junitxml={results}"]
    chosen = {"KERNEL_EXERCISES": which, "PROFILING_LAB": which}
    environment = os.environ | chosen | {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--tb=line"], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    print(done.stdout)
    return done.returncode, list(xml.etree.ElementTree.parse(results).iter("testcase"))


def described(path: Path) -> dict[str, tuple[str, str]]:
    """Arguments and first line of the docstring of each function, methods as Class.method."""
    tree = ast.parse(path.read_text())
    functions = {"": tree} | {f"{node.name}.": node for node in tree.body if isinstance(node, ast.ClassDef)}
    return {
        prefix + node.name: (ast.unparse(node.args), (ast.get_docstring(node) or "").partition("\n")[0])
        for prefix, owner in functions.items()
        for node in owner.body
        if isinstance(node, ast.FunctionDef)
    }
