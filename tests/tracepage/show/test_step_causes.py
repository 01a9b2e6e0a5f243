"""The causes of files that have no events of a host beside a GPU's, and the longest waits."""

import json

from tests.kernel_files import FIXTURES
from tests.small_traces import event, write_profile
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


def test_a_profile_of_attention_alone_says_nothing_of_the_rest_of_the_step(tmp_path, cpu_trace):
    (tmp_path / cpu_trace.name).symlink_to(cpu_trace)
    write_profile(tmp_path / "profile_1.json", cpu_trace, attention_only=True)
    source = pytorch.with_trace(load_kernels.load(tmp_path / "profile_1.json"))
    causes = step_causes.attribute(source)
    assert {part["cause"] for part in causes.parts} == {"work"}
    assert "of the attention is" in causes.verdict["sentence"]


def test_collectives_that_may_run_beside_kernels_are_no_wait_of_a_profile(gpu_profile):
    profile = json.loads(gpu_profile.read_text())
    busy_us = profile["device_busy_us"]
    work_us = sum(row["device_us"] for row in profile["kernels"])
    profile["kernels"].append(
        profile["kernels"][0] | {"name": "ncclDevKernel_AllReduce", "device_us": busy_us}
    )
    profile["device_busy_us"] = work_us + 10
    gpu_profile.write_text(json.dumps(profile))
    causes = step_causes.attribute(load_kernels.load(gpu_profile))
    # The rest of them may be hidden.
    assert parts(causes)["communication"] == pytest.approx(0.01 / 2)
    assert sum(parts(causes).values()) == pytest.approx(causes.step_ms)


def of_cpu(folder, *events) -> StepCauses:
    """The causes of a trace of a CPU with these events: category, name, start and end, in us."""
    content = {"traceEvents": [event(*row, shapes=[[4, 4], [4, 4]]) for row in events]}
    (folder / "trace.json").write_text(json.dumps(content))
    return step_causes.attribute(load_kernels.load(folder / "trace.json"))


def test_time_without_operators_counts_also_where_a_cpu_has_no_steps(tmp_path):
    products = [("cpu_op", "aten::mm", start, start + 10) for start in (0, 990)]
    causes = of_cpu(tmp_path, *products)
    assert causes.step_ms == 1 and parts(causes)["host"] == pytest.approx(0.98)
    assert causes.verdict["cause"] == "host"


def test_a_cpu_that_loads_its_data_is_limited_by_its_input(tmp_path):
    """Its operators are part of that, and a larger batch has more of them."""
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    causes = of_cpu(
        tmp_path,
        ("user_annotation", "ProfilerStep#1", 0, 1_000),
        ("user_annotation", name, 0, 600),
        ("cpu_op", "aten::cat", 10, 500),
        ("cpu_op", "aten::mm", 700, 900),
    )
    assert parts(causes) == pytest.approx({"input": 0.6, "matrix products": 0.2, "host": 0.2})
    assert (causes.verdict["cause"], causes.verdict["gain"]) == ("input", pytest.approx(2.5))
    assert "`num_workers` is 0" in causes.verdict["sentence"]


def test_what_is_outside_of_the_steps_is_no_part_of_one(tmp_path):
    causes = of_cpu(
        tmp_path,
        ("user_annotation", "ProfilerStep#1", 0, 1_000),
        ("cpu_op", "aten::mm", 0, 900),
        ("user_annotation", "enumerate(DataLoader)#_Iter.__next__", 1_100, 5_000),
    )
    assert parts(causes) == pytest.approx({"matrix products": 0.9, "host": 0.1})


def test_operators_of_two_threads_share_the_time_that_both_take(tmp_path):
    causes = of_cpu(
        tmp_path,
        ("user_annotation", "ProfilerStep#1", 0, 1_000),
        ("cpu_op", "aten::mm", 0, 1_000),
        ("cpu_op", "aten::sum", 0, 1_000, 2),
    )
    assert causes.step_ms == 1
    assert parts(causes) == pytest.approx({"matrix products": 0.5, "reductions": 0.5})


@pytest.mark.parametrize("name", ["gloo:all_reduce", "aten::sort", "aten::convolution"])
def test_only_what_bytes_limit_is_told_to_be(tmp_path, name):
    assert "bytes: fuse" not in of_cpu(tmp_path, ("cpu_op", name, 0, 9)).verdict["sentence"]


def test_launches_without_kernels_are_of_a_gpu(tmp_path):
    causes = of_cpu(
        tmp_path,
        ("cpu_op", "aten::mm", 0, 10),
        ("cuda_runtime", "cudaLaunchKernel", 2, 4),
    )
    assert causes.verdict["cause"] == "unknown" and causes.verdict["gain"] == 1
    assert "none of its kernels" in causes.verdict["sentence"]


def test_steps_that_differ_much_are_told(tmp_path):
    rows = []
    for number, (start, end) in enumerate([(0, 100), (100, 200), (200, 1_200)]):
        rows.append(("user_annotation", f"ProfilerStep#{number}", start, end))
        rows.append(("cpu_op", "aten::mm", start, end))
    told = " Steps took 100 us to 1 ms: all is of their mean."
    assert of_cpu(tmp_path, *rows).verdict["sentence"].endswith(told)
    assert told not in of_cpu(tmp_path, *rows[:4]).verdict["sentence"]
    twice = ("user_annotation", "ProfilerStep#1", 100, 300)
    told = " Steps took 100 us to 200 us: all is of their mean."
    causes = of_cpu(tmp_path, *rows[:2], twice, ("cpu_op", "aten::mm", 100, 300))
    assert causes.verdict["sentence"].endswith(told)


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
