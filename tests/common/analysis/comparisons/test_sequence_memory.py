"""Memory over the sequence length: a known parabola is found again, unequal runs are refused, and real runs grow as derived."""

import csv
import math
from pathlib import Path

from common.analysis.comparisons import sequence_memory
from common.analysis.formulas import footprint
from common.config import ModelConfig
from common.errors import UsageError
from common.files import write_json
from tests.conftest import ROOT, TINY
from tests.records import profile, record

import pytest

V2 = ROOT / "version2_pytorch_fused"
SCRIPT, TRAIN = V2 / "analyze_sequence_memory.py", V2 / "tiny_llama_v2.py"
LENGTHS = (128, 256, 512, 1024)
SETTINGS = {"qkv": True, "flash_attention": True, "swiglu": True, "torch_compile": False}
MIB = 2**20


def measured(length: int, peak: int | None, flash: bool = True, on_gpu: bool = False, **changes) -> dict:
    """A profile at one length; `changes` are those of its run's record."""
    device = {"kind": "cuda", "name": "a GPU"} if on_gpu else {"kind": "cpu", "name": "a processor", "threads": 2}
    own = {
        "version": "v2", "settings": SETTINGS | {"flash_attention": flash}, "model__max_sequence_length": length,
        "training__batch_size": 4, "training__sequence_length": length, "device": device | {"memory_mib": 1000.0},
    }  # fmt: skip
    kernels = [{"name": "gemm"}] if on_gpu else []
    return profile(record(**own | changes), [{"name": "aten::mm"}], kernels, memory_peak_bytes=peak)


def save(folder: Path, content: dict) -> Path:
    folder.mkdir(exist_ok=True)
    write_json(folder / "profile_20261121T010203_1.json", content)
    return folder


def flash_runs(folder: Path, *lengths: int) -> list[Path]:
    """300 KiB a position and 2 MiB."""
    return [save(folder / f"flash{length}", measured(length, 2 * MIB + 300 * 1024 * length)) for length in lengths]


def plain_runs(folder: Path, *lengths: int) -> list[Path]:
    """The same and 774 bytes a pair: 1.5 times the 516 of the formula, L (4 B H + 1) with L = 4, B = 4, H = 8."""
    peaks = {length: 2 * MIB + 300 * 1024 * length + 774 * length**2 for length in lengths}
    return [save(folder / f"plain{length}", measured(length, peak, flash=False)) for length, peak in peaks.items()]


def test_a_known_parabola_is_found_again_and_the_files_hold_it(run_script, tmp_path):
    folders = [*plain_runs(tmp_path, 512, 128, 1024, 256), *flash_runs(tmp_path, *LENGTHS)]
    done = run_script(SCRIPT, "--profile-dirs", *(folder.name for folder in folders))
    output = tmp_path / "sequence_memory"
    assert sorted(path.name for path in output.iterdir()) == [f"sequence_memory.{kind}" for kind in ("csv", "json", "md", "png")]
    assert sequence_memory.table(sequence_memory.load(output / "sequence_memory.json")) == sequence_memory.table(
        sequence_memory.read(folders)
    )
    assert (output / "sequence_memory.png").read_bytes()[:4] == b"\x89PNG"
    groups = sequence_memory.grouped(sequence_memory.read(folders)).values()
    flash, plain = map(sequence_memory.fit, groups)
    assert flash == pytest.approx((2 * MIB, 300 * 1024, 0, 0), abs=1e-3)
    assert plain == pytest.approx((2 * MIB, 300 * 1024, 774, 0), abs=1e-3)
    for text in (" ".join(done.stdout.split()), (output / "sequence_memory.md").read_text()):
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
    on_gpu = [save(tmp_path / str(length), measured(length, lasting + step * length, on_gpu=True)) for length in LENGTHS]
    runs = sequence_memory.read(on_gpu)
    assert [run.step for run in runs] == [step * length for length in LENGTHS]
    assert sequence_memory.exponents(runs) == pytest.approx([1, 1, 1])
    assert "Counted by the GPU allocator" in sequence_memory.conditions(runs)
    assert all(run.step == run.peak for run in sequence_memory.read(flash_runs(tmp_path, *LENGTHS)))


