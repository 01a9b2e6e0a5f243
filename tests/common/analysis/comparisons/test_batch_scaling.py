"""Batch scaling: a known line is found again, runs that differ in more than the batch size are refused, files are whole."""

import csv
import os
from pathlib import Path

from common.analysis.comparisons import batch_scaling
from common.analysis.formulas import flops
from common.analysis.output.report import Report
from common.config import ModelConfig
from common.errors import UsageError
from common.files import write_json
from common.records.run_record import SCHEMA
from tests.conftest import V1
from tests.records import profile, record

import pytest

SCRIPT = V1 / "analyze_batch_scaling.py"
FIXED_MS, SAMPLE_MS, FIXED_MIB, SAMPLE_MIB = 12.0, 3.0, 300.0, 25.0
STAMP = "20261121T010203_1"


def run(batch_size: int, ms: float | None = None, **changes) -> dict:
    """A record whose step takes 12 ms + 3 ms a sample and 300 MiB + 25 MiB a sample, if nothing else is asked for."""
    ms = FIXED_MS + SAMPLE_MS * batch_size if ms is None else ms
    counted = flops.training_step(ModelConfig(), batch_size, 128)
    rate = counted["total"] / ms * 1e3
    own = {
        "training__batch_size": batch_size, "device": {"kind": "cpu", "name": "a processor", "memory_mib": 8192.0, "threads": 2},
        "memory": {"peak_mib": FIXED_MIB + SAMPLE_MIB * batch_size, "kind": "process RSS"},
        "flops_per_step": counted, "flops_per_second": rate, "tokens_per_second": batch_size * 128 / ms * 1e3,
        "step_ms": {"all": [ms] * 23, "profiled": 3, "median": ms, "p20": 0.9 * ms, "p80": 1.2 * ms, "count": 20},
        "ceilings": {"flops_per_second": 1e11, "bytes_per_second": 1e10, "operation_seconds": 1e-6, "precision": "fp32"},
    }  # fmt: skip
    return record(**own | changes)


def save(folder: Path, run: dict, stamp: str = STAMP) -> Path:
    """A profile of the run in `folder`, which is returned."""
    folder.mkdir(exist_ok=True)
    write_json(folder / f"profile_{stamp}.json", profile(run, [{"name": "aten::mm"}]))
    return folder


def saved(folder: Path, *batch_sizes: int) -> list[Path]:
    return [save(folder / f"scaling_bs{batch_size}", run(batch_size)) for batch_size in batch_sizes]


def words(report: Report) -> str:
    """The terminal text on one line."""
    return " ".join(report.terminal().split())


def test_a_known_line_is_found_again_and_the_files_hold_it(run_script, tmp_path):
    folders = saved(tmp_path, 16, 4, 32, 8)
    done = run_script(SCRIPT, "--profile-dirs", *(folder.name for folder in folders))
    assert all(len(line) <= 120 for line in done.stdout.splitlines())
    shown = " ".join(done.stdout.split())
    assert "t(B) = 12 ms + 3 ms x B" in shown
    assert "50 % at B = 4 and 11 % at B = 32" in shown  # 12 / 24 and 12 / 108
    assert "10 % at B = 9 a / b = 36, outside the measured range" in shown
    assert f"{128 / SAMPLE_MS * 1e3:,.0f} tokens/s" in shown
    assert "m(B) = 300 MiB + 25 MiB x B" in shown
    output = tmp_path / "batch_scaling"
    assert sorted(path.name for path in output.iterdir()) == ["batch_scaling.csv", "batch_scaling.md", "batch_scaling.png"]
    assert (output / "batch_scaling.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "t(B) = 12 ms + 3 ms x B" in (output / "batch_scaling.md").read_text()
    rows = list(csv.DictReader((output / "batch_scaling.csv").open()))
    assert [int(row["batch_size"]) for row in rows] == [4, 8, 16, 32]
    second = {key: value for key, value in rows[1].items() if key not in ("memory_kind", "mfu_percent")}
    assert rows[1]["mfu_percent"] == "", "this processor is not listed"
    assert {key: float(value) for key, value in second.items()} == pytest.approx(
        {
            "batch_size": 8, "ms": 36, "p20": 32.4, "p80": 43.2, "steps": 20, "tokens_per_second": 8 * 128 / 0.036,
            "speedup": 2 * 24 / 36, "ideal": 2, "efficiency_percent": 100 * 24 / 36, "peak_mib": 500, "mib_per_sample": 25,
            "tflops": run(8)["flops_per_second"] / 1e12, "gemm_percent": 100 * run(8)["flops_per_second"] / 1e11,
        }
    )  # fmt: skip


def test_the_newest_profile_of_a_folder_is_taken(tmp_path):
    folders = saved(tmp_path, 4, 8)
    save(folders[0], run(4, ms=1000.0), stamp="20251121T010203_9")
    assert [record["step_ms"]["median"] for record in batch_scaling.read(folders)] == [24, 36]


def test_two_points_leave_no_residual_and_three_do(tmp_path):
    folders = saved(tmp_path, 4, 8)
    two = words(batch_scaling.analyze(folders))
    assert "A line fits any two points" in two and "Largest distance" not in two
    three = words(batch_scaling.analyze([*folders, save(tmp_path / "off", run(12, ms=60.0))]))
    assert "any two points" not in three
    # 24, 36, 60 ms at 4, 8, 12: the line is 4 + 4.5 B, and the middle point lies 4 ms below it
    assert "t(B) = 4 ms + 4.5 ms x B" in three and "Largest distance of a median from its line: 4 ms" in three


def test_the_reserve_of_a_gpus_memory_is_derived(tmp_path):
    device = {"kind": "cuda", "name": "a GPU", "memory_mib": 2800.0, "multiprocessors": 8}
    folders = [save(tmp_path / str(size), run(size, device=device)) for size in (4, 8, 16)]
    assert "2,800 MiB are full at B = 100" in words(batch_scaling.analyze(folders))  # (2800 - 300) / 25


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ((50.0, 50.0, 50.0), "Step time does not grow with the batch"),
        ((10.0, 30.0, 70.0), "there is no fixed cost"),
    ],
)
def test_a_line_without_fixed_cost_or_slope_is_not_read_as_one(tmp_path, times, message):
    folders = [save(tmp_path / str(size), run(size, ms)) for size, ms in zip((4, 8, 16), times, strict=True)]
    summary = words(batch_scaling.analyze(folders))
    assert message in summary and "9 a / b" not in summary


