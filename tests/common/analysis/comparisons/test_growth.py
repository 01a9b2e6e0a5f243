"""Growth with one size: known curves are found again, unequal runs are refused, files are whole, real runs grow as derived."""

import csv
import math
import os
from pathlib import Path

from common.analysis.comparisons import growth
from common.analysis.formulas import flops, footprint
from common.analysis.output.report import Report
from common.config import ModelConfig
from common.errors import UsageError
from tests.conftest import ROOT, TINY, V1
from tests.records import record, save_profile

import pytest

V2 = ROOT / "version2_pytorch_fused"
SIZES_SCRIPT, LENGTHS_SCRIPT, TRAIN = (
    V1 / "analyze_batch_scaling.py", V2 / "analyze_sequence_memory.py", V2 / "tiny_llama_v2.py"
)  # fmt: skip


def words(report: Report) -> str:
    """The terminal text on one line."""
    return " ".join(report.terminal().split())


# ----------------------------------------------------------------------------------------------------------- batch size

FIXED_MS, SAMPLE_MS, FIXED_MIB, SAMPLE_MIB = 12.0, 3.0, 300.0, 25.0


def run(batch_size: int, ms: float | None = None, **changes) -> dict:
    """A record whose step takes 12 ms + 3 ms a sample and 300 MiB + 25 MiB a sample, if nothing else is asked for."""
    ms = FIXED_MS + SAMPLE_MS * batch_size if ms is None else ms
    counted = flops.training_step(ModelConfig(), batch_size, 128)
    own = {
        "training__batch_size": batch_size, "device": {"kind": "cpu", "name": "a processor", "memory_mib": 8192.0, "threads": 2},
        "memory": {"peak_mib": FIXED_MIB + SAMPLE_MIB * batch_size, "kind": "process RSS"}, "flops_per_step": counted,
        "flops_per_second": counted["total"] / ms * 1e3, "tokens_per_second": batch_size * 128 / ms * 1e3,
        "step_ms": {"all": [ms] * 23, "profiled": 3, "median": ms, "p20": 0.9 * ms, "p80": 1.2 * ms, "count": 20},
        "ceilings": {"flops_per_second": 1e11, "bytes_per_second": 1e10, "operation_seconds": 1e-6, "precision": "fp32"},
    }  # fmt: skip
    return record(**own | changes)


def save_sizes(folder: Path, *batch_sizes: int) -> list[Path]:
    return [save_profile(folder / f"scaling_bs{batch_size}", run(batch_size)) for batch_size in batch_sizes]


def test_a_known_line_is_found_again_and_the_files_hold_it(execute, tmp_path):
    folders = save_sizes(tmp_path, 16, 4, 32, 8)
    printed = execute(SIZES_SCRIPT, "--profile-dirs", *(folder.name for folder in folders)).out
    shown = " ".join(printed.split())
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


def test_two_points_leave_no_residual_and_three_do_and_a_gpus_reserve_is_derived(tmp_path):
    folders = save_sizes(tmp_path, 4, 8)
    two = words(growth.batch_scaling(folders))
    assert "A line fits any two points" in two and "Largest distance" not in two
    three = words(growth.batch_scaling([*folders, save_profile(tmp_path / "off", run(12, ms=60.0))]))
    assert "any two points" not in three
    # 24, 36, 60 ms at 4, 8, 12: the line is 4 + 4.5 B, and the middle point lies 4 ms below it
    assert "t(B) = 4 ms + 4.5 ms x B" in three and "Largest distance of a median from its line: 4 ms" in three

    device = {"kind": "cuda", "name": "a GPU", "memory_mib": 2800.0, "multiprocessors": 8}
    folders = [save_profile(tmp_path / str(size), run(size, device=device)) for size in (4, 8, 16)]
    assert "2,800 MiB are full at B = 100" in words(growth.batch_scaling(folders))  # (2800 - 300) / 25


