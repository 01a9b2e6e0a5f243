"""FLOP counts beside the time of a run: what is written is read again, and what is damaged is named."""

import csv
import json
from pathlib import Path

from common.analysis.formulas import flops
from common.analysis.reports import flop_counts
from common.config import ModelConfig
from common.errors import UsageError
from tests.records import record

import pytest

COUNTED = {"FlopCounterMode": {"forward": 300, "backward": 600}}
H200 = {"kind": "cuda", "name": "NVIDIA H200", "memory_mib": 143771.0, "multiprocessors": 132}  # 67 TFLOP/s in fp32
CEILINGS = {"flops_per_second": 1e12, "bytes_per_second": 1e12, "operation_seconds": 1e-6, "precision": "fp32"}


@pytest.fixture
def written(tmp_path):
    return flop_counts.write(tmp_path, COUNTED, record(device=H200, ceilings=CEILINGS))


def test_the_first_row_is_the_causal_formula_and_all_are_held_against_it(written):
    profile = flop_counts.read(written[0])
    needed = flops.training_step(ModelConfig(), 8, 128)["total"]
    header, rows = flop_counts.mfu_rows(profile)
    cells = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert list(cells) == [flop_counts.REFERENCE, flop_counts.EXECUTED, "FlopCounterMode"]
    assert cells[flop_counts.REFERENCE]["step GFLOP"] == needed / 1e9
    counter = cells["FlopCounterMode"]
    assert counter["step GFLOP"] == 900 / 1e9 and counter["of reference"] == 900 / needed
    assert counter["TFLOP/s"] == pytest.approx(900 / 12e-3 / 1e12) and counter["% of measured GEMM"] == pytest.approx(7.5e-6)
    assert counter["% of peak"] == pytest.approx(7.5e-6 / 67)


def test_both_files_hold_the_counts(written):
    assert [path.name for path in written] == ["flops_profile.json", "mfu_analysis.csv"]
    with written[1].open() as file:
        assert [row["counter"] for row in csv.DictReader(file)][-1] == "FlopCounterMode"
    shown = flop_counts.report(flop_counts.read(written[0])).terminal()
    assert "FlopCounterMode" in shown and "DeepSpeed is not installed here" in shown and "peak 67 TFLOP/s (data sheet)" in shown


def test_a_device_that_is_not_listed_has_no_percentage(tmp_path):
    (path, _) = flop_counts.write(tmp_path, COUNTED, record())
    profile = flop_counts.read(path)
    assert "peak is not listed" in flop_counts.report(profile).terminal()
    assert all(row[-2:] == [None, None] for row in flop_counts.mfu_rows(profile)[1])


def test_a_bare_name_is_looked_for_in_its_folder(written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flop_counts.FOLDER.mkdir()
    written[0].rename(flop_counts.FOLDER / "flops_profile.json")
    assert flop_counts.read(Path("flops_profile.json"))["counts"]
    with pytest.raises(UsageError, match="no other.json here or in flops_analysis/"):
        flop_counts.read(Path("other.json"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["counts"].clear(), "counts: List should have at least 1 item"),
        (lambda content: content["counts"][0].update(step=-1), "counts.0.step: Input should be greater than 0"),
    ],
)
def test_a_damaged_file_is_named_with_its_field(written, change, message):
    content = json.loads(written[0].read_text())
    change(content)
    written[0].write_text(json.dumps(content))
    with pytest.raises(UsageError, match=message) as error:
        flop_counts.read(written[0])
    assert str(error.value).startswith(f"{written[0]}: ") and "\n" not in str(error.value)
