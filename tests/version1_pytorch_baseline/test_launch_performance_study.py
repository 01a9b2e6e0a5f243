"""The performance study of a version: which runs it starts, in which folder, and what it says to wrong arguments.

The version, the summary and `python` are stand-ins in a copy of the folders; one test runs the real Version 1.
"""

import json
import os
import shutil
import signal
from pathlib import Path

from tests.conftest import PATHS, ROOT, TINY, V1
from tests.stand_ins import SCRIPT, Machine, value

import pytest

NAME, CHOICE = "launch_performance_study.sh", "give tiny, small, medium or large, and --enable-profilers"
V2 = ROOT / "version2_pytorch_fused"
FOLDERS = [path.parent for path in sorted(ROOT.glob("version*_*/tiny_llama_v*.py"))]
SUMMARY = "import json, pathlib, sys\nprint(json.dumps(['summary', pathlib.Path.cwd().name, *sys.argv[1:]]))"


class Study(Machine):
    def __init__(self, folder: Path, version: Path) -> None:
        super().__init__(folder)
        self.root = folder / "a clone"
        for each in {V1, V2, version}:
            (self.root / each.name).mkdir(parents=True)
        (self.root / "common").mkdir()
        for script in (ROOT / "common").glob("*.sh"):
            shutil.copy(script, self.root / "common")
        self.launcher = shutil.copy(version / NAME, self.root / version.name, follow_symlinks=False)
        for script in V2.glob("*.sh"):
            shutil.copy(script, self.root / V2.name)
        [self.version] = (self.root / version.name / path.name for path in version.glob("tiny_llama_v*.py"))
        self.version.write_text(SCRIPT)
        (self.root / V1.name / "analyze_performance_study.py").write_text(SUMMARY)
        self.asks_for_a_gpu(1)

    def started(self, *arguments: str, **environment) -> list[list[str]]:
        """The arguments of each run, and of the summary, in their order."""
        return [json.loads(line) for line in self.run(self.launcher, *arguments, **environment).stdout.splitlines()]


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return Study(tmp_path, V1)


@pytest.mark.parametrize("version", FOLDERS, ids=lambda path: path.name)
def test_every_version_has_it_and_runs_in_fp32_on_a_cpu(tmp_path, version):
    run, summary = Study(tmp_path, version).started()
    assert run == ["--preset", "tiny", "--num-steps", "20", "--metrics-out", "metrics_fp32.json"]
    assert summary == ["summary", "tiny", "--folder", "."]


def test_a_version_copied_with_common_alone_trains_and_names_what_is_not_there(tmp_path):
    study = Study(tmp_path, FOLDERS[2])
    for other in (V1, V2):
        shutil.rmtree(study.root / other.name)
    done = study.run(study.launcher, "--enable-profilers")
    assert [value(json.loads(line), "--metrics-out") for line in done.stdout.splitlines()] == [
        "metrics_fp32.json", "flops_analysis/metrics.json",
    ]  # fmt: skip
    named = [line.rpartition("/")[2] for line in done.stderr.splitlines()]
    assert named == ["run_all_profilers.sh", "analyze_performance_study.py"]


def test_a_gpu_adds_mixed_precision_and_steps(study):
    plain, mixed, _ = study.started("medium", NO_GPU="0")
    assert value(plain, "--preset") == value(mixed, "--preset") == "medium" and value(mixed, "--num-steps") == "100"
    assert "--use-amp" not in plain and "--use-amp" in mixed and value(mixed, "--metrics-out") == "metrics_bf16.json"


@pytest.mark.parametrize("no_gpu", ("0", "1"))
def test_profilers_come_after_the_runs_in_their_precision(study, no_gpu):
    *_, profiled, counted, summary = study.started("small", "--enable-profilers", "--", "--data", "a b", NO_GPU=no_gpu)
    assert "--enable-pytorch-profiler" in profiled and value(profiled, "--profile-dir") == "profiles"
    assert "--enable-deepspeed-flops" in counted and summary[:2] == ["summary", "small"]
    for run in (profiled, counted):
        assert ("--use-amp" in run) == (no_gpu == "0") and value(run, "--preset") == "small" and value(run, "--data") == "a b"


