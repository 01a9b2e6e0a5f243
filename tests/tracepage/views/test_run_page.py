"""The page of each kind of file, and of two."""

import json
import re

from tests import branched_traces
from tests.conftest import ROOT
from tests.kernel_files import FIXTURES
from tests.rank_files import write_late
from tests.small_traces import gpu_trace, write_profile
from tracepage.causes import rank_waits
from tracepage.causes.waits import CAUSES
from tracepage.errors import UsageError
from tracepage.readers import chrome_trace
from tracepage.show import rank_sections
from tracepage.views import run_page, timeline

import pytest

H200 = ROOT / "results" / "h200"
GOES = "Where the step goes"


def build(*paths):
    return run_page.make_page([run_page.load_page_source(path) for path in paths])


def titles(report) -> list[str]:
    return [section.title for section in report.sections if section.title]


def test_a_profile_has_everything_and_without_its_trace_no_timeline(gpu_profile):
    page = build(gpu_profile)
    assert titles(page) == [
        "Where the step goes",
        "Time of the step by span",
        "Timeline",
        "The step against its limits",
        "Targets of optimization",
        "Kernels",
        "Roofline",
        "The operators that take longest",
        "Memory",
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
            ["Where the step goes", "Timeline", "Kernels"],
        ),
        (FIXTURES / "new_kernel_trace.csv", ["Where the time goes", "Timeline", "Kernels"]),
        (FIXTURES / "ncu_raw.csv", ["Where the time goes", "Kernels", "Memory traffic"]),
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
            "The GPU waits for launches, each of which takes longer than the kernel before: 46.3 ms",
        ),
        (
            H200 / "v1_small_profile.json.gz",
            "The GPU waits for launches, each of which takes longer than the kernel before: 52.1 ms",
        ),
        (
            ROOT / "results/cpu/v1_small_profile.json.gz",
            "Limited by the CPU's work: 80 % (1.39 s) of the step is matrix products, ",
        ),
        (
            H200 / "traces/v4_small.json.gz",
            "The GPU works for 100 % of a step of 1.07 ms (with gaps between queued kernels), and ",
        ),
        (
            FIXTURES / "new_kernel_trace.csv",
            "The GPU waits, and the file does not tell for what: 4 us of the 21 us in the",
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_page_begins_with_what_limits_the_step(path, verdict):
    first = build(path).sections[0].items[0]
    assert first.kind == "verdict" and first.content.startswith(verdict)


def test_a_captured_step_that_waits_is_not_told_to_capture(tmp_path):
    branched_traces.write(tmp_path, captured=True)
    sentence = build(tmp_path / "trace_1.json").first_sentence()
    assert sentence.startswith("The GPU waits") and "Capture" not in sentence


def test_parts_that_are_no_kernels_are_the_time_in_which_none_runs():
    path = H200 / "traces/v4_small.json.gz"
    [step] = [part for part in build(path).sections if part.title == GOES]
    trace = chrome_trace.load(path)
    idle_ms = (sum(trace.step_ns()) - trace.device_busy_ns()) / 1e6 / len(trace.steps)
    waits = {"between kernels", *(cause.replace("_", " ") for cause in CAUSES)}
    ms = [row[1] for row in step.items[0].content.rows if row[0] in waits]
    assert sum(ms) == pytest.approx(idle_ms)


def test_a_cpus_trace_without_steps_tells_of_no_gpu(tmp_path):
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 5}
    (tmp_path / "trace.json").write_text(json.dumps([event]))
    page = build(tmp_path / "trace.json")
    assert page.first_sentence().startswith(
        "Limited by the CPU's work: 100 % (5 us) of the recorded time is matrix products. Use"
    )
    assert titles(page) == ["Where the time goes", "Timeline", "Operators"]
    header = page.sections[1].items[0].content.header
    assert header == ["cause", "ms", "% of time", "number", "where"], "it has no steps"


@pytest.mark.parametrize(
    ("us", "sentence"),
    [
        (
            6,
            "Limited by the CPU's work: 60 % (6 us) of the step is matrix products, 40 % (4 us) in ",
        ),
        (4, "Limited by the host: 60 % (6 us) of the step is in no operator that works"),
    ],
)
def test_a_cpu_is_limited_by_its_host_where_no_kind_of_work_takes_longer(tmp_path, us, sentence):
    lane = {"ph": "X", "pid": 1, "tid": 1, "ts": 0}
    step = lane | {"cat": "user_annotation", "name": "ProfilerStep#1", "dur": 10}
    product = lane | {"cat": "cpu_op", "name": "aten::mm", "dur": us}
    (tmp_path / "trace.json").write_text(json.dumps([step, product]))
    assert build(tmp_path / "trace.json").first_sentence().startswith(sentence)


