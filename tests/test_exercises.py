"""The exercises' own tests pass for the solution and fail for the starter by naming what is to be
written; the pages agree.

On a GPU the exercises' kernels run there, without one in Triton's interpreter.
"""

import ast
import importlib.util
import json
import os
import re
import runpy
import xml.etree.ElementTree
from pathlib import Path

from documents import waiting
from tests import records
from tests.conftest import PATHS, ROOT, V1, python, runs_kernels
from tracepage.causes import waits
from tracepage.errors import UsageError
from tracepage.files import write_json
from tracepage.readers import load_kernels

import pytest
import torch

LAB = V1 / "exercises/profiling_lab"
V3, V4 = ROOT / "version3_triton/exercises", ROOT / "version4_ultra_fused/exercises"
LADDER, MEASURING = V4 / "distributed", V1 / "exercises/measuring_that_holds"
MEMORY, DECODING = ROOT / "version2_pytorch_fused/exercises/memory_you_choose", ROOT / "decoding"
COMPILER = ROOT / "version2_pytorch_fused/exercises/why_compile_did_not_help"
DEBUGGING = V4 / "debugging"
WAITING = V1 / "exercises/why_it_waits"
LESSONS = (LADDER, MEASURING, MEMORY, DECODING)  # a test's name begins with its problem
KERNEL_STARTERS = sorted(path for folder in (V3, V4) for path in folder.glob("starter/*.py"))
STARTERS = [
    LAB / "src/profiling.py",
    *KERNEL_STARTERS,
    *(path for folder in LESSONS for path in sorted(folder.glob("starter/*.py"))),
]
MISSING = re.compile(r"([\w.]+): problem (\w+) (?:of|in) (\w+)\.md")  # what a starter says
needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton")
PLAIN = (
    (LAB, 20, "lab"),
    (MEASURING, 13, "measuring"),
    (MEMORY, 8, "memory"),
    (DECODING, 5, "decoding"),
)
CASES = [pytest.param(folder, least, id=name) for folder, least, name in PLAIN] + [
    pytest.param(folder, least, id=name, marks=[needs_triton, runs_kernels])
    for name, folder, least in (("V3", V3, 65), ("V4", V4, 30))
]


def run_tests(folder: Path, which: str, results: Path) -> tuple[int, list[tuple[str, str | None]]]:
    """Exit code of pytest in an exercise's folder, and each test that was not skipped, with the
    message of its failure.
    """
    tests = "tests/" if folder == LAB else "test_exercises.py"
    command = [
        "-m",
        "pytest",
        tests,
        "-q",
        "--tb=line",
        "-p",
        "no:cacheprovider",
        f"--junitxml={results}",
    ]
    environment = os.environ | {
        "KERNEL_EXERCISES": which,
        "PROFILING_LAB": which,
        "PYTHONPATH": PATHS,
        "OMP_NUM_THREADS": "1",
    }
    if folder == LAB:
        environment["CUDA_VISIBLE_DEVICES"] = "-1"
    done = python(command, folder, environment, check=None)
    print(done.stdout)
    cases = list(xml.etree.ElementTree.parse(results).iter("testcase"))
    assert not any(case.find("error") is not None for case in cases)
    ran = [
        (case.get("name"), case.find("failure")) for case in cases if case.find("skipped") is None
    ]
    assert folder == LAB or len(ran) == len(cases)
    return done.returncode, [
        (name, None if failure is None else failure.get("message")) for name, failure in ran
    ]


