"""The commands of the profiling lab; tests/test_exercises.py runs its own tests."""

import shutil
import sys

from tests.conftest import ROOT, V1, finished
from tracepage.files import read_json

import pytest

LAB = V1 / "exercises/profiling_lab/lab.py"
SMALL = (
    "--seq-len",
    16,
    "--d-model",
    32,
    "--num-heads",
    4,
    "--batch-size",
    2,
    "--seq-lens",
    "16,32",
    "--device",
    "cpu",
)
SOLVED = ("--implementation", "solution")


def test_measure_writes_every_part_and_its_conditions(run_script, tmp_path):
    done = run_script(
        LAB, "measure", *SOLVED, "--output", "lab.json", *SMALL, TORCHDYNAMO_DISABLE="1"
    )
    assert "qkv_projection" in done.stdout and "written: lab.json" in done.stdout
    result = read_json(tmp_path / "lab.json", "tiny-llama-profiling-lab/1")
    assert {"command", "date", "device", "environment", "jax", "ceilings"} <= result.keys()
    assert result["precision"] == "fp32" and result["sizes"]["seq_lens"] == [16, 32]
    assert all(result[part] for part in ("components", "optimizations", "frameworks"))
    assert {row["bound"] for row in result["components"]["pytorch"]} <= {
        "compute",
        "memory",
        "launch",
    }
    assert [row["seq_len"] for row in result["frameworks"]] == [16, 32]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("measure", *SOLVED, "--output", "lab.json", "--d-model", 30),
            "--d-model 30 is not divisible by --num-heads 8",
        ),
        (
            ("measure", *SOLVED, "--output", "missing/file/lab.json", "--parts", "everything"),
            "invalid choice: 'everything'",
        ),
        (("measure", *SOLVED), "measure needs --output FILE.json"),
        (("time",), "benchmark_function: problem 1 in README.md"),
    ],
    ids=["heads", "part", "output", "starter"],
)
def test_the_lab_refuses(run_script, tmp_path, arguments, message):
    refusal = run_script(LAB, *arguments, "--device", "cpu", check=2).stderr
    assert refusal.splitlines()[-1].startswith("error: ") and message in refusal.splitlines()[-1]
    assert not (tmp_path / "lab.json").exists()


@pytest.mark.parametrize("problem, printed", [("time", "us of x + 1: ["), ("memory", "x + 1 32.0")])
def test_the_values_of_a_problem(run_script, problem, printed):
    assert printed in run_script(LAB, problem, *SOLVED, "--device", "cpu").stdout


@pytest.mark.parametrize(
    "right, wrong, caught",
    [
        ("range(warmup)", "range(0)", "leaves_the_warmup_out"),
        ("sync and torch.cuda.is_available()", "False", "waits_for_the_work"),
        ("statistics.median(start", "statistics.mean(start", "is_not_moved_by_one_slow_call"),
    ],
    ids=["no warm-up", "no synchronization", "mean"],
)
def test_the_labs_tests_catch_a_clock_that_is_wrong(right, wrong, caught, tmp_path):
    shutil.copytree(LAB.parent, tmp_path / "lab")
    (tmp_path / "common").symlink_to(ROOT / "common")
    clock = (LAB.parent / "solution/profiling.py").read_text()
    assert clock.count(right) == 1
    (tmp_path / "lab/src/profiling.py").write_text(clock.replace(right, wrong))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/",
        "-q",
        "-k",
        "benchmark",
        "-p",
        "no:cacheprovider",
    ]
    done = finished(command, tmp_path / "lab", {"PYTHONPATH": str(ROOT)}, check=1)
    assert f"::test_benchmark_{caught}" in done.stdout
