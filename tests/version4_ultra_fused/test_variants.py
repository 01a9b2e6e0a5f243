"""Three broken variants of Version 4: what each shows, what does not show it, and that its repair passes."""

import runpy
import subprocess
import sys
from pathlib import Path

from common.errors import RunError
from common.files import read_json
from common.training import version_files
from tests.conftest import ROOT, TINY, V1, run_options

import pytest

V4 = ROOT / "version4_ultra_fused"
FOLDER = V4 / "exercises/debugging"
SCRIPT = FOLDER / "variants.py"
LETTERS = "abc"
pytestmark = pytest.mark.usefixtures("no_kernels")


def file(which: str, letter: str) -> Path:
    return FOLDER / which / f"variant_{letter}.py"


@pytest.mark.parametrize("letter, flags", [("a", ()), ("a", ("--use-amp",)), ("b", ("--use-amp",))])
def test_a_fault_shows_in_the_losses(execute, letter, flags):
    shown = execute(SCRIPT, file("starter", letter), "--check", *TINY, *flags, check=1).out
    assert shown.splitlines()[-1] == "FAIL: losses differ by more than 0.02 nats"
    first = shown.splitlines()[1].split()
    assert first[2] == first[3]  # the forward pass is right


@pytest.mark.parametrize("letter", LETTERS)
def test_a_repaired_variant_computes_as_version_4_does(execute, letter):
    assert "PASS: " in execute(SCRIPT, file("solution", letter), "--check", *TINY, "--use-amp").out


def test_stale_weights_need_bf16_to_show_and_a_side_stream_needs_a_gpu(execute):
    execute(SCRIPT, file("starter", "b"), "--check", *TINY)
    assert "a CPU has no side stream" in execute(SCRIPT, file("starter", "c"), "--check", *TINY, "--use-amp").out


@pytest.mark.parametrize("letter", LETTERS)
def test_a_comparison_of_one_step_finds_none(execute, letter):
    """As the reports say."""
    versions = ("--baseline", V1 / "tiny_llama_v1.py", "--optimized", file("starter", letter))
    execute(ROOT / "version2_pytorch_fused/validate_numerical_accuracy.py", *versions, "--batch-size", "1", "--seq-len", "16")


def test_a_stale_batch_is_learned_by_heart(execute, tmp_path):
    ends = []
    for which in ("starter", "solution"):
        flags = (*TINY, "--data", "synthetic", "--num-steps", "20", "--learning-rate", "0.01", "--metrics-out", "run.json")
        execute(SCRIPT, file(which, "a"), *flags)
        record = read_json(tmp_path / "run.json")
        assert record["version"] == "variant_a" and record["status"] == "completed"
        ends.append(record["loss"]["all"][-1])
    assert ends[0] < ends[1] - 1


def test_wrong_input_is_one_line(refused):
    assert "is not a Python file" in refused(SCRIPT, "nowhere.py")
    assert "is not a version" in refused(SCRIPT, SCRIPT)


# On a GPU


def check(which: str, letter: str, *flags: str) -> int:
    version = version_files.load(file(which, letter))
    options = run_options(version, "--preset", "small", "--use-amp", *flags)
    return runpy.run_path(str(SCRIPT))["check"](version, options)


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [(), ("--no-capture-step",)], ids=("graph", "eager"))
@pytest.mark.parametrize("letter", LETTERS)
def test_on_a_gpu_every_fault_shows_and_its_repair_removes_it(letter, flags):
    assert check("solution", letter, *flags) == 0
    if letter != "c":
        assert check("starter", letter, *flags) == 1
        return
    with pytest.raises(RunError, match="has a gradient of zeros"):
        check("starter", letter, *flags)


@pytest.mark.gpu
def test_a_branch_that_nobody_waits_for_cannot_be_captured(tmp_path):
    """In a process of its own: a capture that failed leaves PyTorch without random numbers on the GPU."""
    command = [sys.executable, SCRIPT, file("starter", "c"), "--preset", "small", "--use-amp", "--num-steps", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "this step cannot be captured" in done.stderr
