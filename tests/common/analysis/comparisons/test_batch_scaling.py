"""Batch scaling: a known line is found again, runs that differ in more than the batch size are refused, files are whole."""

import copy
import csv
import os
from pathlib import Path

from common.analysis.comparisons import batch_scaling
from common.analysis.formulas import flops
from common.config import ModelConfig
from common.errors import UsageError
from common.files import write_json
from common.analysis.profiles.run_record import SCHEMA
from tests.conftest import V1

import pytest

SCRIPT = V1 / "analyze_batch_scaling.py"
FIXED_MS, SAMPLE_MS, FIXED_MIB, SAMPLE_MIB = 12.0, 3.0, 300.0, 25.0
STAMP = "20261121T010203_1"


def run(batch_size: int, ms: float | None = None) -> dict:
    """A record whose step takes 12 ms + 3 ms a sample and 300 MiB + 25 MiB a sample, if nothing else is asked for."""
    ms = FIXED_MS + SAMPLE_MS * batch_size if ms is None else ms
    model, length = ModelConfig(), 128
    counted = flops.training_step(model, batch_size, length)
    rate = counted["total"] / ms * 1e3
    return {
        "schema": SCHEMA, "status": "completed", "version": "v1", "model": model.model_dump(),
        "training": {"preset": "tiny", "batch_size": batch_size, "sequence_length": length, "num_steps": 23},
        "precision": {"compute": "fp32", "tf32": False},
        "device": {"kind": "cpu", "name": "a processor", "memory_mib": 8192.0, "threads": 2},
        "environment": {"torch": "2.13.0"},
        "memory": {"peak_mib": FIXED_MIB + SAMPLE_MIB * batch_size, "kind": "process RSS"},
        "flops_per_step": counted, "flops_per_second": rate, "tokens_per_second": batch_size * length / ms * 1e3,
        "step_ms": {"all": [ms] * 23, "profiled": 3, "median": ms, "p20": 0.9 * ms, "p80": 1.2 * ms, "count": 20},
        "mfu": {"utilization": rate / 1e11, "peak_flops_per_second": 1e11, "peak_source": "measured GEMM"},
    }  # fmt: skip


def save(folder: Path, record: dict, stamp: str = STAMP) -> Path:
    """A profile with the keys of schema tiny-llama-profile/1 in `folder`, which is returned."""
    folder.mkdir(exist_ok=True)
    operator = {
        "name": "aten::mm", "span": "mlp", "phase": "forward", "input_shapes": "[]", "input_types": "[]", "calls": 3,
        "cpu_us": 9.0, "self_cpu_us": 9.0, "device_us": 0.0, "self_device_us": 0.0, "allocated_bytes": 0,
    }  # fmt: skip
    profile = {
        "schema": "tiny-llama-profile/1", "run": record, "attention_only": False, "trace": f"trace_{stamp}.json",
        "profiled_steps": 3, "step_us": [1e3 * record["step_ms"].get("median", 1.0)] * 3, "operators": [operator], "kernels": [],
        "device_busy_us": 0.0, "launch": {"count": 0, "mean_delay_us": 0.0}, "memory_peak_bytes": None,
    }  # fmt: skip
    write_json(folder / f"profile_{stamp}.json", profile)
    return folder


def saved(folder: Path, *batch_sizes: int) -> list[Path]:
    return [save(folder / f"scaling_bs{batch_size}", run(batch_size)) for batch_size in batch_sizes]


def changed(record: dict, *keys: str, value: object) -> dict:
    """A copy in which record[keys[0]][keys[1]]... is `value`."""
    result = copy.deepcopy(record)
    inner = result
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return result