def words(page) -> str:
    """The text of a page as a reader sees it."""
    text = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", page.html(), flags=re.DOTALL)
    return re.sub(r"<[^>]+>", " ", text)


def test_a_page_of_a_cpu_has_no_words_of_a_gpu(cpu_profile):
    content = json.loads(cpu_profile.read_text())
    content["run"]["memory"]["kind"] = "process"
    cpu_profile.write_text(json.dumps(content))
    for path in (cpu_profile, cpu_profile.with_name("trace_1.json")):
        text = words(build(path)).replace(str(path.parent), "")
        assert re.findall(r"(?i)\b(gpu|kernels?|launch\w*|cuda|hip)\b", text) == []


def test_a_version_that_always_fuses_is_told_of_no_fusion(gpu_profile):
    content = json.loads(gpu_profile.read_text())
    for settings, told in (({}, True), ({"memory_plan": True, "fp8": False}, False)):
        content["run"]["settings"] = settings
        gpu_profile.write_text(json.dumps(content))
        assert ("QKV fusion" in words(build(gpu_profile))) == told


def test_the_bar_has_all_parts_and_its_table_the_share_of_the_step_first(gpu_profile):
    page = build(gpu_profile)
    bar = page.sections[0].items[1]
    assert bar.kind == "bar" and sum(share for _, share, _ in bar.content) == pytest.approx(100)
    rows = page.sections[1].items[0].content.rows
    assert sum(row[2] for row in rows) == pytest.approx(100)
    heads = re.findall(r"<th [^>]*>([^<]*)</th>", page.html())
    assert heads[:5] == ["cause", "% of step", "ms", "per step", "where"]


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


def with_gpu(path, name: str):
    """The trace of `gpu_trace`, of a GPU of that name."""
    content = gpu_trace()
    devices = {event["pid"] for event in content["traceEvents"] if event["cat"] == "kernel"}
    properties = [{"id": device, "name": name, "numSms": 132} for device in devices]
    path.write_text(json.dumps({"deviceProperties": properties} | content))
    return path


def test_a_page_names_the_gpu_and_two_gpus_are_compared_with_a_warning(tmp_path):
    paths = [with_gpu(tmp_path / f"{name}.json", f"NVIDIA {name}") for name in ("H100", "H200")]
    assert build(paths[0]).title == "H100.json, NVIDIA H100, 2 profiled steps"
    warning = "They ran on different devices, NVIDIA H100 and NVIDIA H200"
    assert warning in build(*paths).markdown()
    same = with_gpu(tmp_path / "other.json", "NVIDIA H100")
    assert "different devices" not in build(paths[0], same).markdown()


def test_two_pages_show_which_causes_changed_in_ms_of_a_step(tmp_path):
    before, after = (tmp_path / name for name in ("before.json", "after.json"))
    content = gpu_trace()
    before.write_text(json.dumps(content))
    kernels = [event for event in content["traceEvents"] if event["cat"] == "kernel"]
    [last] = [event for event in kernels if event["args"]["correlation"] == 6]
    last["dur"] += 20  # It ends the second step.
    after.write_text(json.dumps(content))
    [section] = [part for part in build(before, after).sections if part.title == GOES]
    rows = {row[0]: row[1:] for row in section.items[0].content.rows}
    assert rows["matrix products"][2] == pytest.approx(0.01)
    assert rows["the step"][2] == pytest.approx(0.01)


def test_two_files_of_one_kind_stand_side_by_side_and_others_are_refused(tmp_path, gpu_profile):
    (tmp_path / "trace_3.json").write_text(json.dumps(gpu_trace("hipLaunchKernel")))
    page = build(gpu_profile.with_name("trace_2.json"), tmp_path / "trace_3.json")
    assert "kernels per step, by span" in page.markdown()

    (tmp_path / "other.json").write_text(
        '[{"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 0, "dur": 5}]'
    )
    with pytest.raises(UsageError, match=r"ncu_raw\.csv have nothing in common"):
        build(tmp_path / "other.json", FIXTURES / "ncu_raw.csv")


