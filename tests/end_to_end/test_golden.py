"""Golden reports: what each command prints, and the files that it writes, over the same stored
profiles.

The profiles are the H100's and the CPU's of Version 1 in results/, and a fused one that is made
from the H100's. A change that is meant is kept with `WRITE_GOLDEN=1 pytest
tests/end_to_end/test_golden.py`; read the difference before you commit it.
"""

import copy
import csv
import os
import shutil
from pathlib import Path

from common.training import flop_counters
from tests import branched_traces
from tests.conftest import ROOT, V1
from tests.kernel_files import FIXTURES
from tracepage.files import read_json, write_json

import pytest

GOLDEN, RESULTS, V2 = (
    ROOT / "tests/fixtures/golden",
    ROOT / "results",
    ROOT / "version2_pytorch_fused",
)
V4 = ROOT / "version4_ultra_fused"
COMMANDS = {
    "bottlenecks_cpu": (V1 / "analyze_bottlenecks.py", "--profile-data cpu"),
    "bottlenecks_gpu": (
        V1 / "analyze_bottlenecks.py",
        "--profile-data before --output-report out/bottlenecks.md",
    ),
    "batch_scaling": (V1 / "analyze_batch_scaling.py", "--profile-dirs size2 size4 before"),
    "runs": (V1 / "show_runs.py", "v1_metrics.json v2_metrics.json"),
    "prediction": (V1 / "predict.py", "before --change flash-attention --expect 1.3"),
    "prediction_checked": (V1 / "predict.py", "--check before after --file guesses.json"),
    "profiles": (
        V1 / "run_pytorch_profiler.py",
        "--analyze-existing cpu/profile_1.json after/profile_1.json",
    ),
    "flops": (
        V1 / "run_deepspeed_flops.py",
        "--analyze-results flops.json --computational-intensity --generate-roofline",
    ),
    "launches": (
        V2 / "analyze_kernel_launches.py",
        "--trace-file before --csv-out launches.csv --top 8",
    ),
    "launches_of_rocprof": (
        V2 / "analyze_kernel_launches.py",
        f"--trace-file {FIXTURES}/new_kernel_trace.csv",
    ),
    "kernel_reduction": (
        V2 / "analyze_kernel_reduction.py",
        "--baseline before --fused after --top 5",
    ),
    "sequence_memory": (
        V2 / "analyze_sequence_memory.py",
        "--profile-dirs flash128 flash256 flash512 plain128 plain256 plain512",
    ),
    "bandwidth": (
        V2 / "memory_bandwidth_analyzer.py",
        "--profile-data before --generate-roofline-plot",
    ),
    "bandwidth_of_counters": (
        V2 / "memory_bandwidth_analyzer.py",
        f"--profile-data {FIXTURES}/amd --generate-roofline-plot",
    ),
    "versions": (V2 / "compare_versions.py", "--v1 v1 --v2 v2 --output versions.md"),
    "regression": (
        V2 / "performance_regression_test.py",
        "--baseline-results v1_metrics.json --current-results v2_metrics.json",
    ),
    "fusion_report": (
        V2 / "generate_fusion_report.py",
        "--baseline before --fused after --output out/fusion.md --ablation ablation.json",
    ),
    "critical_path": (V4 / "run_ultra_profiling.py", "--analyze-existing branches/profile_1.json"),
}


def write_inputs(folder: Path) -> None:
    """Everything that the commands read."""
    gpu, cpu = (
        read_json(RESULTS / device / "v1_tiny_profile.json.gz") for device in ("h100", "cpu")
    )
    fused = copy.deepcopy(gpu)
    fused["run"] |= {
        "version": "v2",
        "settings": {"qkv": True, "flash_attention": True},
        "command": "tiny_llama_v2.py",
    }
    for row in fused["operators"] + fused["kernels"]:
        if row["span"] == "attention":
            row |= {
                key: row[key] / 2
                for key in ("self_cpu_us", "self_device_us", "device_us")
                if key in row
            }
            row["calls"] //= 2
    for name, profile in {
        "cpu": cpu,
        "before": gpu,
        "after": fused,
        "v1": gpu,
        "v2": fused,
    }.items():
        save(folder / name, profile)
    for name in ("v1", "v2"):
        (folder / name / f"tiny_llama_{name}.py").write_text("")
        shutil.copy(
            RESULTS / f"h200/compare_tiny_fp32_{name}.json", folder / f"{name}_metrics.json"
        )
        shutil.copy(folder / f"{name}_metrics.json", folder / name / "metrics.json")
    for size in (2, 4):
        smaller = copy.deepcopy(gpu)
        smaller["run"]["training"]["batch_size"] = size
        steps, factor = smaller["run"]["step_ms"], 0.5 + size / 16
        steps |= {key: steps[key] * factor for key in ("median", "p20", "p80")} | {
            "all": [ms * factor for ms in steps["all"]]
        }
        smaller["run"]["memory"]["peak_mib"] *= 0.25 + 0.09 * size
        save(folder / f"size{size}", smaller)
    for kind, square in (("flash", 0), ("plain", 2**12)):
        for length in (128, 256, 512):
            fused["run"]["settings"]["flash_attention"] = kind == "flash"
            fused["run"]["training"]["sequence_length"] = length
            peak = 2**28 + 2**17 * length + square * length**2
            save(folder / f"{kind}{length}", fused | {"memory_peak_bytes": peak})
    guess = {
        "profile": "p",
        "profiled": gpu["run"]["date"],
        "change": "flash-attention",
        "expected": 1.3,
        "bound": 1.2,
    }
    write_json(
        folder / "guesses.json", {"schema": "tiny-llama-predictions/1", "predictions": [guess]}
    )
    shutil.copy(RESULTS / "h100/v2_ablation_tiny_fp32.json", folder / "ablation.json")
    flop_counters.write(
        folder, {"FlopCounterMode": {"forward": 4 * 10**9, "backward": 8 * 10**9}}, gpu["run"]
    )
    flop_counters.add_work(folder / "flops_profile.json", folder / "before/profile_1.json")
    (folder / "flops_profile.json").rename(folder / "flops.json")
    (folder / "mfu_analysis.csv").unlink()
    branched_traces.write(folder / "branches", version="v3")
    branched_traces.write(folder / "captured", captured=True, version="v4", step_ms__median=0.05)


def save(folder: Path, profile: dict) -> None:
    folder.mkdir()
    write_json(folder / "profile_1.json", profile)


def described(path: Path) -> str:
    """The name of a file, and what its readers rely on: the header and number of rows of a CSV
    file, the keys of a JSON file.
    """
    if path.suffix == ".csv":
        header, *rows = csv.reader(path.open())
        return f"{path.name}: {len(rows)} x {','.join(header)}"
    return f"{path.name}: {', '.join(read_json(path))}" if path.suffix == ".json" else path.name


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_its_golden_report(name, execute, tmp_path):
    script, arguments = COMMANDS[name]
    write_inputs(tmp_path)
    before = set(tmp_path.rglob("*"))
    printed = execute(script, *arguments.split()).out.replace(str(FIXTURES), "FIXTURES")
    written = sorted(path for path in set(tmp_path.rglob("*")) - before if path.is_file())
    if name == "fusion_report":
        printed += (tmp_path / "out/fusion.md").read_text().split("## How to repeat")[0]
    text = "\n".join([printed.rstrip(), "", *map(described, written), ""])
    if extra := os.environ.get("ALL_FILES"):
        for path in written:
            shutil.copy(path, Path(extra) / f"{name}__{path.name}")
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