def test_the_vendors_profilers_are_run(study):
    study.tools("nvidia-smi", "nsys")
    done = study.run(study.launcher, "--enable-profilers", NO_GPU="0")
    assert study.called == ["nvidia-smi", "nsys"] and "ncu is not on PATH: skipped" in done.stderr
    assert str(study.version) in study.calls[-1] and "--use-amp" in study.calls[-1]


@pytest.mark.parametrize("code, kept", [(0, ["notes.txt"]), (2, ["metrics_bf16.json", "notes.txt", "profiles"])])
def test_an_earlier_study_of_the_preset_is_replaced_but_not_by_wrong_input(study, code, kept):
    folder = study.folder / "performance_study/tiny"
    (folder / "profiles").mkdir(parents=True)
    for name in ("metrics_bf16.json", "profiles/profile_1.json", "notes.txt"):
        (folder / name).write_text("earlier")
    study.run(study.launcher, check=code, SCRIPT_CODE=str(code))
    assert sorted(path.name for path in folder.iterdir()) == kept
    assert all(path.read_text() == "earlier" for path in folder.rglob("*.*"))


def test_a_study_that_was_killed_in_its_first_run_leaves_the_earlier_one(study):
    folder = study.folder / "performance_study/tiny"
    (folder / "profiles").mkdir(parents=True)
    for name in ("metrics_fp32.json", "profiles/profile_1.json"):
        (folder / name).write_text("earlier")
    study.version.write_text("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)")
    study.run(study.launcher, check=-signal.SIGKILL)
    study.version.write_text(SCRIPT)
    study.run(study.launcher, check=2, SCRIPT_CODE="2")
    assert [path.read_text() for path in folder.rglob("*.json")] == ["earlier"] * 2
    study.run(study.launcher, check=1, SCRIPT_CODE="1")
    assert not list(folder.rglob("*.json")), "results of a run that wrote none"


@pytest.mark.parametrize("code, lines", [(1, 3), (2, 1), (130, 1)], ids=["failed", "wrong input", "signal"])
def test_a_run_that_fails_is_followed_by_the_others_and_wrong_input_and_a_signal_end_it(study, code, lines):
    done = study.run(study.launcher, check=code, NO_GPU="0", SCRIPT_CODE=str(code))
    assert len(done.stdout.splitlines()) == lines and ("summary" in done.stdout) == (code == 1)


@pytest.mark.parametrize("arguments, message", (
    (["huge"], f"'huge' is no argument of {NAME}: {CHOICE}"),
    (["tiny", "--profile"], f"'--profile' is no argument of {NAME}: {CHOICE}"),
    (["tiny", "small"], "give one preset, not tiny and small"),
))  # fmt: skip
def test_wrong_arguments_are_one_line(study, arguments, message):
    done = study.run(study.launcher, *arguments, check=2)
    assert done.stderr == f"error: {message}\n" and not done.stdout and not (study.folder / "performance_study").exists()


@pytest.mark.slow
def test_a_real_study(tmp_path):
    machine = Machine(tmp_path)
    small = (*TINY, "--num-steps", 3, "--data", "synthetic", "--device", "cpu")
    done = machine.run(
        V1 / NAME, "--enable-profilers", "--", *small, seconds=1800,
        PYTHONPATH=PATHS, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", HOME=os.environ.get("HOME", "/"),
    )  # fmt: skip
    folder = machine.folder / "performance_study/tiny"
    assert {"performance_study.md", "performance_study.html", "metrics_fp32.json", "spans.png"} <= {
        path.name for path in folder.iterdir()
    }
    assert "# Performance study of v1, preset tiny" in done.stdout and "FLOPs of a training step" in done.stdout
