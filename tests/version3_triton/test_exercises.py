"""The kernel exercises: their tests pass for the solution, and every one fails for the starter and names what is to be written.

On a GPU the exercises' kernels run there, without one in Triton's interpreter.
"""

import re
import runpy

from common.errors import UsageError
from tests.conftest import ROOT, runs_kernels
from tests.exercise_runs import described, needs_triton, run_tests

import pytest

FOLDER = ROOT / "version3_triton/exercises"
EXERCISES = sorted(path.stem for path in FOLDER.glob("starter/*.py"))
MISSING = re.compile(r"([\w.]+): problem (\w+) of (\w+)\.md")  # what a starter says


@needs_triton
@runs_kernels
def test_the_solution_passes(tmp_path):
    code, cases = run_tests(FOLDER, "solution", tmp_path / "results.xml")
    assert code == 0 and len(cases) > 80 and not any(case.find("skipped") is not None for case in cases)


@needs_triton
def test_every_test_of_the_starter_fails_and_names_what_is_to_be_written(tmp_path):
    code, cases = run_tests(FOLDER, "starter", tmp_path / "results.xml")
    failures = {case.get("name"): case.find("failure") for case in cases}
    assert code == 1 and len(failures) > 80 and [name for name, failure in failures.items() if failure is None] == []
    written = {name for exercise in EXERCISES for name in described(FOLDER / f"starter/{exercise}.py")}
    for name, failure in failures.items():
        found = MISSING.search(failure.get("message"))
        assert found and found[1] in written, f"{name}: {failure.get('message')}"
        problem = name.removeprefix("test_").removeprefix("exercise")  # 1_a_add, rope_forward
        assert problem[0] == found[2][0], f"{name} fails with {found[2]}"


@pytest.mark.parametrize("exercise", EXERCISES)
def test_starter_and_solution_have_the_same_signatures_and_summaries(exercise):
    starter, solution = (described(FOLDER / folder / f"{exercise}.py") for folder in ("starter", "solution"))
    assert starter and starter == solution


@pytest.mark.parametrize("exercise", EXERCISES)
def test_every_function_to_be_written_is_in_its_problem(exercise):
    starter = FOLDER / f"starter/{exercise}.py"
    missing = MISSING.findall(starter.read_text())
    assert {name for name, _, _ in missing} == described(starter).keys()
    for name, problem, page in missing:
        sections = re.split(r"^## Problem \((?=\w+\):)", (FOLDER / f"{page}.md").read_text(), flags=re.MULTILINE)[1:]
        [section] = [section for section in sections if section.startswith(f"{problem})")]
        assert f"`{name.split('.')[0]}" in section, (name, problem)


def test_the_reading_problem_names_functions_that_exist():
    """Questions about the backward pass, and what they point to in production code."""
    section = (FOLDER / "if_you_have_time.md").read_text().split("\n## Problem (reading)")[1].split("\n## ")[0]
    named = set(re.findall(r"`(_\w+)`", section))
    assert named and named <= described(ROOT / "version3_triton/kernels/flash_attention.py").keys()


@needs_triton
def test_the_adapter_knows_two_folders(monkeypatch):
    monkeypatch.setenv("KERNEL_EXERCISES", "mine")
    adapter = runpy.run_path(str(FOLDER / "adapter.py"))
    with pytest.raises(UsageError, match="KERNEL_EXERCISES is 'mine': set it to solution"):
        adapter["load"]("exercise1_triton_basics")