# ------------------------------------------------------------------------------------------------------ Markdown and JSON


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
    content = run_page.summary_json([source])
    parts = content["parts"]
    assert sum(part["ms"] for part in parts) == pytest.approx(content["step_ms"], rel=1e-3)
    for part in parts:
        assert part["cause"] in CAUSES and part["ms"] >= 0 and part["count"] >= 0
    verdict = content["verdict"]
    assert verdict["gain"] >= 1 and 0 <= verdict["ms"] <= content["step_ms"] + 1e-9
    if verdict["ms"]:
        assert verdict["cause"] in {part["cause"] for part in parts}
    else:
        assert verdict["cause"] == "unknown" and path.name == "ncu_raw.csv"
    text = run_page.summary_report([source]).markdown()
    assert len(text.encode()) < 8_000 and verdict["sentence"].replace("<", "&lt;") in text
    json.dumps(content, allow_nan=False)


def test_two_files_have_both_verdicts_and_what_changed(tmp_path):
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(gpu_trace()))
    sources = [run_page.load_page_source(tmp_path / name) for name in ("a.json", "b.json")]
    content = run_page.summary_json(sources)
    assert [run["file"][-6:] for run in content["runs"]] == ["a.json", "b.json"]
    whole = content["changes"][-1]
    assert whole["part"] == "the step" and whole["change_ms"] == 0
    assert whole["before_ms"] == content["runs"][0]["step_ms"]
    assert content["runs"][1]["verdict"]["sentence"] in (
        run_page.summary_report(sources).markdown()
    )


def test_two_files_that_count_differently_are_not_compared(tmp_path):
    names = ("steps.json", "file.json")
    content = gpu_trace()
    (tmp_path / names[0]).write_text(json.dumps(content))
    content["traceEvents"] = [
        event for event in content["traceEvents"] if "ProfilerStep" not in event["name"]
    ]
    (tmp_path / names[1]).write_text(json.dumps(content))
    sources = [run_page.load_page_source(tmp_path / name) for name in names]
    for write in (run_page.summary_report, run_page.summary_json, run_page.make_page):
        with pytest.raises(UsageError, match=r"per step, .*file\.json does not"):
            write(sources)


def test_annotated_nodes_of_a_graph_have_their_time_by_annotation(tmp_path):
    content = gpu_trace("cudaGraphLaunch")
    for event in content["traceEvents"]:
        if event["cat"] == "kernel":
            event["args"] |= {"graph node id": 5, "str": "layers.1.wq"}
    (tmp_path / "trace.json").write_text(json.dumps(content))
    page = build(tmp_path / "trace.json")
    [section] = [part for part in page.sections if part.title == "Time in graphs by annotation"]
    assert section.items[0].content.rows == [["layers.*.wq", 2.5, pytest.approx(77)]]


def test_all_ranks_stand_on_one_page_of_bounded_size(tmp_path, monkeypatch):
    """Their timelines are on one clock, and the shortest events go first."""
    paths = write_late(tmp_path)
    job = rank_waits.compare({n: rank_waits.read_rank(path) for n, path in enumerate(paths)})
    page = run_page.ranks_page(job)
    assert page.title == "2 ranks" and page.first_sentence().startswith("Rank 1 is slow")
    assert titles(page) == ["Ranks", "Collectives", "Timeline"]
    bars = [item.content for item in page.sections[0].items if item.kind == "bar"]
    assert [text for _, _, text in bars[0]] == [
        "rank 0: computing 500 us",
        "communication 20 us",
        "waits for ranks 100 us",
    ]
    events = page.sections[-1].items[0].content[1]
    ranks = [track["name"][:6] for track in events["tracks"]]
    assert ranks == ["rank 0", "rank 0", "rank 1", "rank 1"]
    assert "AllReduce, waits for rank 1" in events["names"]
    assert rank_sections.content(job)["verdict"]["rank"] == 1
    json.dumps(rank_sections.content(job), allow_nan=False)
    monkeypatch.setattr(timeline, "EVENTS", 5)
    shortened = run_page.ranks_page(job)
    assert "shortest events are left out" in shortened.markdown()


def test_a_trace_of_another_program_has_a_page_alone(tmp_path):
    event = {"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 0, "dur": 5}
    (tmp_path / "other.json").write_text(json.dumps([event]))
    source = run_page.load_page_source(tmp_path / "other.json")
    for write in (run_page.summary_report, run_page.summary_json):
        with pytest.raises(UsageError, match=r"other\.json has no kernels .* --output FILE\.html"):
            write([source])
