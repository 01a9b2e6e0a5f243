"""The documents' tables of measured runs: figures worked out by hand from records, and what is said where there are none."""

import copy
import json
from pathlib import Path

from common.documents import measured
from common.errors import UsageError
from tests.conftest import ROOT, cells

import pytest

RECORD = json.loads((ROOT / "results/h100/v1_tiny.json").read_text())


def write(path: Path, **changes: object) -> None:
    """A run's record with other content; `loss` is a list, `ms` the step's median."""
    run = copy.deepcopy(RECORD)
    if "loss" in changes:
        run["loss"]["all"] = changes.pop("loss")
    if "ms" in changes:
        run["step_ms"]["median"] = changes.pop("ms")
    path.write_text(json.dumps(run | changes))


def test_curves_show_how_far_the_others_have_come(tmp_path):
    expected = [5.0 - 0.01 * i for i in range(40)]
    write(tmp_path / "curve_v1.json", loss=expected)
    write(tmp_path / "curve_v2.json", loss=[loss + (1e-3 if i == 7 else 0) for i, loss in enumerate(expected)])
    write(tmp_path / "curve_v3.json", loss=[loss - (0.25 if i == 20 else 0) for i, loss in enumerate(expected)])
    header, *rows = cells(measured.curves(tmp_path))
    assert header[1:] == [f"{name}, NVIDIA H100 80GB HBM3" for name in ("Version 2", "Version 3")]
    assert rows == [["20", "1.0e-03", "0.0e+00"], ["40", "1.0e-03", "2.5e-01"]]


@pytest.mark.parametrize("present", [(), ("v1",), ("v2", "v3")])
def test_curves_need_version_1_and_another(tmp_path, present):
    for version in present:
        write(tmp_path / f"curve_{version}.json")
    with pytest.raises(UsageError, match=r"needs curve_v1\.json and that of another"):
        measured.curves(tmp_path)


def test_curves_of_different_lengths_are_not_compared(tmp_path):
    write(tmp_path / "curve_v1.json", loss=[1.0] * 20)
    write(tmp_path / "curve_v2.json", loss=[1.0] * 40)
    with pytest.raises(ValueError, match="zip"):
        measured.curves(tmp_path)


def test_a_comparison_is_with_version_1_of_the_same_preset_and_precision(tmp_path):
    for name, ms in (("tiny_fp32_v1", 8.0), ("tiny_fp32_v3", 2.0), ("small_bf16_v1", 30.0), ("small_bf16_v2_compiled", 20.0)):
        write(tmp_path / f"compare_{name}.json", ms=ms)
    header, *rows = cells(measured.comparison(tmp_path))
    ratio = header.index("against Version 1")
    assert [(*row[:4], row[ratio]) for row in rows] == [
        ("tiny", "fp32", "Version 1", "8", "1.00x"),
        ("tiny", "fp32", "Version 3", "2", "4.00x"),
        ("small", "bf16", "Version 1", "30", "1.00x"),
        ("small", "bf16", "Version 2, torch.compile", "20", "1.50x"),
    ]


def test_a_comparison_lacks_version_1(tmp_path):
    write(tmp_path / "compare_tiny_fp32_v2.json")
    with pytest.raises(UsageError, match=r"lacks compare_tiny_fp32_v1\.json"):
        measured.comparison(tmp_path)


def test_a_run_is_a_row(tmp_path):
    write(tmp_path / "v1_tiny.json", loss=[7.0] + [2.0] * 19 + [3.0, 5.0] * 10, ms=12.5, parameters=2_500_000, mfu=None)
    header, row = cells(measured.training(tmp_path))
    found = dict(zip(header, row, strict=True))
    assert (found["ms/step"], found["M parameters"], found["MFU %"]) == ("12.5", "2.5", "")
    assert found["loss"] == "7.00 to 4.00 in 40 steps"  # the mean of the last 20
    write(tmp_path / "v1_tiny.json", mfu={"utilization": 0.25, "peak_flops_per_second": 4e12, "peak_source": "data sheet"})
    header, row = cells(measured.training(tmp_path))
    assert row[header.index("MFU %")] == "25 of the data sheet"


@pytest.mark.parametrize("table, script", [("training", "v1"), ("phases", "v1"), ("spans", "v1"), ("comparison", "versions")])
def test_an_empty_folder_names_the_script_that_fills_it(tmp_path, table, script):
    with pytest.raises(UsageError, match=f"measure with results/measure_{script}.sh {tmp_path.name}"):
        measured.TABLES[table](tmp_path)
