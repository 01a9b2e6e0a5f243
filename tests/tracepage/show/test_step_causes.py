"""The causes of files that have no events of a host beside a GPU's, and the longest waits."""

import json

from tests.kernel_files import FIXTURES
from tracepage.causes.waits import GAP_COLUMNS, StepCauses
from tracepage.readers import chrome_trace, load_kernels, pytorch
from tracepage.show import step_causes

import pandas
import pytest


def parts(causes: StepCauses) -> dict[str, float]:
    return {step_causes.label(part): part["ms"] for part in causes.parts}


def test_a_profile_without_its_trace_does_not_tell_why_the_gpu_waits(gpu_profile):
    profile = json.loads(gpu_profile.read_text())
    causes = step_causes.attribute(load_kernels.load(gpu_profile))
    step_ms = sum(profile["step_us"]) / 2 / 1e3
    idle_ms = step_ms - profile["device_busy_us"] / 2 / 1e3
    assert causes.step_ms == pytest.approx(step_ms)
    assert parts(causes)["unknown"] == pytest.approx(idle_ms)
    assert sum(parts(causes).values()) == pytest.approx(step_ms)
    assert causes.verdict["cause"] == "unknown"
    assert causes.verdict["gain"] == pytest.approx(step_ms / (step_ms - idle_ms))
    with_trace = pytorch.with_trace(load_kernels.load(gpu_profile))
    assert step_causes.attribute(with_trace).step_ms == pytest.approx(step_ms)


def test_a_cpu_works_or_is_the_host_of_its_operators(cpu_profile):
    profile = json.loads(cpu_profile.read_text())
    causes = step_causes.attribute(load_kernels.load(cpu_profile))
    assert causes.step_ms == pytest.approx(sum(profile["step_us"]) / 3 / 1e3)
    assert sum(parts(causes).values()) == pytest.approx(causes.step_ms)
    assert {part["cause"] for part in causes.parts} == {"work", "host"}


def test_a_file_without_times_of_launches_has_only_work():
    source = load_kernels.load(FIXTURES / "ncu_raw.csv")
    causes = step_causes.attribute(source)
    assert causes.step_ms == pytest.approx(source.table.duration_ns.sum() / 1e6)
    assert {part["cause"] for part in causes.parts} == {"work"}
    assert causes.verdict["cause"] == "unknown" and causes.verdict["gain"] == 1


def test_the_longest_waits_name_their_step_and_cause(gpu_profile):
    trace = chrome_trace.load(gpu_profile.with_name("trace_2.json"))
    rows = [
        (start, duration, cause, "", "", "", where, culprit, gap)
        for gap, (start, duration, cause, where, culprit) in enumerate(
            [
                (40_000, 7_000, "copy_to_host", "", 4),
                (55_000, 3_000, "copy_to_host", "aten::item", 5),
                (59_000, 2_000, "copy_to_host", "aten::item", 5),
                (90_000, 10_000, "launches", "", 6),
                (130_000, 1_000, "launches", "", 7),
            ]
        )
    ]
    gaps = pandas.DataFrame(rows, columns=[*GAP_COLUMNS, "culprit", "gap"])
    causes = StepCauses(0.1, [], {"cause": "work", "ms": 0, "gain": 1, "sentence": ""}, gaps)
    assert step_causes.longest_waits(causes, trace) == [
        ("10 us in step 1: launches", 90_000, 100_000),
        ("7 us in step 1: copy to host", 40_000, 47_000),
        ("5 us in step 1: copy to host, aten::item", 55_000, 61_000),
    ]
    longer = gaps.assign(duration_ns=[7_000, 3_000, 400_000, 10_000, 1_000])
    [(text, start, end), *_] = step_causes.longest_waits(causes._replace(gaps=longer), trace)
    assert text.startswith("403 us in step 2"), "most of it is there, though it begins in step 1"
    assert (start, end) == (55_000, 459_000)
    causes.verdict["cause"] = "launches"
    assert [start for _, start, _ in step_causes.longest_waits(causes, trace)] == [90_000, 130_000]


def test_changes_hold_each_part_of_both_and_the_step_last():
    def causes(**ms: float) -> StepCauses:
        rows = [
            {"cause": cause, "kind": "", "ms": time, "count": 1, "where": ""}
            for cause, time in ms.items()
        ]
        verdict = {"cause": "work", "ms": 0, "gain": 1, "sentence": ""}
        return StepCauses(sum(ms.values()), rows, verdict, pandas.DataFrame())

    rows = step_causes.changes(causes(work=5, input=7), causes(work=4, launches=2))
    assert rows == [
        ["input", 7, 0, -7],
        ["launches", 0, 2, 2],
        ["work", 5, 4, -1],
        ["the step", 12, 6, -6],
    ]