def described(path: Path) -> dict[str, tuple[str, str]]:
    """Arguments and first line of the docstring of each function, methods as Class.method."""
    tree = ast.parse(path.read_text())
    functions = {"": tree} | {
        f"{node.name}.": node for node in tree.body if isinstance(node, ast.ClassDef)
    }
    return {
        prefix + node.name: (
            ast.unparse(node.args),
            (ast.get_docstring(node) or "").partition("\n")[0],
        )
        for prefix, owner in functions.items()
        for node in owner.body
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("folder, least", [*CASES, pytest.param(LADDER, 20, id="distributed")])
def test_the_solution_passes(folder, least, tmp_path):
    code, cases = run_tests(folder, "solution", tmp_path / "results.xml")
    assert code == 0 and len(cases) > least


@pytest.mark.parametrize(
    "folder, least", [*CASES, pytest.param(LADDER, 20, id="distributed", marks=pytest.mark.slow)]
)
def test_every_test_of_the_starter_fails_and_names_what_is_to_be_written(folder, least, tmp_path):
    """But for the product that Version 4's exercise starts from, and the lab's tests of functions
    that it gives.
    """
    code, cases = run_tests(folder, "starter", tmp_path / "results.xml")
    given = [name for name, message in cases if message is None]
    assert code == 1 and len(cases) - (len(given) if folder == LAB else 0) > least
    assert folder == LAB or given == [name for name, _ in cases if name.startswith("test_matmul")]
    assert folder == LAB or bool(given) == (folder == V4)
    written = {name for path in STARTERS if path.parents[1] == folder for name in described(path)}
    for name, message in cases:
        if message is None:
            continue
        found = MISSING.search(message)
        assert found and found[1] in written, f"{name}: {message}"
        if folder == LAB:
            assert message.startswith("NotImplementedError: "), name
        elif folder in LESSONS:
            assert name.startswith(f"test_problem{found[2]}_"), f"{name} fails with {found[2]}"
        else:
            # 1aadd, ropeforward
            problem = name.removeprefix("test_").removeprefix("exercise").replace("_", "")
            assert problem.startswith(found[2] if folder == V4 else found[2][0]), (
                f"{name} fails with {found[2]}"
            )


def test_each_addition_to_version_2_fails_a_test_until_it_is_repaired(tmp_path):
    code, cases = run_tests(COMPILER, "starter", tmp_path / "results.xml")
    failed = {name for name, message in cases if message is not None}
    assert code == 1 and failed == {
        "test_the_loss_is_one_graph",
        "test_steps_after_the_first_compile_nothing",
        "test_the_optimizer_takes_all_parameters_at_once",
    }
    code, cases = run_tests(COMPILER, "solution", tmp_path / "results.xml")
    assert code == 0 and len(cases) == 9


def test_each_part_that_makes_the_gpu_wait_fails_its_test_until_it_is_mended(tmp_path):
    code, cases = run_tests(WAITING, "starter", tmp_path / "results.xml")
    assert code == 1 and len(cases) == 6
    assert all(message is not None for _, message in cases)
    code, cases = run_tests(WAITING, "solution", tmp_path / "results.xml")
    assert code == 0 and len(cases) == 6
    starter = described(WAITING / "starter/parts.py")
    solution = described(WAITING / "solution/parts.py")
    assert {name: arguments for name, (arguments, _) in starter.items()} == {
        name: arguments for name, (arguments, _) in solution.items()
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU records")
def test_a_program_that_waits_runs_with_a_fault_and_is_recorded_on_a_gpu_alone(
    run_script, refused, tmp_path
):
    trace = tmp_path / "trace.json"
    said = run_script(WAITING / "training.py", "--fault", "letters", "--trace", trace).stdout
    assert said.endswith(" ms a step\n") and len(json.loads(trace.read_text())["traceEvents"]) > 100
    assert "recorded on a GPU" in refused(WAITING / "training.py", "--record", tmp_path / "record")


@pytest.mark.parametrize("number", range(1, 7))
def test_a_recorded_case_has_the_verdict_of_its_record(number):
    """And the measured step without the fault is within the verdict's bounds, or 5% beside them."""
    folder = ROOT / "results/h200/why_it_waits"
    case = json.loads((folder / "why_it_waits.json").read_text())["cases"][number - 1]
    causes = waits.attribute(load_kernels.load(folder / f"case_{number}.json.gz"))
    verdict = causes.verdict
    assert (case["case"], case["cause"]) == (number, verdict["cause"])
    bounds = waiting.BOUNDS.findall(verdict["sentence"])
    assert 0.95 * float(bounds[0]) < case["ms_without"] < 1.05 * float(bounds[-1])


def test_three_of_four_checks_fail_on_the_broken_version_4_until_it_is_mended(tmp_path):
    code, cases = run_tests(DEBUGGING, "starter", tmp_path / "results.xml")
    messages = {name: message for name, message in cases if message is not None}
    assert code == 1 and messages.keys() == {
        "test_losses_are_those_of_version_4",
        "test_gradients_are_those_of_float64",
        "test_a_fixed_batch_gives_the_same_gradient_in_every_step",
    }
    assert all("problem (adding): " in message for message in messages.values())
    assert "norm.weight" not in messages["test_gradients_are_those_of_float64"]
    code, cases = run_tests(DEBUGGING, "solution", tmp_path / "results.xml")
    assert code == 0 and len(cases) == 4


@pytest.mark.parametrize("starter", STARTERS, ids=lambda path: path.stem)
def test_starter_and_solution_have_the_same_signatures_and_summaries(starter):
    mine, solved = described(starter), described(starter.parents[1] / "solution" / starter.name)
    assert mine and mine.items() <= solved.items()
    if starter.is_relative_to(LAB):
        assert len(mine) > 10 and all(summary for _, summary in mine.values())
    else:
        assert mine.keys() == solved.keys()


@pytest.mark.parametrize("starter", STARTERS, ids=lambda path: path.stem)
def test_every_function_to_be_written_is_in_its_problem(starter):
    missing = MISSING.findall(starter.read_text())
    assert missing and {name for name, _, _ in missing} <= described(starter).keys()
    for name, problem, page in missing:
        folder = ROOT if page == "MORE_PROBLEMS" else starter.parents[1]
        text = (folder / f"{page}.md").read_text()
        sections = re.split(r"^###? Problem \(?(?=\w+\b)", text, flags=re.MULTILINE)[1:]
        [section] = [
            section.split("\n## ")[0] for section in sections if re.match(rf"{problem}\b", section)
        ]
        written = [name, name.split(".")[-1], name.split(".")[0]]
        assert any(f"`{each}" in section for each in written), (name, problem)


@needs_triton
@pytest.mark.parametrize("folder", [V3, V4, LADDER])
def test_an_adapter_knows_two_folders(monkeypatch, folder: Path):
    monkeypatch.setenv("KERNEL_EXERCISES", "mine")
    adapter = runpy.run_path(str(folder / "adapter.py"))
    with pytest.raises(UsageError, match="KERNEL_EXERCISES is 'mine': set it to solution"):
        adapter["load"](next(folder.glob("starter/*.py")).stem)


@pytest.mark.parametrize(
    "script, flags, function",
    [
        (MEASURING / "measure.py", [], "waits_and_warms_up"),
        (MEMORY / "choose.py", [], "peak_bytes"),
        (LAB / "lab.py", ["time"], "benchmark_function"),
        (DECODING / "generate.py", ["--prompt-tokens", "8"], "append"),
    ],
    ids=lambda each: getattr(each, "stem", None),
)
def test_a_script_names_what_its_starter_lacks(monkeypatch, run_script, script, flags, function):
    monkeypatch.setenv("KERNEL_EXERCISES", "starter")
    error = run_script(script, *flags, check=2).stderr
    assert error.startswith(f"error: not implemented: {function}: problem "), error


def test_an_unknown_folder_of_exercises_is_one_line(monkeypatch, refused):
    monkeypatch.setenv("KERNEL_EXERCISES", "mine")
    for script, *flags in (
        (MEASURING / "measure.py",),
        (MEMORY / "choose.py",),
        (COMPILER / "run.py", "--device", "cpu"),
        (DECODING / "generate.py", "--prompt-tokens", "8"),
    ):
        assert "KERNEL_EXERCISES is 'mine': set it to solution" in refused(script, *flags)


def test_a_file_or_a_number_that_a_lesson_cannot_use_is_one_line(monkeypatch, refused, tmp_path):
    monkeypatch.setenv("KERNEL_EXERCISES", "solution")
    cells = records.benchmark_of_shapes()
    for cell in cells["cells"]:
        del cell["runs"][1:]
    write_json(tmp_path / "one_run.json", cells)
    write_json(tmp_path / "one_model.json", records.benchmark_of_shapes(models=["v1"]))
    for name in ("one_run.json", "one_model.json"):
        said = refused(MEASURING / "measure.py", "--processes", name)
        assert f"{name}: give a benchmark of two models, with two processes or more each" in said
    said = refused(MEMORY / "choose.py", "--snapshot", "one_run.json")
    assert "not a file of schema tiny-llama-memory-snapshot/1" in said
    for number in ("nan", "-1", "inf"):
        said = refused(MEMORY / "choose.py", "--limit-gib", number)
        assert f"{number}' is not a number from 0 on" in said