def test_the_limit_of_throughput_is_that_of_all_processes(tmp_path):
    runs = [
        run(size, training__world_size=2, tokens_per_second=2 * size * 128 / (12.0 + 3.0 * size) * 1e3) for size in (4, 8, 16)
    ]
    folders = [save_profile(tmp_path / str(size), each) for size, each in zip((4, 8, 16), runs, strict=True)]
    assert f"Throughput cannot exceed S / b = {2 * 128 / SAMPLE_MS * 1e3:,.0f} tokens/s" in words(growth.batch_scaling(folders))


def test_runs_with_other_switches_are_no_batch_scaling(tmp_path):
    folders = [save_profile(tmp_path / str(size), run(size, settings={"capture_step": size == 8})) for size in (4, 8)]
    with pytest.raises(UsageError, match=r"differ in more than the batch size: capture_step \(False and True\)"):
        growth.batch_scaling(folders)


@pytest.mark.parametrize(("times", "message"), [
    ((50.0, 50.0, 50.0), "Step time does not grow with the batch"), ((10.0, 30.0, 70.0), "there is no fixed cost"),
])  # fmt: skip
def test_a_line_without_fixed_cost_or_slope_is_not_read_as_one(tmp_path, times, message):
    folders = [save_profile(tmp_path / str(size), run(size, ms)) for size, ms in zip((4, 8, 16), times, strict=True)]
    summary = words(growth.batch_scaling(folders))
    assert message in summary and "9 a / b" not in summary


@pytest.mark.parametrize(("change", "message"), [
    ({"step_ms__profiled": 23}, "All steps of B = 8 ran under the profiler"),
    ({"step_ms__count": 2}, "A median is of only 2 timed steps"),
    ({"step_ms__p80": 36 * 1.3}, "30 % of the median for B = 8 (40 %)"),
    ({"ceilings": None}, ""),
])  # fmt: skip
def test_doubtful_medians_are_named_and_nothing_else(tmp_path, change, message):
    text = words(growth.batch_scaling([*save_sizes(tmp_path, 4), save_profile(tmp_path / "b", run(8, **change))]))
    doubts = "All steps of", "A median is of only", "Noisy: "
    assert message in text and sum(doubt in text for doubt in doubts) == bool(message) and "MFU is not given" in text


@pytest.mark.parametrize(("folders", "message"), [
    (["scaling_bs4"], "at least two batch sizes"),
    (["scaling_bs4", "scaling_bs*"], "scaling_bs* does not exist"),
    (["scaling_bs4", "empty"], "empty holds no profile_*.json"),
    (["scaling_bs4", "again"], "both have batch size 4: leave one out"),
    (["scaling_bs4", "unfinished"], "step_ms"),
    (["scaling_bs4", "other"], "differ in more than the batch size: version (v1 and v2), sequence length (128 and 64), device"),
    (["scaling_bs4", "scaling_bs8", "--output-dir", "file"], "--output-dir: cannot write in file"),
])  # fmt: skip
def test_bad_input_is_one_line_and_leaves_nothing(refused, tmp_path, folders, message):
    save_sizes(tmp_path, 4, 8)
    save_profile(tmp_path / "again", run(4))
    save_profile(tmp_path / "other", run(8, version="v2", training__sequence_length=64, device__threads=8))
    save_profile(tmp_path / "unfinished", run(8, step_ms={"all": [], "profiled": 0}))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    before = sorted(os.listdir(tmp_path))
    assert message in refused(SIZES_SCRIPT, "--profile-dirs", *folders)
    assert sorted(os.listdir(tmp_path)) == before


# ------------------------------------------------------------------------------------------------------ sequence length

LENGTHS = (128, 256, 512, 1024)
SETTINGS = {"qkv": True, "flash_attention": True, "swiglu": True, "torch_compile": False}
MIB = 2**20


