"""The shell script that runs all stages: which runs it makes, with stand-ins for Python and
rocprofv3, and a real one.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.conftest import PATHS
from tests.stand_ins import Machine, value
from tests.version3_triton.performance_debugging.conftest import FOLDER, SMALL

import pytest

RUN_ALL = FOLDER / "run_all_stages.sh"

# Stands in for Python: a GPU is there, records and profiles are not needed.
PYTHON = """
import json, os, sys

arguments = sys.argv[1:]
if arguments[0] == "-c":
    print(os.environ.get("DEVICE_FOUND", "cuda"))
    sys.exit()
with open(os.environ["CALLS"], "a") as calls:
    print(json.dumps(["python", *arguments]), file=calls)
if "v3_stage4" in arguments[0]:
    sys.exit(int(os.environ.get("STAGE4", "0")))
"""


@pytest.fixture
def run_all(tmp_path) -> Callable[..., tuple[subprocess.CompletedProcess, list[list[str]]]]:
    """run_all(*arguments, check=0, rocprof=False): how it ended, and the command lines that it gave
    to the tools.
    """
    (tmp_path / "python.py").write_text(PYTHON)
    machine = Machine(tmp_path)
    machine.command("python", f'"{sys.executable}" -IS "{tmp_path / "python.py"}" "$@"')

    def run(*arguments: str, rocprof: bool = False, **options):
        if rocprof:
            machine.tools("rocprofv3")
        machine.calls_file.unlink(missing_ok=True)
        done = machine.run(RUN_ALL, *arguments, **options)
        return done, machine.calls

    return run


def trained(calls: list[list[str]]) -> list[list[str]]:
    return [call for call in calls if call[0] == "python" and "--metrics-out" in call]


def test_every_stage_runs_with_and_without_its_fix(run_all):
    _, calls = run_all("--seed", "7", "--data", "synthetic")
    runs, common = trained(calls), ["--preset", "medium", "--num-layers", "4"]
    for call in runs:
        assert call[call.index("--num-kv-heads") + 1 :][:5] == ["2", *common] and {
            "--use-amp",
            "--measure-peak",
        } < set(call)
        assert "--time-phases" in call
        assert [value(call, flag) for flag in ("--num-steps", "--seed", "--data")] == [
            "60",
            "7",
            "synthetic",
        ]
    written = [value(call, "--metrics-out") for call in runs]
    fixes = {f"./results/stage{number}_fixed_metrics.json" for number in (1, 2, 3, 4, 6)}
    assert (
        set(written) == fixes | {f"./results/stage{number}_metrics.json" for number in range(7)}
        and len(written) == 12
    )
    assert all(("--fixed" in call) == (value(call, "--metrics-out") in fixes) for call in runs)
    assert ["--skip-check" in call for call in runs[-2:]] == [True, False]  # stage 6, and fixed
    assert value(runs[-2], "--profile-dir") == "./results/stage6_profile"
    assert Path(calls[-1][1]).name == "compare_stages.py"
    assert calls[-1][2:] == ["--results-dir", "./results", "--output", "./results/comparison.md"]
    assert sum(Path(call[1]).name == "analyze_kernel_launches.py" for call in calls) == 7


def test_rocprofv3_takes_the_profile_where_there_is_one(run_all):
    _, calls = run_all("--stages", "5", "--results-dir", "here", rocprof=True)
    measured, profiled = trained(calls)
    [rocprof] = [call for call in calls if call[0] == "rocprofv3"]
    assert rocprof[rocprof.index("--") + 1 :] == profiled and profiled[-2:] == ["--num-steps", "5"]
    assert {"--kernel-trace", "--stats", "--truncate-kernels"} < set(rocprof)
    assert (
        value(rocprof, "--output-format") == "csv" and value(rocprof, "-d") == "here/stage5_profile"
    )
    assert "--profile-dir" not in measured + profiled
    _, calls = run_all("--stages", "5", rocprof=True, DEVICE_FOUND="cpu")
    assert all(call[0] == "python" for call in calls)


def test_a_cpu_gets_a_small_model(run_all):
    _, calls = run_all("--stages", "1", DEVICE_FOUND="cpu")
    for call in trained(calls):
        assert (value(call, "--num-kv-heads"), value(call, "--seq-len")) == (
            "2",
            "1024",
        ) and "--preset" not in call


def test_a_failing_stage_is_named_and_the_rest_runs_but_not_after_wrong_input(run_all):
    done, calls = run_all(check=3, STAGE4="3")
    assert "stage4 failed with exit code 3" in done.stderr and any(
        "v3_stage5" in call[1] for call in calls
    )

    done, calls = run_all(check=2, STAGE4="2")
    assert not any("v3_stage5" in call[1] for call in calls)


def test_bad_input(run_all):
    done, calls = run_all("--stages", "1 x", check=2)
    assert (
        done.stderr.startswith("error: there is no stage 'x'")
        and done.stderr.count("\n") == 1
        and not calls
    )


@pytest.mark.slow
def test_a_real_run(tmp_path):
    machine = Machine(tmp_path)
    machine.command("python", f'"{sys.executable}" "$@"')
    environment = {"PYTHONPATH": PATHS, "CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1"}
    machine.run(RUN_ALL, *SMALL, "--num-steps", "6", seconds=3600, **environment)
    results = machine.folder / "results"
    for stage in range(7):
        assert (
            (results / f"stage{stage}_profile.csv").read_text().startswith("name,category,calls,")
        )
        assert (
            json.loads((results / f"stage{stage}_metrics.json").read_text())["status"]
            == "completed"
        )
    comparison = (results / "comparison.md").read_text()
    rows = [line.split("|")[1].strip() for line in comparison.splitlines() if line[:1] == "|"]
    assert rows[2] == "Version 1" and "5 optimized" in rows and len(rows) == 2 + 12
    assert (
        "13 of 14 parameters never get a gradient" in comparison
        and "the loss starts at" in comparison
    )