def test_another_version_is_a_group_of_its_own(tmp_path):
    folders = flash_runs(tmp_path, *LENGTHS[:3])
    for length in LENGTHS[:3]:
        folders.append(save(tmp_path / f"v1_{length}", measured(length, MIB * length, version="v1", settings={})))
    runs = sequence_memory.read(folders)
    assert list(sequence_memory.grouped(runs)) == ["v1", "v2, flash attention"]
    notes = "\n".join(sequence_memory.findings(runs))
    assert "A parabola fits any three points" in notes and "At S = 512 the peak of v2, flash attention is" in notes
    assert {row[4] for row in sequence_memory.fit_table(runs)[1]} == {None}  # no residual


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"training__batch_size": 8}, "batch size (4 and 8)"),
        ({"device__name": "another"}, "device name (a processor and another)"),
        ({"model__num_layers": 5}, "model num_layers (4 and 5)"),
        ({"precision__compute": "bf16"}, "precision compute (fp32 and bf16)"),
        ({"environment__torch": "2.15.0"}, "torch (2.13.0 and 2.15.0)"),
        ({"settings__swiglu": False}, "swiglu (True and False)"),
    ],
)
def test_runs_that_differ_in_more_are_refused(tmp_path, change, message):
    folders = [*flash_runs(tmp_path, 128, 256), save(tmp_path / "other", measured(512, MIB, **change))]
    with pytest.raises(UsageError) as refused:
        sequence_memory.analyze(folders)
    assert f"differ in more than sequence length and attention: {message};" in str(refused.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (measured(512, None), "recorded without memory: profile again with --enable-memory-profiling"),
        (measured(512, MIB, step_ms__all=[1.0]), "has only profiled steps.*take --num-steps 3 or more"),
        (measured(128, MIB), "are both v2, flash attention, sequence length 128: leave one out"),
    ],
)
def test_a_profile_that_does_not_say_enough_is_refused(tmp_path, content, message):
    folders = [*flash_runs(tmp_path, 128, 256), save(tmp_path / "other", content)]
    with pytest.raises(UsageError, match=message):
        sequence_memory.read(folders)


def test_a_profile_of_an_earlier_version_is_refused(tmp_path):
    content = measured(128, MIB)
    del content["run"]["settings"]
    with pytest.raises(UsageError, match="does not say which attention it ran"):
        sequence_memory.read([save(tmp_path / "old", content)])


def test_bad_input_is_one_line(refused, tmp_path):
    folders = flash_runs(tmp_path, 128, 256)
    for arguments, message in (
        (folders, "v2, flash attention: 2 sequence lengths, but the fit needs at least 3"),
        ([tmp_path / "none"], "does not exist"),
        ([tmp_path], "holds no profile_*.json"),
    ):
        assert message in refused(SCRIPT, "--profile-dirs", *arguments)


@pytest.mark.slow
def test_real_runs_grow_linearly_with_flash_attention_and_quadratically_without(run_script, tmp_path):
    """The quadratic factor must lie between L matrices, which are kept for the backward pass, and L + 2."""
    own = "--vocab-size 40 --data synthetic --num-steps 3 --warmup-steps 1 --enable-memory-profiling"
    flags = [*TINY, *own.split()]
    folders = []
    for attention in ("enable", "disable"):
        for length in (64, 128, 256):
            folders.append(tmp_path / f"{attention}{length}")
            run = ["--seq-len", length, f"--{attention}-flash-attention", "--profile-dir", folders[-1]]
            run_script(TRAIN, *flags, *run)
    runs = sequence_memory.read(folders)
    flash, plain = sequence_memory.grouped(runs).values()
    assert [run.group for run in (flash[0], plain[0])] == ["v2, flash attention", "v2, plain attention"]
    assert sequence_memory.exponents(flash) == pytest.approx([1, 1], abs=0.02)
    assert sequence_memory.exponents(plain)[-1] > 1.7
    matrix, line = 4 * 2 * 4, sequence_memory.fit(plain)  # 4 B H
    assert 2 * matrix < line.quadratic < 1.1 * 4 * matrix  # L = 2
