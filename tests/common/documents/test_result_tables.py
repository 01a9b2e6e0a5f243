"""The documents' tables of measured runs: numbers worked out by hand from records, and the errors where there are none."""

import copy
import gzip
import json
from pathlib import Path

from common.documents import pictures, result_tables
from common.documents.rewrite import TABLES
from common.errors import UsageError
from tests import records
from tests.conftest import ROOT, cells

import pytest

RECORD = json.loads((ROOT / "results/h100/v1_tiny.json").read_text())


def write(path: Path, version: str = "v1", preset: str = "tiny", flags: str = "", **changes: object) -> None:
    """A run's record with other content; `loss` is a list, `ms` the step's median."""
    run = copy.deepcopy(RECORD) | {"version": version, "command": f"tiny_llama_{version}.py --preset {preset} {flags}"}
    run["training"]["preset"] = preset
    run["precision"]["compute"] = "bf16" if "--use-amp" in flags else "fp32"
    if "loss" in changes:
        run["loss"]["all"] = changes.pop("loss")
    if "ms" in changes:
        run["step_ms"]["median"] = changes.pop("ms")
    path.write_text(json.dumps(run | changes))


def test_curves_show_how_far_the_others_have_come(tmp_path):
    expected = [5.0 - 0.01 * i for i in range(40)]
    write(tmp_path / "curve_v1.json", loss=expected)
    write(tmp_path / "curve_v2.json", "v2", loss=[loss + (1e-3 if i == 7 else 0) for i, loss in enumerate(expected)])
    write(tmp_path / "curve_v3.json", "v3", loss=[loss - (0.25 if i == 20 else 0) for i, loss in enumerate(expected)])
    header, *rows = cells(result_tables.curves(tmp_path))
    assert header == ["largest difference to Version 1 up to step",
                      *(f"{name}, NVIDIA H100 80GB HBM3" for name in ("Version 2", "Version 3"))]  # fmt: skip
    assert rows == [[step, "1.0e-03", "0.0e+00" if step in ("8", "16") else "2.5e-01"] for step in ("8", "16", "24", "32", "40")]


def test_curves_need_two_versions_of_one_length(tmp_path):
    for version, steps in (("v1", 20), ("v2", 40)):
        write(tmp_path / f"curve_{version}.json", version, loss=[1.0] * steps)
        with pytest.raises(UsageError, match=r"needs curve_\*\.json of two versions: runs with the same --num-steps"):
            result_tables.curves(tmp_path)


def test_runs_are_compared_with_the_first_version_at_the_same_preset_and_precision(tmp_path):
    write(tmp_path / "compare_tiny_fp32_v1.json")
    write(tmp_path / "compare_tiny_fp32_v3.json", "v3")
    write(tmp_path / "compare_small_bf16_v1.json", "v1", "small", "--use-amp")
    switches = "--use-amp --enable-torch-compile --disable-swiglu-fusion"
    write(tmp_path / "compare_small_bf16_v2_compiled.json", "v2", "small", switches)
    groups, compute, label = result_tables.compared(tmp_path), result_tables.compute, result_tables.label
    assert [[(run["training"]["preset"], compute(run), label(run)) for run in group] for group in groups] == [
        [("tiny", "fp32", "Version 1"), ("tiny", "fp32", "Version 3")],
        [("small", "bf16", "Version 1"), ("small", "bf16", "Version 2, torch-compile, no swiglu-fusion")],
    ]


@pytest.mark.parametrize("lacking", ["v1", "v2"])
def test_a_comparison_needs_the_reference_and_another_run_everywhere(tmp_path, lacking):
    for case, version in [("tiny_fp32", "v1"), ("tiny_fp32", "v2"), ("tiny_bf16", "v1"), ("tiny_bf16", "v2")]:
        if (case, version) != ("tiny_bf16", lacking):
            flags = "--use-amp" if case.endswith("bf16") else ""
            write(tmp_path / f"compare_{case}_{version}.json", version, flags=flags)
    with pytest.raises(UsageError, match=r"needs compare_tiny_bf16_v1\.json"):
        result_tables.compared(tmp_path)


def suite(path: Path, **cells: float | str) -> None:
    """A benchmark of one shape: by model its ms per step, which its three processes spread around, or why there are none."""
    entries = []
    for model, outcome in cells.items():
        times = [outcome + extra for extra in (1.0, 0.0, -0.5)] if isinstance(outcome, float) else []
        entries.append({
            "model": model.replace("_", "-"), "batch_size": 8, "sequence_length": 128,
            "status": "ok" if times else outcome, "reason": None,
            "runs": [
                {"step_ms": {"median": ms, "p20": ms, "p80": ms, "count": 2}, "peak_mib": 9.0, "kind": "GPU allocator"}
                for ms in times
            ],
        })  # fmt: skip
    path.write_text(json.dumps(records.benchmark(entries)))


