"""Growth with the sequence length: known curves are found again, unequal runs are refused, files are
whole, real runs grow as derived.
"""

import csv
import math
from pathlib import Path

from common.config import ModelConfig
from tests.conftest import ROOT, TINY
from tests.records import record, save_profile
from tracepage.cost import footprint
from tracepage.errors import UsageError
from tracepage.files import read_json
from tracepage.views import sequence_memory
from tracepage.views.batch_scaling import fit

import pytest

V2 = ROOT / "version2_pytorch_fused"
LENGTHS = V2 / "analyze_sequence_memory.py"
TRAIN = V2 / "tiny_llama_v2.py"
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
    output, runs = tmp_path / "sequence_memory", sequence_memory.read_lengths(folders)
    assert [run["peak"] for run in read_json(output / "sequence_memory.json")["runs"]] == [
        run.peak for run in runs
    ]
    flash, plain = (
        fit([(run.sequence_length, run.peak) for run in members], 2)
        for members in sequence_memory.grouped(runs).values()
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
    runs = sequence_memory.read_lengths(on_gpu)
    assert [run.step for run in runs] == [step * length for length in lengths]
    assert sequence_memory.exponents(runs) == pytest.approx([1, 1])
    assert all(
        run.step == run.peak
        for run in sequence_memory.read_lengths(save_lengths(tmp_path, True, *lengths))
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
        sequence_memory.read_lengths(folders)


@pytest.mark.slow
def test_real_runs_grow_linearly_with_flash_attention_quadratically_without(run_script, tmp_path):
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
    flash, plain = sequence_memory.grouped(sequence_memory.read_lengths(folders)).values()
    assert sequence_memory.exponents(flash) == pytest.approx([1, 1], abs=0.02)
    assert sequence_memory.exponents(plain)[-1] > 1.7
    matrix = 4 * 2 * 4  # 4 B H
    # L = 2
    assert (
        2 * matrix
        < fit([(run.sequence_length, run.peak) for run in plain], 2).factors[2]
        < 1.1 * 4 * matrix
    )
