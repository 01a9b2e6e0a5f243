"""The commands of the profiling lab; tests/test_exercises.py runs its own tests."""

import os
import shutil

from tests.conftest import PATHS, ROOT, V1, python
from tracepage.files import read_json, write_json

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
# The lab's clock asks whether there is a GPU.
WITHOUT_COMPILER = {"TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "-1"}


def test_measure_writes_every_part_and_its_conditions(run_script, tmp_path):
    done = run_script(LAB, "measure", *SOLVED, "--output", "lab.json", *SMALL, **WITHOUT_COMPILER)
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


@pytest.mark.parametrize(("arguments", "message"), [
    (("measure", *SOLVED, "--output", "lab.json", "--d-model", 30), "--d-model 30 is not divisible by --num-heads 8"),
    (("measure", *SOLVED, "--output", "missing/file/lab.json", "--parts", "everything"), "invalid choice: 'everything'"),
    (("measure", *SOLVED), "measure needs --output FILE.json"),
    (("time",), "benchmark_function: problem 1 in README.md"),
    (("experiment", "launch", *SOLVED), "there is no experiment 'launch': use bandwidth, launches"),
    (("compare",), "compare needs the files of measure"),
    (("compare", ROOT / "results/cpu/v1_tiny.json"), "is not a file of schema tiny-llama-profiling-lab/1"),
], ids=["heads", "part", "output", "starter", "experiment", "files", "schema"])  # fmt: skip
def test_the_lab_refuses(run_script, tmp_path, arguments, message):
    refusal = run_script(LAB, *arguments, "--device", "cpu", check=2).stderr
    assert refusal.splitlines()[-1].startswith("error: ") and message in refusal.splitlines()[-1]
    assert not (tmp_path / "lab.json").exists()


@pytest.mark.parametrize("problem, printed", [
    ("time", "us of x + 1: ["), ("memory", "PyTorch, x + 1: peak 32.0, current 32.0, cached None MB"),
    ("report", "Recommendation: it is "),
])  # fmt: skip
def test_the_values_of_a_problem(run_script, problem, printed):
    assert printed in run_script(LAB, problem, *SOLVED, *SMALL).stdout


def test_experiments_measure_every_way_and_say_what_only_a_gpu_shows(run_script, tmp_path):
    flags = (*SOLVED, *SMALL, "--output", "experiments.json")
    done = run_script(LAB, "experiment", *flags, **WITHOUT_COMPILER)
    assert "transfer needs a GPU" in done.stdout and "Symptom: many short kernels." in done.stdout
    result = read_json(tmp_path / "experiments.json", "tiny-llama-profiling-experiments/1")
    ways = {
        (row["experiment"], row["quantity"]): list(row["values"]) for row in result["experiments"]
    }
    # Where torch.compile is off, nothing is called compiled.
    techniques = ["eager", "SDPA", "autocast", "checkpoint"]
    assert ways == {
        ("bandwidth", "ms"): ["eager"],
        ("launches", "ms"): ["512 operations", "1 operation"],
        ("synchronization", "ms"): ["item() each step", "one read at the end"],
        ("techniques", "ms"): techniques,
        ("techniques", "MB"): techniques,
        ("layer", "ms"): ["whole layer", "attention", "MLP", "one norm"],
    }
    memory = next(row["values"] for row in result["experiments"] if row["quantity"] == "MB")
    assert memory["checkpoint"] < memory["eager"]


def test_a_record_without_what_compare_reads_is_refused(refused, tmp_path):
    measured = read_json(ROOT / "results/cpu/profiling_lab.json")
    del measured["environment"]["torch"]
    write_json(tmp_path / "lab.json", measured)
    said = refused(LAB, "compare", "lab.json", "--device", "cpu")
    assert "lab.json: environment.torch: Field required" in said


def test_two_records_side_by_side_and_their_page(run_script, tmp_path):
    files = [ROOT / f"results/{device}/profiling_lab.json" for device in ("cpu", "h100")]
    times = [read_json(file)["components"]["pytorch"][0]["time_ms"] for file in files]
    lines = run_script(LAB, "compare", *files).stdout.splitlines()
    [row] = [line.split() for line in lines if line.startswith("qkv_projection")]
    assert [float(cell) for cell in row[1:]] == pytest.approx(
        [*times, times[0] / times[1]], rel=0.01
    )
    run_script(LAB, "compare", files[0], "--output", "page/lab.html")
    assert (tmp_path / "page/lab.html").read_text().count("<svg") == 3


def test_records_of_different_sizes_are_not_compared(run_script, tmp_path):
    file = ROOT / "results/cpu/profiling_lab.json"
    record = read_json(file)
    record["sizes"]["seq_len"] = 16
    write_json(tmp_path / "other.json", record)
    assert (
        "the records are of different sizes"
        in run_script(LAB, "compare", file, "other.json", check=2).stderr
    )


@pytest.mark.parametrize("right, wrong, caught", [
    ("range(warmup)", "range(0)", "leaves_the_warmup_out"),
    ("sync and torch.cuda.is_available()", "False", "waits_for_the_work"),
    ("statistics.median(start", "statistics.mean(start", "is_not_moved_by_one_slow_call"),
], ids=["no warm-up", "no synchronization", "mean"])  # fmt: skip
def test_the_labs_tests_catch_a_clock_that_is_wrong(right, wrong, caught, tmp_path):
    shutil.copytree(LAB.parent, tmp_path / "lab")
    (tmp_path / "common").symlink_to(ROOT / "common")
    clock = (LAB.parent / "solution/profiling.py").read_text()
    assert clock.count(right) == 1
    (tmp_path / "lab/src/profiling.py").write_text(clock.replace(right, wrong))
    command = [
        "-m",
        "pytest",
        "tests/",
        "-q",
        "-k",
        "benchmark",
        "-p",
        "no:cacheprovider",
    ]
    done = python(command, tmp_path / "lab", os.environ | {"PYTHONPATH": PATHS}, check=1)
    assert f"::test_benchmark_{caught}" in done.stdout
