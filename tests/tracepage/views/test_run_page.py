"""The page of each kind of file, and of two."""

import json
import re

from tests import branched_traces
from tests.conftest import ROOT
from tests.kernel_files import FIXTURES
from tests.small_traces import gpu_trace, write_profile
from tracepage.errors import UsageError
from tracepage.readers import chrome_trace
from tracepage.views import run_page, timeline

import pytest

H200 = ROOT / "results" / "h200"


def build(*paths):
    return run_page.make_page([run_page.load_page_source(path) for path in paths])


def titles(report) -> list[str]:
    return [section.title for section in report.sections if section.title]


def test_a_profile_has_everything_and_without_its_trace_no_timeline(gpu_profile):
    page = build(gpu_profile)
    assert titles(page) == [
        "Time of the step by span",
        "Timeline",
        "The step against its limits",
        "Targets of optimization",
        "Kernels",
        "Roofline",
        "The operators that take longest",
        "Memory",
        "Critical path",
        "Run",
    ]
    html = page.html()
    assert (
        not re.search(r"""\s(?:src|href)=["'](?!data:|#)""", html.split("<script>")[0])
        and "default-src 'none'" in html
    )
    gpu_profile.with_name("trace_2.json").unlink()
    assert (
        "Timeline" not in titles(build(gpu_profile)) and "<script" not in build(gpu_profile).html()
    )


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (
            H200 / "traces/v4_small.json.gz",
            ["Time of the step by kind of work", "Timeline", "Kernels", "Critical path"],
        ),
        (FIXTURES / "new_kernel_trace.csv", ["Timeline", "Kernels"]),
        (FIXTURES / "ncu_raw.csv", ["Kernels", "Memory traffic"]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_other_files(path, expected):
    assert titles(build(path)) == expected


@pytest.mark.parametrize(
    ("path", "verdict"),
    [
        (
            H200 / "traces/v1_small.json.gz",
            "Limited by launches: the GPU is idle for 92 % of the step. Capture the step as a graph,",
        ),
        (
            H200 / "v1_small_profile.json.gz",
            "Limited by launches: the GPU is idle for 88 % of the step. Try `--capture-step`: at",
        ),
        (
            ROOT / "results/cpu/v1_small_profile.json.gz",
            "Limited by the CPU's work: 83 % of the operators' time is matrix products",
        ),
        (
            H200 / "traces/v4_small.json.gz",
            "Limited by the GPU's work: 49 % of the kernels' time is matrix products; the GPU",
        ),
        (FIXTURES / "new_kernel_trace.csv", "Limited by the GPU's work"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_page_begins_with_what_limits_the_step(path, verdict):
    assert build(path).sections[0].items[0].content.startswith(verdict)


def test_a_cpus_trace_without_steps_tells_of_no_idle_gpu(tmp_path):
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 5}
    (tmp_path / "trace.json").write_text(json.dumps([event]))
    said = "Limited by the CPU's work: 100 % of the operators' time is matrix products."
    assert build(tmp_path / "trace.json").sections[0].items[0].content == said


def test_a_captured_step_that_waits_is_not_told_to_capture(tmp_path):
    profile = branched_traces.write(tmp_path, captured=True)
    for path in (profile, tmp_path / "trace_1.json"):
        assert (
            "the GPU is idle for 96 % of the step. It launches graphs already"
            in build(path).sections[0].items[0].content
        )


def test_parallel_kernels_add_up_to_more_than_the_step_and_the_page_says_so():
    [step] = [
        part
        for part in build(H200 / "traces/v4_small.json.gz").sections
        if part.title.startswith("Time of the step")
    ]
    assert "parts add up to" in step.items[1].content
    rows, trace = (
        {row[0]: row[1:] for row in step.items[0].content.rows},
        chrome_trace.load(H200 / "traces/v4_small.json.gz"),
    )
    us, steps = sum(trace.step_ns()) / 1e3, len(trace.steps)
    idle, kernels = (
        us - trace.device_busy_ns() / 1e3,
        trace.kernels.duration_ns[trace.kernels.step >= 0].sum() / 1e3,
    )
    assert rows["GPU idle"] == pytest.approx([idle / 1e3 / steps, 100 * idle / us])
    assert sum(ms for ms, _ in rows.values()) == pytest.approx((kernels + idle) / 1e3 / steps)


def test_what_is_no_profile_and_no_trace_has_no_page():
    with pytest.raises(
        UsageError, match=r"kernels_loss.json is none of the files that hold kernels"
    ):
        build(H200 / "kernels_loss.json")


@pytest.mark.parametrize("begin, end", [('{"traceEvents": [', "]}"), ("[", "]"), ("\n[", ",\n")])
def test_a_trace_of_another_program_has_its_events_by_name(tmp_path, monkeypatch, begin, end):
    """Chrome's format is also a list alone, whose end may be missing."""
    events = [
        {"ph": "X", "name": name, "pid": 1, "tid": 1, "ts": 0, "dur": us}
        for name, us in (("a", 5), ("b", 9), ("a", 6))
    ]
    (tmp_path / "other.json").write_text(begin + ",\n".join(map(json.dumps, events)) + end)
    page = build(tmp_path / "other.json")
    assert page.sections[-1].items[0].content.rows == [
        ["a", 2, pytest.approx(11)],
        ["b", 1, pytest.approx(9)],
    ]
    both = build(tmp_path / "other.json", tmp_path / "other.json")
    assert (
        len(
            [item for section in both.sections for item in section.items if item.kind == "timeline"]
        )
        == 2
    )
    monkeypatch.setattr(timeline, "EVENTS", 2)
    assert "The 1 shortest events are left out." in build(tmp_path / "other.json").markdown()


def test_two_runs_show_what_went_and_what_came(tmp_path, gpu_profile):
    content = gpu_trace()
    for event in content["traceEvents"]:
        event["name"] = event["name"].replace("gemm", "fused")
    (tmp_path / "trace_3.json").write_text(json.dumps(content))
    write_profile(
        tmp_path / "profile_3.json",
        tmp_path / "trace_3.json",
        training__world_size=2,
        device__name="NVIDIA H100 80GB HBM3",
    )
    page = build(gpu_profile, tmp_path / "profile_3.json")
    assert (
        len(
            [item for section in page.sections for item in section.items if item.kind == "timeline"]
        )
        == 2
    )
    changed = [item.content for item in page.sections[-1].items if item.kind == "table"][-1]
    assert [[row[0], *row[2:5]] for row in changed.rows] == [
        ["gemm", "gone", 1.5, 0],
        ["fused", "new", 0, 1.5],
    ]
    assert "The two differ in processes (1 and 2)." in page.markdown()

    write_profile(
        tmp_path / "profile_4.json", tmp_path / "trace_2.json", device__name="NVIDIA H100 80GB HBM3"
    )
    alike = build(gpu_profile, tmp_path / "profile_4.json")
    assert titles(alike) == ["Runs", "Timeline", "Launches"], (
        "only what differs is shown side by side"
    )


def test_a_captured_trace_has_the_spans_of_the_eager_one_beside_it(tmp_path):
    """Both have the same kernels, so the tables by span of two eager traces, and of an eager and a
    captured one, are the same.
    """
    eager, captured = (
        branched_traces.write(tmp_path / str(graph), graph).with_name("trace_1.json")
        for graph in (False, True)
    )
    by_span = {row[0]: row[1:] for row in build(eager, captured).sections[-1].items[2].content.rows}
    assert by_span["mlp"] == [1, 1, 0, 10, 10] and set(by_span) == {
        "attention",
        "mlp",
        "norm",
        "optimizer",
        "other",
        "all",
    }
    assert all(before == after for before, after, *_ in by_span.values())
    captured.with_name("eager_trace_1.json").unlink()
    assert "by span" not in build(eager, captured).markdown()


def test_two_files_of_one_kind_stand_side_by_side_and_others_are_refused(tmp_path, gpu_profile):
    (tmp_path / "trace_3.json").write_text(json.dumps(gpu_trace("hipLaunchKernel")))
    page = build(gpu_profile.with_name("trace_2.json"), tmp_path / "trace_3.json")
    assert "kernels per step, by span" in page.markdown()

    (tmp_path / "other.json").write_text(
        '[{"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 0, "dur": 5}]'
    )
    with pytest.raises(UsageError, match=r"ncu_raw\.csv have nothing in common"):
        build(tmp_path / "other.json", FIXTURES / "ncu_raw.csv")