def test_versions_and_peers_show_how_many_times_faster_than_the_first_they_are(tmp_path):
    """Runs of all files count; captured, only the first model is shown beside itself. fp32 and FP8 are in the other table."""
    suite(tmp_path / "peers_tiny_fp32.json", v2=3.0, v4=2.0, hf=9.0)
    suite(tmp_path / "peers_tiny_bf16.json", v4=2.0, v1=8.0, captured_bf16=3.0, v4_fp8=1.0)
    suite(tmp_path / "peers_small_bf16.json", v1=6.0, v4=4.0, liger="failed", liger_compile_captured=5.0, gone_captured=6.0)
    suite(tmp_path / "captured_tiny_bf16.json", v1=9.0, v1_captured=4.0, v2_captured=1.0)
    suite(tmp_path / "captured_small_bf16.json", v1="failed")
    text = result_tables.versions_and_peers(tmp_path)
    assert cells(text) == [
        ["model", "tiny, bf16, 8 x 128", "small, bf16, 8 x 128"],
        ["v1", "8.75 ms (7.5 to 10)", "6 ms (5.5 to 7)"],
        ["v1-captured", "4 ms, 2.19x (1.5 to 2.86)", ""],
        ["v4", "**2 ms, 4.38x (2.5 to 6.67)**", "**4 ms, 1.5x (1.1 to 2)**"],
        ["liger", "", "failed"],
        ["liger-compile-captured", "", "5 ms, 1.2x (0.917 to 1.56)"],
        ["captured-bf16", "3 ms, 2.92x (1.88 to 4)", ""],
        ["gone-captured", "", "6 ms, 1x (0.786 to 1.27)"],
    ]
    assert text.endswith("Against v1-captured, which waits for no host: tiny, v4 2x.\n")


def test_benchmarks_of_one_case_are_of_one_device(tmp_path):
    for name in ("peers_small_bf16.json", "captured_small_bf16.json"):
        study = json.loads((ROOT / "results/h200" / name).read_text())
        study["device"] |= {"name": "NVIDIA H100"} if name.startswith("captured") else {}
        (tmp_path / name).write_text(json.dumps(study))
    with pytest.raises(UsageError, match="captured_small_bf16.json is of another device or model"):
        result_tables.versions_and_peers(tmp_path)


def test_a_folder_without_the_first_model_in_bf16_has_no_headline(tmp_path):
    suite(tmp_path / "peers_tiny_fp32.json", v1=4.0)
    with pytest.raises(UsageError, match="no benchmark has v1 in bf16"):
        result_tables.versions_and_peers(tmp_path)


def test_a_run_is_a_row(tmp_path):
    shared = {"loss": [7.0] + [2.0] * 19 + [3.0, 5.0] * 10, "ms": 12.5, "parameters": 2_500_000, "flops_per_second": 16.75e12}
    ceilings = {"flops_per_second": 33.5e12, "bytes_per_second": 1e12, "operation_seconds": 1e-6, "precision": "fp32"}
    write(tmp_path / "v1_tiny.json", device=RECORD["device"] | {"name": "NVIDIA H200"}, ceilings=ceilings, **shared)
    found = dict(zip(*cells(result_tables.training(tmp_path)), strict=True))
    assert (found["ms/step"], found["M parameters"]) == ("12.5", "2.5")
    assert found["loss"] == "7.00 to 4.00 in 40 steps"  # the mean of the last 20
    assert (found["MFU %"], found["% of measured GEMM"]) == ("25", "50"), "MFU is a share of the data sheet's peak alone"


def test_a_step_is_held_against_three_limits(tmp_path):
    """A step of 10 ms: 60 MB at 100 GB/s are 6 % of it, 100 launches of 20 us 20 %; the GPU is busy for a quarter."""
    limits = {"flops_per_second": 33.5e12, "bytes_per_second": 100e9, "operation_seconds": 20e-6, "precision": "fp32"}
    steps = records.record()["step_ms"] | {"median": 10.0}
    run = records.record(device__name="NVIDIA H200", flops_per_second=6.7e12, ceilings=limits, step_ms=steps)
    side = json.dumps([[5_000_000], [5_000_000], []])
    operator = {"name": "aten::add", "input_shapes": side, "input_types": json.dumps(["float", "float", "Scalar"])}
    profile = records.profile(
        run, [operator], [{"name": "add"}], launch={"count": 100, "mean_delay_us": 1.0}, device_busy_us=250.0
    )
    (tmp_path / "v1_tiny.json").write_text(json.dumps(run))
    (tmp_path / "v1_tiny_profile.json.gz").write_bytes(gzip.compress(json.dumps(profile).encode()))
    header, row = cells(result_tables.efficiency(tmp_path))
    found = dict(zip(header, row, strict=True))
    shares = [found[name] for name in ("MFU %", "% of measured GEMM", "% of measured copy", "launches, % of step")]
    assert shares == ["10", "20", "6", "20"] and (found["launches"], found["GPU idle %"]) == ("100", "75")


def test_weak_scaling_of_a_model_that_fits_no_single_gpu_has_no_efficiency(tmp_path):
    measured = records.scaling()
    measured["cells"][0] |= {"status": "out of memory", "reason": "CUDA", "runs": []}
    (tmp_path / "scaling_large_bf16.json").write_text(json.dumps(measured))
    assert cells(result_tables.weak_scaling(tmp_path))[1] == ["large", "bf16", "v1", "ddp", "10 ms"]
    with pytest.raises(UsageError, match="has an efficiency on several GPUs"):
        pictures.scaling_efficiency(tmp_path)


@pytest.mark.parametrize("table, message", [
    *((table, "measure with results/measure_v1.sh folder") for table in ("training", "phases", "spans", "efficiency")),
    *((table, "measure with results/measure_versions.sh folder")
      for table in ("versions_and_peers", "versions_and_peers_spread")),
    *((table, "measure with") for table in ("memory_saved", "launches", "amdahl", "optimizer", "profiler_cost")),
    ("curves", r"needs curve_\*\.json of two versions"), ("clocks", "no .csv file"),
    ("number_formats", "needs format_PRESET_bf16.json and"), ("format_curves", "needs format_curve_SEED_bf16.json and"),
    ("weak_scaling", "measure with results/measure_scaling.sh"), ("answers", "holds no run and no trace"),
])  # fmt: skip
def test_an_empty_folder_names_the_script_that_fills_it(tmp_path, table, message):
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match=message):
        TABLES[table](tmp_path / "folder")