def save_length(folder: Path, length: int, peak: int | None, flash: bool = True, on_gpu: bool = False, **changes) -> Path:
    """A profile at one length; `changes` are those of its run's record."""
    device = {"kind": "cuda", "name": "a GPU"} if on_gpu else {"kind": "cpu", "name": "a processor", "threads": 2}
    own = {
        "version": "v2", "settings": SETTINGS | {"flash_attention": flash}, "model__max_sequence_length": length,
        "training__batch_size": 4, "training__sequence_length": length, "device": device | {"memory_mib": 1000.0},
    }  # fmt: skip
    return save_profile(folder, record(**own | changes), kernels=[{"name": "gemm"}] * on_gpu, memory_peak_bytes=peak)


def flash_runs(folder: Path, *lengths: int) -> list[Path]:
    """300 KiB a position and 2 MiB."""
    return [save_length(folder / f"flash{length}", length, 2 * MIB + 300 * 1024 * length) for length in lengths]


def plain_runs(folder: Path, *lengths: int) -> list[Path]:
    """The same and 774 bytes a pair: 1.5 times the 516 of the formula, L (4 B H + 1) with L = 4, B = 4, H = 8."""
    peaks = {length: 2 * MIB + 300 * 1024 * length + 774 * length**2 for length in lengths}
    return [save_length(folder / f"plain{length}", length, peak, flash=False) for length, peak in peaks.items()]


def test_a_known_parabola_is_found_again_and_the_files_hold_it(execute, tmp_path):
    folders = [*plain_runs(tmp_path, 512, 128, 1024, 256), *flash_runs(tmp_path, *LENGTHS)]
    printed = execute(LENGTHS_SCRIPT, "--profile-dirs", *(folder.name for folder in folders)).out
    output, runs = tmp_path / "sequence_memory", growth.read_lengths(folders)
    assert sorted(path.name for path in output.iterdir()) == [f"sequence_memory.{kind}" for kind in ("csv", "json", "md", "png")]
    assert growth.peak_table(growth.load(output / "sequence_memory.json")) == growth.peak_table(runs)
    assert (output / "sequence_memory.png").read_bytes()[:4] == b"\x89PNG"
    flash, plain = map(growth.parabola, growth.grouped(runs).values())
    assert (*flash.factors, flash.residual) == pytest.approx((2 * MIB, 300 * 1024, 0, 0), abs=1e-3)
    assert (*plain.factors, plain.residual) == pytest.approx((2 * MIB, 300 * 1024, 774, 0), abs=1e-3)
    for text in (" ".join(printed.split()), (output / "sequence_memory.md").read_text()):
        assert "v2, flash attention: from S = 512 to 1024 the step's memory grows with the exponent 0.99. c is 0.00 times" in text
        assert "c is 1.50 times what plain attention keeps by formula, its L matrices" in text and "= 1.50. The S^2" in text
        assert f"overtakes the linear one at S = b / c = {300 * 1024 / 774:.0f}." in text
        assert (
            "At S = 1024 the peak of v2, flash attention is 302 MiB; v2, plain attention 3.56 times as much (1,076 MiB)." in text
        )
        assert "any three points" not in text
    rows = list(csv.DictReader((output / "sequence_memory.csv").open()))
    assert [(row["run"], int(row["S"])) for row in rows[3:5]] == [("v2, flash attention", 1024), ("v2, plain attention", 128)]
    peaks = [2 * MIB + 300 * 1024 * length + 774 * length**2 for length in LENGTHS]
    assert [float(row["peak MiB"]) * MIB for row in rows[4:]] == pytest.approx(peaks)
    assert float(rows[7]["exponent"]) == pytest.approx(math.log2(peaks[3] / peaks[2])) and rows[4]["exponent"] == ""
    kept = footprint.activations(ModelConfig(), 4, 1024)
    assert float(rows[7]["by formula, scores"]) * MIB == pytest.approx(kept["scores"])
    assert float(rows[7]["by formula, without scores"]) * MIB == pytest.approx(kept["total"] - kept["scores"])


