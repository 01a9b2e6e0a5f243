"""The kernel exercises of Versions 3 and 4: their tests pass for the solution; for the starter they say what is to be written.

On a GPU the exercises' kernels run there, without one in Triton's interpreter.
"""

import re
import runpy
from pathlib import Path

from common.errors import UsageError
from tests.conftest import ROOT, runs_kernels
from tests.exercise_runs import described, needs_triton, run_tests

import pytest

V3, V4 = ROOT / "version3_triton/exercises", ROOT / "version4_ultra_fused/exercises"
STARTERS = sorted(path for folder in (V3, V4, V4 / "distributed") for path in folder.glob("starter/*.py"))
KERNEL_STARTERS = [path for path in STARTERS if "distributed" not in path.parts]
MISSING = re.compile(r"([\w.]+): problem (\w+) of (\w+)\.md")  # what a starter of a kernel says
both_folders = pytest.mark.parametrize("folder, least", [(V3, 80), (V4, 40)], ids=["V3", "V4"])
each_file = {"ids": lambda path: path.stem}


@needs_triton
@runs_kernels
@both_folders
def test_the_solution_passes(folder, least, tmp_path):
    code, cases = run_tests(folder, "solution", tmp_path / "results.xml")
    assert code == 0 and len(cases) > least and not any(case.find("skipped") is not None for case in cases)


@needs_triton
@runs_kernels
@both_folders
def test_every_test_of_the_starter_fails_and_names_what_is_to_be_written(folder, least, tmp_path):
    """But for the product that Version 4's exercise starts from."""
    code, cases = run_tests(folder, "starter", tmp_path / "results.xml")
    failures = {case.get("name"): case.find("failure") for case in cases}
    given = [name for name in failures if name.startswith("test_matmul")]
    assert bool(given) == (folder == V4)
    assert code == 1 and len(failures) > least and [name for name, failure in failures.items() if failure is None] == given
    written = {name for path in folder.glob("starter/*.py") for name in described(path)}
    for name in failures.keys() - set(given):
        found = MISSING.search(failures[name].get("message"))
        assert found and found[1] in written, f"{name}: {failures[name].get('message')}"
        problem = name.removeprefix("test_").removeprefix("exercise").replace("_", "")  # 1aadd, ropeforward
        assert problem.startswith(found[2] if folder == V4 else found[2][0]), f"{name} fails with {found[2]}"


@pytest.mark.parametrize("starter", STARTERS, **each_file)
def test_starter_and_solution_have_the_same_signatures_and_summaries(starter):
    assert described(starter)
    assert described(starter) == described(starter.parents[1] / "solution" / starter.name)


@pytest.mark.parametrize("starter", KERNEL_STARTERS, **each_file)
def test_every_function_to_be_written_is_in_its_problem(starter):
    missing = MISSING.findall(starter.read_text())
    assert {name for name, _, _ in missing} == described(starter).keys()
    for name, problem, page in missing:
        sections = re.split(r"^## Problem \((?=\w+\):)", (starter.parents[1] / f"{page}.md").read_text(), flags=re.MULTILINE)[1:]
        [section] = [section for section in sections if section.startswith(f"{problem})")]
        assert f"`{name.split('.')[0]}" in section, (name, problem)


def test_the_reading_problem_names_functions_that_exist():
    """Questions about the backward pass, and what they point to in production code."""
    section = (V3 / "if_you_have_time.md").read_text().split("\n## Problem (reading)")[1].split("\n## ")[0]
    named = set(re.findall(r"`(_\w+)`", section))
    assert named and named <= described(ROOT / "version3_triton/kernels/flash_attention.py").keys()


@needs_triton
@pytest.mark.parametrize("folder", [V3, V4, V4 / "distributed"])
def test_an_adapter_knows_two_folders(monkeypatch, folder: Path):
    monkeypatch.setenv("KERNEL_EXERCISES", "mine")
    adapter = runpy.run_path(str(folder / "adapter.py"))
    with pytest.raises(UsageError, match="KERNEL_EXERCISES is 'mine': set it to solution"):
        adapter["load"](next(folder.glob("starter/*.py")).stem)
