"""Growth with one size: known curves are found again, unequal runs are refused, files are whole,
real runs grow as derived.
"""

import csv
import math
import os
from pathlib import Path

from common.config import ModelConfig
from tests.conftest import ROOT, TINY, V1
from tests.records import record, save_profile
from tracepage.cost import flops, footprint
from tracepage.errors import UsageError
from tracepage.files import read_json
from tracepage.views import growth

import pytest

V2 = ROOT / "version2_pytorch_fused"
SIZES, LENGTHS, TRAIN = (
    V1 / "analyze_batch_scaling.py",
    V2 / "analyze_sequence_memory.py",
    V2 / "tiny_llama_v2.py",
)

# ----------------------------------------------------------------------------------------------------------- batch size


def run(batch_size: int, ms: float | None = None, **changes) -> dict:
    """A record whose step takes 12 ms + 3 ms a sample and 300 MiB + 25 MiB a sample, if nothing
    else is asked for.
    """
    ms = 12.0 + 3.0 * batch_size if ms is None else ms
    counted = flops.training_step(ModelConfig(), batch_size, 128)
    own = {
        "training__batch_size": batch_size,
        "device": {"kind": "cpu", "name": "a processor", "memory_mib": 8192.0, "threads": 2},
        "memory": {"peak_mib": 300.0 + 25.0 * batch_size, "kind": "process RSS"},
        "flops_per_step": counted,
        "flops_per_second": counted["total"] / ms * 1e3,
        "tokens_per_second": batch_size * 128 / ms * 1e3,
        "step_ms": {
            "all": [ms] * 23,
            "profiled": 3,
            "median": ms,
            "p20": 0.9 * ms,
            "p80": 1.2 * ms,
            "count": 20,
        },
        "ceilings": {
            "flops_per_second": 1e11,
            "bytes_per_second": 1e10,
            "operation_seconds": 1e-6,
            "precision": "fp32",
        },
    }
    return record(**own | changes)


def save_sizes(folder: Path, *batch_sizes: int, **changes) -> list[Path]:
    return [save_profile(folder / f"size{size}", run(size, **changes)) for size in batch_sizes]


def shown(folders: list[Path]) -> str:
    """The terminal text on one line."""
    return " ".join(growth.batch_scaling(folders).terminal().split())


def test_a_known_line_is_found_again_and_the_csv_has_its_numbers(execute, tmp_path):
    folders = save_sizes(tmp_path, 16, 4, 32, 8)
    text = shown(folders)
    assert "t(B) = 12 ms + 3 ms x B" in text and "m(B) = 300 MiB + 25 MiB x B" in text
    assert "S / b = 42,667 tokens/s" in text  # 128 / 3 ms
    execute(SIZES, "--profile-dirs", *(folder.name for folder in folders))
    rows = list(csv.DictReader((tmp_path / "batch_scaling/batch_scaling.csv").open()))
    assert [int(row["B"]) for row in rows] == [4, 8, 16, 32]
    assert rows[1].pop("MFU %") == "", "this processor is not listed"
    assert {key: float(value) for key, value in rows[1].items()} == pytest.approx(
        {
            "B": 8,
            "ms/step": 36,
            "p20": 32.4,
            "p80": 43.2,
            "tokens/s": 8 * 128 / 0.036,
            "peak MiB": 500,
            "TFLOP/s": run(8)["flops_per_second"] / 1e12,
            "% of measured GEMM": 100 * run(8)["flops_per_second"] / 1e11,
        }
    )


def test_two_points_leave_no_residual_and_three_do(tmp_path):
    folders = save_sizes(tmp_path, 4, 8)
    assert "A line fits any two points" in shown(folders)
    # 24, 36, 60 ms at 4, 8, 12: the line is 4 + 4.5 B, and the middle point lies 4 ms below it
    three = shown([*folders, save_profile(tmp_path / "off", run(12, ms=60.0))])
    assert (
        "t(B) = 4 ms + 4.5 ms x B" in three
        and "Largest distance of a point from its line: 4 ms" in three
    )
    flat = [save_profile(tmp_path / f"flat{size}", run(size, 50.0)) for size in (4, 8, 16)]
    assert "S / b" not in shown(flat)


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["size4", "again"], "give two folders or more, with one profile for each batch size"),
        (
            ["size4", "other"],
            "differ in more than the batch size: version (v1 and v2), sequence length (128 and 64), capture_step",
        ),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(refused, tmp_path, folders, message):
    save_sizes(tmp_path, 4, 8, settings={"capture_step": False})
    save_profile(tmp_path / "again", run(4, settings={"capture_step": False}))
    save_profile(
        tmp_path / "other",
        run(8, version="v2", training__sequence_length=64, settings={"capture_step": True}),
    )
    before = sorted(os.listdir(tmp_path))
    assert message in refused(SIZES, "--profile-dirs", *folders)
    assert sorted(os.listdir(tmp_path)) == before


# ------------------------------------------------------------------------------------------------------ sequence length

MIB = 2**20


