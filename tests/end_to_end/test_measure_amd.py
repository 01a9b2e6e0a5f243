"""results/measure_amd.sh: what it measures, skips and refuses. Python and the profilers are stand-ins."""

import json
import shutil
from pathlib import Path

from tests.conftest import ROOT
from tests.stand_ins import Machine, value

import pytest

# Of every script: it writes what the shell scripts look for. With $FAILS among its arguments it fails before.
STUB = """
import json, os, sys

name, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
print(json.dumps([name, *arguments]))
if os.environ.get("FAILS") in arguments:
    sys.exit(3)
for flag, file in (("--output-dir", "benchmark.json"), ("--profile-dir", "profile_1.json")):
    if flag in arguments:
        open(os.path.join(arguments[arguments.index(flag) + 1], file), "w").write('{"status": "completed"}')
"""
PROFILERS = ("rocprofv3", "rocprof-sys-run", "rocprof-compute")
CELLS = [
    *(f"peers_{preset}_bf16.json" for preset in ("tiny", "small", "medium", "large")),
    *(f"v1_{preset}_profile.json.gz" for preset in ("tiny", "small", "medium")),
    *(f"profiles/rocprofv3_tiny_llama_v{version}" for version in (1, 2, 3, 4)),
    "profiles/rocprof_sys_tiny_llama_v4", "profiles/rocprof_compute_tiny_llama_v4",
]  # fmt: skip


class Clone(Machine):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        root = folder / "a clone"
        for version in ROOT.glob("version*_*/tiny_llama_v*.py"):
            (root / version.parent.name).mkdir(parents=True)
            (root / version.parent.name / version.name).write_text(STUB)
        v2 = root / "version2_pytorch_fused"
        (v2 / "benchmark_suite.py").write_text(STUB)
        for script in (ROOT / v2.name).glob("run_rocprof*.sh"):
            shutil.copy(script, v2)
        (root / "common").mkdir()
        shutil.copy(ROOT / "common/profilers.sh", root / "common")
        shutil.copytree(ROOT / "results", root / "results", ignore=lambda _, names: [n for n in names if not n.endswith(".sh")])
        for tool in ("mktemp", "gzip"):
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.asks_for_a_gpu(0)
        self.measure, self.out = root / "results/measure_amd.sh", root / "results/mi300x"

    def started(self, **environment) -> list[list[str]]:
        """Each script that ran, with its arguments."""
        return [json.loads(line) for line in self.run(self.measure, "mi300x", **environment).stdout.splitlines()]

    def written(self) -> list[str]:
        return [cell for cell in CELLS if (self.out / cell).exists()]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_all_versions_presets_and_installed_profilers(clone):
    clone.tools(*PROFILERS)
    runs = clone.started()
    assert clone.written() == CELLS
    benchmarks = [run for run in runs if run[0] == "benchmark_suite.py"]
    assert [value(run, "--preset") for run in benchmarks] == ["tiny", "small", "medium", "large"]
    assert all(value(run, "--models") == "v1,v2,v3,v4" and "--use-amp" in run for run in benchmarks)
    assert clone.called == ["rocprofv3"] * 4 + ["rocprof-sys-run"] + ["rocprof-compute"] * 2
    assert [value(run, "--metrics-out") for run in runs if "--measure-peak" in run][0].endswith("mi300x/v1_tiny.json")


def test_what_is_there_is_not_measured_again(clone):
    clone.tools(*PROFILERS)
    clone.started()
    assert clone.started() == []
    (clone.out / "peers_medium_bf16.json").unlink()
    [again] = clone.started()
    assert again[0] == "benchmark_suite.py" and value(again, "--preset") == "medium"


def test_a_plan_names_what_is_left_and_starts_nothing(clone):
    clone.out.mkdir()
    (clone.out / CELLS[0]).touch()
    assert clone.run(clone.measure, "--plan", "mi300x", NO_GPU="1").stdout.splitlines() == CELLS[1:]
    assert clone.written() == CELLS[:1]


def test_without_an_amd_gpu_it_starts_nothing(clone):
    done = clone.run(clone.measure, "mi300x", check=2, NO_GPU="1")
    assert done.stderr == "error: PyTorch sees no AMD GPU here: make preflight says why\n" and not clone.out.exists()


@pytest.mark.parametrize("arguments", [(), ("--help",), ("--plan",), ("mi300x", "tiny:100")], ids=str)
def test_wrong_arguments_say_how_it_is_used(clone, arguments):
    assert clone.run(clone.measure, *arguments, check=2).stderr.startswith("usage: ")


def test_what_fails_is_named_and_the_rest_goes_on(clone):
    clone.tools(*PROFILERS)
    done = clone.run(clone.measure, "mi300x", check=3, FAILS="small")  # the code of the first
    failed = [cell for cell in CELLS if "small" in cell or cell.startswith("profiles/")]
    assert clone.written() == [cell for cell in CELLS if cell not in failed]
    assert [line.split(" failed ")[0] for line in done.stderr.splitlines() if " failed " in line] == failed


def test_a_missing_profiler_is_skipped(clone):
    clone.tools("rocprofv3")
    clone.started()
    assert clone.written() == CELLS[:-2]