def test_a_known_line_is_found_again_and_the_files_hold_it(run_script, tmp_path):
    folders = saved(tmp_path, 16, 4, 32, 8)
    done = run_script(SCRIPT, "--profile-dirs", *(folder.name for folder in folders))
    assert "t(B) = 12 ms + 3 ms x B" in done.stdout
    assert "50 % at B = 4 and 11 % at B = 32" in done.stdout  # 12 / 24 and 12 / 108
    assert "10 % at B = 9 a / b = 36, outside the measured range" in done.stdout
    assert f"{128 / SAMPLE_MS * 1e3:,.0f} tokens/s" in done.stdout
    assert "m(B) = 300 MiB + 25 MiB x B" in done.stdout
    output = tmp_path / "batch_scaling"
    assert sorted(path.name for path in output.iterdir()) == ["batch_scaling.csv", "batch_scaling.md", "batch_scaling.png"]
    assert (output / "batch_scaling.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "t(B) = 12 ms + 3 ms x B" in (output / "batch_scaling.md").read_text()
    rows = list(csv.DictReader((output / "batch_scaling.csv").open()))
    assert [int(row["batch_size"]) for row in rows] == [4, 8, 16, 32]
    second = {key: value for key, value in rows[1].items() if key != "memory_kind"}
    assert {key: float(value) for key, value in second.items()} == pytest.approx(
        {
            "batch_size": 8, "ms": 36, "p20": 32.4, "p80": 43.2, "steps": 20, "tokens_per_second": 8 * 128 / 0.036,
            "speedup": 2 * 24 / 36, "ideal": 2, "efficiency_percent": 100 * 24 / 36, "peak_mib": 500, "mib_per_sample": 25,
            "tflops": run(8)["flops_per_second"] / 1e12, "mfu_percent": 100 * run(8)["flops_per_second"] / 1e11,
        }
    )  # fmt: skip


def test_the_newest_profile_of_a_folder_is_taken(tmp_path):
    folders = saved(tmp_path, 4, 8)
    save(folders[0], run(4, ms=1000.0), stamp="20251121T010203_9")
    assert [record["step_ms"]["median"] for record in batch_scaling.read(folders)] == [24, 36]


def test_two_points_leave_no_residual_and_three_do(tmp_path):
    folders = saved(tmp_path, 4, 8)
    two = batch_scaling.analyze(folders, tmp_path / "two")
    assert "A line goes through any two points" in two and "Largest distance" not in two
    three = batch_scaling.analyze([*folders, save(tmp_path / "off", run(12, ms=60.0))], tmp_path / "three")
    assert "any two points" not in three
    # 24, 36, 60 ms at 4, 8, 12: the line is 4 + 4.5 B, and the middle point lies 4 ms below it
    assert "t(B) = 4 ms + 4.5 ms x B" in three and "Largest distance of a median from its line: 4 ms" in three


def test_the_reserve_of_a_gpus_memory_is_derived(tmp_path):
    device = {"kind": "cuda", "name": "a GPU", "memory_mib": 2800.0, "multiprocessors": 8}
    folders = [save(tmp_path / str(size), changed(run(size), "device", value=device)) for size in (4, 8, 16)]
    assert "2,800 MiB are full at B = 100" in batch_scaling.analyze(folders, tmp_path / "out")  # (2800 - 300) / 25


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ((50.0, 50.0, 50.0), "Step time does not grow with the batch"),
        ((10.0, 30.0, 70.0), "No fixed cost shows"),
    ],
)
def test_a_line_without_fixed_cost_or_slope_is_not_read_as_one(tmp_path, times, message):
    folders = [save(tmp_path / str(size), run(size, ms)) for size, ms in zip((4, 8, 16), times, strict=True)]
    summary = batch_scaling.analyze(folders, tmp_path / "out")
    assert message in summary and "9 a / b" not in summary


def test_doubtful_medians_are_named(tmp_path):
    record = changed(run(8), "step_ms", "profiled", value=23)
    summary = batch_scaling.analyze([*saved(tmp_path, 4), save(tmp_path / "b", record)], tmp_path / "out")
    assert "All steps at B = 8 ran under the profiler" in summary and "timed steps stand behind" not in summary
    record = changed(run(8), "step_ms", "count", value=2)
    assert "As few as 2 timed steps" in batch_scaling.analyze(
        [tmp_path / "scaling_bs4", save(tmp_path / "c", record)], tmp_path / "out"
    )


def test_utilisation_is_left_out_where_no_peak_is_known(tmp_path):
    folders = [save(tmp_path / str(size), changed(run(size), "mfu", value=None)) for size in (4, 8)]
    summary = batch_scaling.analyze(folders, tmp_path / "out")
    assert "MFU is not given" in summary
    rows = list(csv.DictReader((tmp_path / "out/batch_scaling.csv").open()))
    assert [row["mfu_percent"] for row in rows] == ["", ""]


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("training", "sequence_length"), 64, "sequence length (128 and 64)"),
        (("device", "name"), "another", "device name (a processor and another)"),
        (("device", "threads"), 8, "device threads (2 and 8)"),
        (("model", "num_layers"), 5, "model num_layers (4 and 5)"),
        (("precision", "compute"), "bf16", "precision compute (fp32 and bf16)"),
        (("version",), "v2", "version (v1 and v2)"),
        (("environment", "torch"), "2.15.0", "torch (2.13.0 and 2.15.0)"),
    ],
)
def test_runs_that_differ_in_more_than_the_batch_size_are_refused(tmp_path, keys, value, message):
    folders = [*saved(tmp_path, 4), save(tmp_path / "other", changed(run(8), *keys, value=value))]
    with pytest.raises(UsageError) as refused:
        batch_scaling.analyze(folders, tmp_path / "out")
    assert f"differ in more than the batch size: {message};" in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_batch_size_that_comes_twice_is_refused(tmp_path):
    with pytest.raises(UsageError, match="both have batch size 8: leave one out"):
        batch_scaling.read([*saved(tmp_path, 4, 8), save(tmp_path / "again", run(8))])


def test_a_run_without_a_finished_step_is_refused(tmp_path):
    unfinished = changed(run(8), "step_ms", value={"all": [], "profiled": 0})
    with pytest.raises(UsageError, match="the run finished no step"):
        batch_scaling.read([*saved(tmp_path, 4), save(tmp_path / "b", unfinished)])


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["scaling_bs4"], "at least two batch sizes"),
        (["scaling_bs4", "scaling_bs*"], "scaling_bs* does not exist"),
        (["scaling_bs4", "empty"], "empty holds no profile_*.json"),
        (["scaling_bs4", "cut"], "is not JSON or is cut off"),
        (["scaling_bs4", "foreign"], "not a file of schema tiny-llama-profile/1"),
        (["scaling_bs4", "scaling_bs8", "--output-dir", "file"], "--output-dir: cannot write in file"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(refused, tmp_path, folders, message):
    saved(tmp_path, 4, 8)
    for name in ("empty", "cut", "foreign"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    (tmp_path / f"cut/profile_{STAMP}.json").write_text('{"schema": "tiny-llama')
    write_json(tmp_path / f"foreign/profile_{STAMP}.json", {"schema": SCHEMA})
    before = sorted(os.listdir(tmp_path))
    assert message in refused(SCRIPT, "--profile-dirs", *folders)
    assert sorted(os.listdir(tmp_path)) == before
