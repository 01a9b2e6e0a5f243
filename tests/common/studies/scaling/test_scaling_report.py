"""The scaling study's report: its files, its sentences, and a study in which nothing was measured."""

from common.errors import RunError, UsageError
from common.files import write_json
from common.studies.scaling import scaling_report, scaling_results
from tests import records

import pytest


def test_the_report(tmp_path):
    path = tmp_path / "scaling.json"
    write_json(path, records.scaling())
    report = scaling_report.analyze(path)
    kinds = ("csv", "html", "json", "md", "png")
    assert sorted(file.suffix[1:] for file in report.write(tmp_path / "out", "scaling", kinds)) == sorted(kinds)
    text = report.markdown()
    for said in (
        "NVLink multicast was off (NCCL_NVLS_ENABLE=0).", "A model, not a measurement. Link: 1 GB/s",
        "is off by 10.0% at the median and by 20.0% at most (weak, v1, ddp, 2 x 4)", "v1, fsdp, 2 x 4: out of memory: CUDA",
        "v1, zero1: v1 does not support it",
    ):  # fmt: skip
        assert said in text
    assert len(scaling_results.step_table(scaling_results.results(records.scaling()))[1]) == 4

    for kind in ("cpu", "rocm"):
        write_json(path, records.scaling(device=records.record()["device"] | {"kind": kind}, variables={}))
        assert "NVLink" not in scaling_report.analyze(path).markdown()


def test_a_file_in_which_nothing_was_measured(tmp_path):
    failed = {"status": "failed", "reason": "why", "runs": []}
    write_json(tmp_path / "s.json", records.scaling(cells=[cell | failed for cell in records.scaling()["cells"]]))
    with pytest.raises(RunError, match="nothing was measured; the first: v1, one process, 1 x 4, failed: why"):
        scaling_report.analyze(tmp_path / "s.json")
    write_json(tmp_path / "s.json", records.scaling(cells=[cell | {"runs": []} for cell in records.scaling()["cells"]]))
    with pytest.raises(UsageError, match="nothing was measured, but the status is ok"):
        scaling_report.analyze(tmp_path / "s.json")