def save_length(
    folder: Path, length: int, peak: int | None, flash: bool = True, on_gpu: bool = False, **changes
) -> Path:
    """A profile at one length; `changes` are those of its run's record."""
    device = (
        {"kind": "cuda", "name": "a GPU"}
        if on_gpu
        else {"kind": "cpu", "name": "a processor", "threads": 2}
    )
    own = {
        "version": "v2",
        "settings": {"swiglu": True, "flash_attention": flash},
        "model__max_sequence_length": length,
        "training__batch_size": 4,
        "training__sequence_length": length,
        "device": device | {"memory_mib": 1000.0},
    }
    return save_profile(
        folder, record(**own | changes), kernels=[{"name": "gemm"}] * on_gpu, memory_peak_bytes=peak
    )


def peak_of(length: int, flash: bool = True) -> int:
    """300 KiB a position and 2 MiB; without flash attention 774 bytes a pair more: 1.5 times L (4 B
    H + 1).
    """
    return 2 * MIB + 300 * 1024 * length + (0 if flash else 774 * length**2)


def save_lengths(folder: Path, flash: bool, *lengths: int) -> list[Path]:
    return [
        save_length(folder / f"{flash}{length}", length, peak_of(length, flash), flash)
        for length in lengths
    ]


def test_a_known_parabola_is_found_again_and_the_files_hold_it(execute, tmp_path):
    folders = [
        *save_lengths(tmp_path, False, 512, 128, 1024, 256),
        *save_lengths(tmp_path, True, 128, 256, 512, 1024),
    ]
    execute(LENGTHS, "--profile-dirs", *(folder.name for folder in folders))
    output, runs = tmp_path / "sequence_memory", growth.read_lengths(folders)
    assert [run["peak"] for run in read_json(output / "sequence_memory.json")["runs"]] == [
        run.peak for run in runs
    ]
    flash, plain = (
        growth.fit([(run.sequence_length, run.peak) for run in members], 2)
        for members in growth.grouped(runs).values()
    )
    assert (*flash.factors, flash.residual) == pytest.approx((2 * MIB, 300 * 1024, 0, 0), abs=1e-3)
    assert (*plain.factors, plain.residual) == pytest.approx(
        (2 * MIB, 300 * 1024, 774, 0), abs=1e-3
    )
    rows = list(csv.DictReader((output / "sequence_memory.csv").open()))
    assert [(row["run"], int(row["S"])) for row in rows[3:5]] == [
        ("v2, flash attention", 1024),
        ("v2, plain attention", 128),
    ]
    assert float(rows[7]["exponent"]) == pytest.approx(
        math.log2(peak_of(1024, False) / peak_of(512, False))
    )


def test_what_lasts_is_in_a_gpus_peak_only(tmp_path):
    states = footprint.states(ModelConfig())
    lasting, step = states["weights"] + states["adamw"], 300 * 1024
    lengths = (128, 256, 512)
    on_gpu = [
        save_length(tmp_path / str(length), length, lasting + step * length, on_gpu=True)
        for length in lengths
    ]
    runs = growth.read_lengths(on_gpu)
    assert [run.step for run in runs] == [step * length for length in lengths]
    assert growth.exponents(runs) == pytest.approx([1, 1])
    assert all(
        run.step == run.peak for run in growth.read_lengths(save_lengths(tmp_path, True, *lengths))
    )


@pytest.mark.parametrize(
    ("length", "peak", "change", "message"),
    [
        (512, None, {}, "recorded without memory: profile again with --enable-memory-profiling"),
        (
            512,
            MIB,
            {"training__batch_size": 8, "settings__swiglu": False},
            r"differ in more than sequence length and attention: batch size \(4 and 8\), swiglu \(True and False\);",
        ),
        (
            256,
            MIB,
            {"settings__flash_attention": False},
            "v2, flash attention: give 3 sequence lengths or more",
        ),
    ],
)
def test_a_profile_that_does_not_say_enough_or_is_of_another_run_is_refused(
    tmp_path, length, peak, change, message
):
    folders = [
        *save_lengths(tmp_path, True, 128, 256),
        save_length(tmp_path / "other", length, peak, **change),
    ]
    with pytest.raises(UsageError, match=message):
        growth.read_lengths(folders)


@pytest.mark.slow
def test_real_runs_grow_linearly_with_flash_attention_and_quadratically_without(
    run_script, tmp_path
):
    """The quadratic factor must lie between L matrices, which are kept for the backward pass, and L
    + 2.
    """
    own = (
        "--vocab-size 40 --data synthetic --num-steps 3 --warmup-steps 1 --enable-memory-profiling"
    )
    folders = []
    for attention in ("enable", "disable"):
        for length in (64, 128, 256):
            folders.append(tmp_path / f"{attention}{length}")
            run = [
                "--seq-len",
                length,
                f"--{attention}-flash-attention",
                "--profile-dir",
                folders[-1],
            ]
            run_script(TRAIN, *TINY, *own.split(), *run)
    flash, plain = growth.grouped(growth.read_lengths(folders)).values()
    assert growth.exponents(flash) == pytest.approx([1, 1], abs=0.02)
    assert growth.exponents(plain)[-1] > 1.7
    matrix = 4 * 2 * 4  # 4 B H
    # L = 2
    assert (
        2 * matrix
        < growth.fit([(run.sequence_length, run.peak) for run in plain], 2).factors[2]
        < 1.1 * 4 * matrix
    )