def test_doubtful_medians_are_named(tmp_path):
    [folder] = saved(tmp_path, 4)
    profiled = words(batch_scaling.analyze([folder, save(tmp_path / "b", run(8, step_ms__profiled=23))]))
    assert "All steps of B = 8 ran under the profiler" in profiled
    assert "timed steps: raise" not in profiled and "Noisy" not in profiled
    few = words(batch_scaling.analyze([folder, save(tmp_path / "c", run(8, step_ms__count=2))]))
    assert "A median is of only 2 timed steps" in few
    noisy = words(batch_scaling.analyze([folder, save(tmp_path / "d", run(8, step_ms__p80=36 * 1.3))]))
    assert "30 % of the median for B = 8 (40 %)" in noisy


def test_utilisation_is_left_out_where_no_peak_is_known(tmp_path):
    folders = [save(tmp_path / str(size), run(size, ceilings=None)) for size in (4, 8)]
    report = batch_scaling.analyze(folders)
    assert "MFU is not given" in words(report)
    report.write(tmp_path / "out", "batch_scaling", ["csv"])
    rows = list(csv.DictReader((tmp_path / "out/batch_scaling.csv").open()))
    assert [row["mfu_percent"] for row in rows] == [row["gemm_percent"] for row in rows] == ["", ""]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"training__sequence_length": 64}, "sequence length (128 and 64)"),
        ({"device__name": "another"}, "device name (a processor and another)"),
        ({"device__threads": 8}, "device threads (2 and 8)"),
        ({"model__num_layers": 5}, "model num_layers (4 and 5)"),
        ({"precision__compute": "bf16"}, "precision compute (fp32 and bf16)"),
        ({"version": "v2"}, "version (v1 and v2)"),
        ({"environment__torch": "2.15.0"}, "torch (2.13.0 and 2.15.0)"),
    ],
)
def test_runs_that_differ_in_more_than_the_batch_size_are_refused(tmp_path, change, message):
    folders = [*saved(tmp_path, 4), save(tmp_path / "other", run(8, **change))]
    with pytest.raises(UsageError) as refused:
        batch_scaling.analyze(folders)
    assert f"differ in more than the batch size: {message};" in str(refused.value)


def test_a_batch_size_that_comes_twice_is_refused(tmp_path):
    with pytest.raises(UsageError, match="both have batch size 8: leave one out"):
        batch_scaling.read([*saved(tmp_path, 4, 8), save(tmp_path / "again", run(8))])


def test_a_run_without_a_finished_step_is_refused(tmp_path):
    unfinished = run(8, step_ms={"all": [], "profiled": 0})
    with pytest.raises(UsageError, match="step_ms"):
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