def test_what_lasts_is_in_a_gpus_peak_only(tmp_path):
    states = footprint.states(ModelConfig())
    lasting, step = states["weights"] + states["adamw"], 300 * 1024
    on_gpu = [save_length(tmp_path / str(length), length, lasting + step * length, on_gpu=True) for length in LENGTHS]
    runs = growth.read_lengths(on_gpu)
    assert [run.step for run in runs] == [step * length for length in LENGTHS]
    assert growth.exponents(runs) == pytest.approx([1, 1, 1])
    assert "Counted by the GPU allocator" in words(growth.sequence_memory(on_gpu))
    assert all(run.step == run.peak for run in growth.read_lengths(flash_runs(tmp_path, *LENGTHS)))


def test_another_version_is_a_group_of_its_own(tmp_path):
    folders = flash_runs(tmp_path, *LENGTHS[:3])
    for length in LENGTHS[:3]:
        folders.append(save_length(tmp_path / f"v1_{length}", length, MIB * length, version="v1", settings={}))
    runs, text = growth.read_lengths(folders), words(growth.sequence_memory(folders))
    assert list(growth.grouped(runs)) == ["v1", "v2, flash attention"]
    assert "A parabola fits any three points" in text and "At S = 512 the peak of v2, flash attention is" in text
    assert {row[4] for row in growth.fit_table(runs)[1]} == {None}  # no residual


@pytest.mark.parametrize(("length", "peak", "change", "message"), [
    (512, None, {}, "recorded without memory: profile again with --enable-memory-profiling"),
    (512, MIB, {"step_ms__all": [1.0]}, "has only profiled steps.*take --num-steps 3 or more"),
    (128, MIB, {}, "are both v2, flash attention, sequence length 128: leave one out"),
    (512, MIB, {"training__batch_size": 8, "settings__swiglu": False},
     r"differ in more than sequence length and attention: batch size \(4 and 8\), swiglu \(True and False\);"),
])  # fmt: skip
def test_a_profile_that_does_not_say_enough_or_is_of_another_run_is_refused(tmp_path, length, peak, change, message):
    folders = [*flash_runs(tmp_path, 128, 256), save_length(tmp_path / "other", length, peak, **change)]
    with pytest.raises(UsageError, match=message):
        growth.read_lengths(folders)


def test_a_profile_of_an_earlier_version_or_too_few_lengths_are_one_line(refused, tmp_path):
    save_profile(tmp_path / "old", record(version="v2"), memory_peak_bytes=MIB)
    assert "does not say which attention it ran" in refused(LENGTHS_SCRIPT, "--profile-dirs", "old")
    said = refused(LENGTHS_SCRIPT, "--profile-dirs", *flash_runs(tmp_path, 128, 256))
    assert "v2, flash attention: 2 sequence lengths, but the fit needs at least 3" in said


@pytest.mark.slow
def test_real_runs_grow_linearly_with_flash_attention_and_quadratically_without(run_script, tmp_path):
    """The quadratic factor must lie between L matrices, which are kept for the backward pass, and L + 2."""
    own = "--vocab-size 40 --data synthetic --num-steps 3 --warmup-steps 1 --enable-memory-profiling"
    folders = []
    for attention in ("enable", "disable"):
        for length in (64, 128, 256):
            folders.append(tmp_path / f"{attention}{length}")
            run = ["--seq-len", length, f"--{attention}-flash-attention", "--profile-dir", folders[-1]]
            run_script(TRAIN, *TINY, *own.split(), *run)
    runs = growth.read_lengths(folders)
    flash, plain = growth.grouped(runs).values()
    assert [run.group for run in (flash[0], plain[0])] == ["v2, flash attention", "v2, plain attention"]
    assert growth.exponents(flash) == pytest.approx([1, 1], abs=0.02)
    assert growth.exponents(plain)[-1] > 1.7
    matrix = 4 * 2 * 4  # 4 B H
    assert 2 * matrix < growth.parabola(plain).factors[2] < 1.1 * 4 * matrix  # L = 2
