"""A run in short Markdown and as JSON: parts that add up, few bytes, and what has neither."""

import json

from tests.conftest import ROOT
from tests.kernel_files import FIXTURES
from tests.small_traces import gpu_trace
from tracepage.causes.waits import CAUSES
from tracepage.errors import UsageError
from tracepage.views import run_page, run_summary

import pytest

FILES = [
    *sorted((ROOT / "results/h200/traces").glob("*.json.gz")),
    ROOT / "results/h100x2/ddp_large_trace_rank0.json.gz",
    ROOT / "results/h200/v1_small_profile.json.gz",
    ROOT / "results/cpu/v1_small_profile.json.gz",
    FIXTURES / "new_kernel_trace.csv",
    FIXTURES / "ncu_raw.csv",
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_parts_add_up_to_the_step_and_the_markdown_is_short(path):
    source = run_page.load_page_source(path)
    content = run_summary.summary_json([source])
    parts = content["parts"]
    assert sum(part["ms"] for part in parts) == pytest.approx(content["step_ms"], rel=1e-3)
    for part in parts:
        assert part["cause"] in CAUSES and part["ms"] >= 0 and part["count"] >= 0
    verdict = content["verdict"]
    assert verdict["cause"] in {part["cause"] for part in parts}
    assert verdict["gain"] >= 1 and 0 < verdict["ms"] <= content["step_ms"] + 1e-9
    text = run_summary.summary_report([source]).markdown()
    assert len(text.encode()) < 8_000 and verdict["sentence"].replace("<", "&lt;") in text
    json.dumps(content, allow_nan=False)


def test_two_files_have_both_verdicts_and_what_changed(tmp_path):
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(gpu_trace()))
    sources = [run_page.load_page_source(tmp_path / name) for name in ("a.json", "b.json")]
    content = run_summary.summary_json(sources)
    assert [run["file"][-6:] for run in content["runs"]] == ["a.json", "b.json"]
    whole = content["changes"][-1]
    assert whole["part"] == "the step" and whole["change_ms"] == 0
    assert whole["before_ms"] == content["runs"][0]["step_ms"]
    assert content["runs"][1]["verdict"]["sentence"] in (
        run_summary.summary_report(sources).markdown()
    )


def test_a_trace_of_another_program_has_a_page_alone(tmp_path):
    event = {"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 0, "dur": 5}
    (tmp_path / "other.json").write_text(json.dumps([event]))
    source = run_page.load_page_source(tmp_path / "other.json")
    for write in (run_summary.summary_report, run_summary.summary_json):
        with pytest.raises(UsageError, match=r"other\.json has no kernels .* --output FILE\.html"):
            write([source])
