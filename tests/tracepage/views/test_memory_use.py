"""Memory of a run: what its record holds, and savings by formula against what was measured."""

from tests.conftest import ROOT
from tests.records import profile, record
from tracepage.records import run_record, step_profile
from tracepage.show.report import Report
from tracepage.views import memory_use

import pytest

SOFTMAX = [{"name": "aten::_softmax"}]


def shown(run: dict, operators: list[dict]) -> str:
    report = Report("")
    memory_use.add_section(report, profile(run, operators))
    return report.terminal()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"memory__reserved_mib": 125.0}, "125 MiB, of which 25 MiB (20 %) not allocated"),
        ({}, "not in this record"),
        ({"memory__kind": "process RSS"}, "none: on a CPU"),
    ],
    ids=["gpu", "older record", "cpu"],
)
def test_the_reserved_memory_that_is_not_allocated(changes, expected):
    text = memory_use.reserved(record(**changes))
    assert text.startswith(expected) and "ceilings" not in text


def test_measured_ceilings_are_named_as_a_holder_of_the_pool():
    path = ROOT / "results/h100/v1_medium_bf16_profile.json.gz"
    text = memory_use.reserved(step_profile.read(path)["run"])
    assert (
        text
        == "11,820 MiB, of which 374 MiB (3.17 %) not allocated; measuring the ceilings left some of it"
    )


@pytest.mark.parametrize(
    ("settings", "operators", "has_savings"),
    [
        ({}, SOFTMAX, True),
        ({"capture_step": True, "flash_attention": False}, SOFTMAX, True),
        ({"swiglu_fusion": True}, SOFTMAX, False),
        ({"checkpoint_activations": "block"}, SOFTMAX, False),
        ({}, [{"name": "aten::mm"}], False),
    ],
    ids=["version 1", "all fusions off", "a fusion", "recomputed", "no scores"],
)
def test_savings_are_shown_where_the_formulas_hold(settings, operators, has_savings):
    text = shown(record() | {"settings": settings}, operators)
    assert ("What would save memory" in text) == has_savings and "reserved" in text


def test_the_saving_by_flash_attention_is_the_measured_one():
    """Version 2 in float32 lowers Version 1's peak by the scores, and its other fusions keep the
    same tensors.
    """
    names = ("compare_medium_fp32_v1", "compare_medium_fp32_v2")
    before, after = (run_record.read_timed(ROOT / f"results/h200/{name}.json") for name in names)
    report = Report("")
    memory_use.add_section(report, profile(before, SOFTMAX))
    rows = {row[0]: row[1] for row in report.sections[0].items[1].content.rows}
    measured = before["memory"]["peak_mib"] - after["memory"]["peak_mib"]
    assert rows["flash attention"] == pytest.approx(measured, abs=0.1)
