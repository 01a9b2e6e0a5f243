"""The exercise: its tests pass for the solution, and fail for the starter and name what is to be written.

On a GPU the exercise's kernels run there, without one in Triton's interpreter.
"""

import re
import runpy

from common.config import resolve
from common.errors import UsageError
from tests.conftest import ROOT, cells, runs_kernels
from tests.exercise_runs import described, needs_triton, run_tests

import pytest

FOLDER = ROOT / "version4_ultra_fused/exercises"
NAME = "exercise1_ultra_fusion"
MISSING = re.compile(r"(\w+): problem 1([a-c]) of (\w+)\.md")  # what the starter says


@needs_triton
@runs_kernels
def test_the_solution_passes(tmp_path):
    code, cases = run_tests(FOLDER, "solution", tmp_path / "results.xml")
    assert code == 0 and len(cases) > 40 and not any(case.find("skipped") is not None for case in cases)


@needs_triton
@runs_kernels
def test_the_starter_fails_and_names_what_is_to_be_written(tmp_path):
    """And the product that it starts from passes."""
    code, cases = run_tests(FOLDER, "starter", tmp_path / "results.xml")
    failures = {case.get("name"): case.find("failure") for case in cases}
    given = [name for name in failures if name.startswith("test_matmul")]
    assert code == 1 and len(failures) > 40 and [name for name, failure in failures.items() if failure is None] == given != []
    for name in failures.keys() - set(given):
        found = MISSING.search(failures[name].get("message"))
        assert found and found[2] == name.split("_")[2], f"{name}: {failures[name].get('message')}"
        assert found[1] in described(FOLDER / f"starter/{NAME}.py"), found[1]


def test_starter_and_solution_have_the_same_signatures_and_summaries():
    starter, solution = (described(FOLDER / folder / f"{NAME}.py") for folder in ("starter", "solution"))
    assert starter and starter == solution


def test_every_function_to_be_written_is_in_its_problem():
    starter = FOLDER / f"starter/{NAME}.py"
    missing = MISSING.findall(starter.read_text())
    assert {name for name, _, _ in missing} == described(starter).keys()
    for name, problem, page in missing:
        sections = re.split(r"^## Problem \((?=\w+\):)", (FOLDER / f"{page}.md").read_text(), flags=re.MULTILINE)[1:]
        [section] = [section for section in sections if section.startswith(f"1{problem})")]
        assert f"`{name}`" in section, (name, problem)


def test_the_sizes_and_the_saved_bytes_in_the_document_are_those_of_the_presets():
    rows = {row[0]: row[1:] for row in cells((FOLDER / f"{NAME}.md").read_text())}  # the solution's table comes last
    saved = {}
    for preset in ("tiny", "medium"):
        config = resolve(preset)
        tokens = config.training.batch_size * config.training.sequence_length
        hidden, features, layers = config.model.hidden_size, config.model.intermediate_size, config.model.num_layers
        sizes = [int(cell.split("=")[-1].replace(",", "")) for cell in rows[preset]]
        assert sizes == [tokens, hidden, features, layers]
        parts = [2 * tokens * features * 2, 2 * 2 * tokens * hidden * 2, 2 * tokens * features * 2]
        saved[preset] = [*parts, layers * sum(parts)]
    names = (
        "1a: SwiGLU", "1b: residual stream, two additions", "1c: SwiGLU's gradient, which saves 2 N F e bytes too", "all layers",
    )  # fmt: skip
    for name, tiny, medium in zip(names, saved["tiny"], saved["medium"], strict=True):
        assert rows[name] == [f"{tiny / 2**20:g}", f"{medium / 2**20:g}", f"{medium / 4.8e12 * 1e6:.0f}"]


@needs_triton
def test_the_adapter_knows_two_folders(monkeypatch):
    monkeypatch.setenv("KERNEL_EXERCISES", "mine")
    adapter = runpy.run_path(str(FOLDER / "adapter.py"))
    with pytest.raises(UsageError, match="KERNEL_EXERCISES is 'mine': set it to solution"):
        adapter["load"](NAME)
