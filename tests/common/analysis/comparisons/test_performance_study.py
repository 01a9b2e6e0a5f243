"""The summary of a performance study: a row for each number format, and what profilers left beside the records."""

from pathlib import Path

from common.analysis.comparisons import performance_study
from common.analysis.reports import flop_counts
from common.errors import UsageError
from common.files import write_json
from tests.conftest import V1, cells
from tests.records import profile, record

import pytest

CEILINGS = {"flops_per_second": 800e12, "bytes_per_second": 1e12, "operation_seconds": 1e-6, "precision": "bf16"}


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A run in fp32 and one in bf16, which takes half the time."""
    step = {"all": [6.0] * 20, "profiled": 0, "median": 6.0, "p20": 5.5, "p80": 6.5, "count": 20}
    fast = {"device__name": "NVIDIA H200", "flops_per_second": 989e12 / 2, "ceilings": CEILINGS}
    write_json(tmp_path / "metrics_fp32.json", record(flops_per_second=3e12, step_ms__p80=15.0))
    write_json(tmp_path / "metrics_bf16.json", record(precision__compute="bf16", step_ms=step, **fast))
    return tmp_path


def test_a_row_for_each_number_format_with_a_finished_step(study):
    text = performance_study.analyze(study).markdown()
    assert "for fp32 (33 %)" in text and "MFU is a share" in text
    header, plain, mixed = cells(text)
    plain, mixed = (dict(zip(header, row, strict=True)) for row in (plain, mixed))
    assert (plain["precision"], plain["ms/step"], plain["TFLOP/s"], plain["MFU %"]) == ("fp32", "12", "3", "")
    assert (mixed["precision"], mixed["ms/step"], mixed["MFU %"], mixed["% of measured GEMM"]) == ("bf16", "6", "50", "61.8")
    assert (plain["first loss"], plain["last loss"], plain["steps"]) == ("7", "5", "3")

    failed = record(status="failed: out of memory", loss__all=[], step_ms={"all": [], "profiled": 0})
    write_json(study / "metrics_fp32.json", failed)
    assert list(performance_study.read(study)) == ["bf16"]
    write_json(study / "metrics_bf16.json", record(precision__compute="bf16"))
    assert "MFU is a share" not in performance_study.analyze(study).markdown()


def test_profile_flops_and_the_vendors_folders_are_shown_where_they_are(study):
    sections = ["profile_2.json", "FLOPs of a training step", "Profiles of the vendor's tools"]
    before = performance_study.analyze(study).markdown()
    assert not any(f"## {title}" in before for title in sections)
    (study / "profiles/ncu").mkdir(parents=True)
    for name in ("profile_1.json", "profile_2.json"):
        write_json(study / "profiles" / name, profile(record(), [{"name": "aten::mm"}]))
    flop_counts.write(study / "flops_analysis", {}, record())
    found = performance_study.analyze(study).markdown()
    assert [line[3:] for line in found.splitlines() if line.startswith("## ")] == sections
    assert "ncu: `profiles/ncu`" in found.replace("\\", "") and "rocprofv3" not in found


def test_a_folder_without_records_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no metrics_fp32.json or metrics_bf16.json with a finished step"):
        performance_study.analyze(tmp_path)


def test_the_script_writes_text_and_a_page(study, execute):
    printed = execute(V1 / "analyze_performance_study.py", "--folder", study)
    assert "# Performance study of v1, preset tiny" in printed.out
    assert "<h1>Performance study of v1, preset tiny</h1>" in (study / "performance_study.html").read_text()
    assert (study / "performance_study.md").exists()
