"""FLOP counts beside the time of a run: what is written is read again, and what is damaged is
named.
"""

import csv
import json
from pathlib import Path

from common.config import ModelConfig
from common.training import flop_counters
from tests.records import profile, record
from tracepage.cost import flops
from tracepage.errors import UsageError
from tracepage.views import flop_counts

import pytest

COUNTED = {"FlopCounterMode": {"forward": 300, "backward": 600}}
# 67 TFLOP/s in fp32
H200 = {"kind": "cuda", "name": "NVIDIA H200", "memory_mib": 143771.0, "multiprocessors": 132}
CEILINGS = {
    "flops_per_second": 1e12,
    "bytes_per_second": 1e12,
    "operation_seconds": 1e-6,
    "precision": "fp32",
}


@pytest.fixture
def written(tmp_path):
    return flop_counters.write(tmp_path, COUNTED, record(device=H200, ceilings=CEILINGS))


def test_the_first_row_is_the_causal_formula_and_both_files_hold_the_counts(written):
    profile = flop_counts.read_counts(written[0])
    needed = flops.training_step(ModelConfig(), 8, 128)["total"]
    header, rows = flop_counts.mfu_rows(profile)
    cells = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert list(cells) == [flop_counts.REFERENCE, flop_counts.EXECUTED, "FlopCounterMode"]
    assert cells[flop_counts.REFERENCE]["step GFLOP"] == needed / 1e9
    counter = cells["FlopCounterMode"]
    assert counter["step GFLOP"] == 900 / 1e9 and counter["of reference"] == 900 / needed
    assert counter["TFLOP/s"] == pytest.approx(900 / 12e-3 / 1e12) and counter[
        "% of measured GEMM"
    ] == pytest.approx(7.5e-6)
    assert counter["% of peak"] == pytest.approx(7.5e-6 / 67)

    assert [path.name for path in written] == ["flops_profile.json", "mfu_analysis.csv"]
    with written[1].open() as file:
        assert [row["counter"] for row in csv.DictReader(file)][-1] == "FlopCounterMode"
    shown = flop_counts.render_flop_counts(flop_counts.read_counts(written[0])).terminal()
    assert "FlopCounterMode" in shown and "peak 67 TFLOP/s (data sheet)" in shown


def test_bytes_and_the_bandwidth_that_they_need_stand_beside_the_counts(written, tmp_path):
    """A product of 8 TFLOP that moves 3.6 GB: 2,222 FLOP/byte; the GEMM's 1 TFLOP/s then needs 0.45
    GB/s.
    """
    assert (
        "FLOP/byte"
        not in flop_counts.render_flop_counts(flop_counts.read_counts(written[0])).terminal()
    )
    with pytest.raises(UsageError, match="holds no bytes: count again"):
        flop_counts.render_intensity(flop_counts.read_counts(written[0]))
    sides = {
        "input_shapes": "[[10000, 40000], [40000, 10000]]",
        "input_types": '["float", "float"]',
    }
    path = tmp_path / "profile_1.json"
    for attention_only in (True, False):
        path.write_text(
            json.dumps(
                profile(record(), [{"name": "aten::mm", **sides}], attention_only=attention_only)
            )
        )
        flop_counters.add_work(written[0], path)
        assert ("work" in flop_counts.read_counts(written[0])) is not attention_only
    shown = flop_counts.render_flop_counts(flop_counts.read_counts(written[0])).terminal()
    for fact in (
        "at least 3,600 MB",
        "2,222 FLOP/byte of these operators; ridge point 1, so FLOPs bind before bytes",
        "needed        0.45 GB/s",
    ):
        assert fact in shown, fact
    assert (
        "aten::mm" in flop_counts.render_intensity(flop_counts.read_counts(written[0])).terminal()
    )


def test_a_bare_name_is_looked_for_in_its_folder(written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flop_counts.FOLDER.mkdir()
    written[0].rename(flop_counts.FOLDER / "flops_profile.json")
    assert flop_counts.read_counts(Path("flops_profile.json"))["counts"]
    with pytest.raises(UsageError, match="no other.json here or in flops_analysis/"):
        flop_counts.read_counts(Path("other.json"))
