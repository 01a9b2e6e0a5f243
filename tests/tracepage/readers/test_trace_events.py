"""Events that cannot be, in the traces of any accelerator: left out and named, and the others
count.
"""

import gzip
import json
import re

from tests.conftest import ROOT
from tests.kernel_files import FIXTURES
from tests.small_traces import event, gpu_trace
from tracepage.errors import UsageError
from tracepage.readers import chrome_trace, kernel_names, load_kernels, pytorch, trace_events
from tracepage.views import launches

import pandas
import pytest


def write(path, *events: dict):
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def launched(*kernels: dict) -> list[dict]:
    return [event("cpu_op", "aten::mm", 0, 50), *kernels]


@pytest.mark.parametrize(
    ("damaged", "note"),
    [
        (
            event("kernel", "odd", 300, 299),
            "left out: 1 event without a name, a time or a possible duration, such as odd",
        ),
        (
            {"ph": "X", "cat": "kernel", "name": "odd", "pid": 0, "tid": 0, "dur": 1},
            "without a name, a time",
        ),
        (event("kernel", "odd", 300, 301) | {"tid": []}, "without a name, a time"),
        (event("kernel", "odd", 300, 301) | {"dur": float("nan")}, "without a name, a time"),
        (event("kernel", "odd", 300, 301, correlation={}), "without a name, a time"),
        (event("kernel", "odd", -1e15, -1e15), "far outside the time of the others, such as odd"),
        (
            event("kernel", "odd", 90, 1e6, stream=7),
            "that would run longer than the next 2 of their stream, such as odd",
        ),
    ],
)
def test_what_cannot_be_is_left_out_and_named(tmp_path, damaged, note):
    kernels = [
        event("kernel", "gemm", start, start + us, stream=7)
        for start, us in ((100, 100), (210, 50), (270, 9))
    ]
    found = load_kernels.load(write(tmp_path / "trace.json", *launched(*kernels, damaged)))
    assert list(found.table.name) == ["gemm"] * 3 and found.table.duration_ns.sum() == 159_000
    assert len(found.notes) == 1 and note in found.notes[0]


def kernel(start: float, us: float, name: str = "gemm", **fields) -> dict:
    return event("kernel", name, start, start + us, 0, stream=7) | fields


CHAIN = [kernel(100 + 12 * number, 10) for number in range(40)]
COPY = event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 0, 1.9e6, 0, stream=7)
EPOCH = 1.7e15  # us
FALSE_TIMES = {  # name: fields of an event beside the chain of kernels
    "2^32 us": {"dur": 2**32 - 4},
    "2^32 ns": {"dur": (2**32 - 4) / 1000},
    "2^31 us": {"dur": 2**31},
    "2^63 ns": {"dur": 9223372036854775.807},
    "2^64 us": {"dur": 2**64 - 4},
    "over six kernels": {"dur": 1e6},
    "start at the largest int": {"ts": 2**32 - 1},
    "start at 2^63 ns": {"ts": 9223372036854775.807},
    "start at 2^64 us": {"ts": 2**64 - 4},
    "never started": {"ts": 0, "dur": 0},
}


@pytest.mark.parametrize("case", FALSE_TIMES)
def test_an_event_with_a_false_time_is_left_out_and_named(case, tmp_path):
    odd = kernel(140, 5, "odd") | FALSE_TIMES[case]
    found = load_kernels.load(write(tmp_path / "trace.json", *launched(*CHAIN, odd)))
    assert (len(found.table), found.table.duration_ns.sum()) == (40, 400_000)
    assert [note[:16] for note in found.notes] == ["left out: 1 even"]


@pytest.mark.parametrize("start", [0, -5, 2**32 - 1])
def test_a_start_that_no_clock_gave_is_left_out(start, tmp_path):
    events = [each | {"ts": each["ts"] + EPOCH} for each in launched(*CHAIN)]
    path = write(tmp_path / "trace.json", *events, kernel(0, 5, "odd") | {"ts": start})
    assert list(load_kernels.load(path).table.name) == ["gemm"] * 40


@pytest.mark.parametrize(
    ("events", "count", "us"),
    [
        ([kernel(100 * i, 85, "ncclDevKernel_AllReduce") for i in range(5)], 45, 825),
        ([kernel(300, 30_000, "ncclDevKernel_AllGather")], 41, 30_400),
        ([kernel(0, 5, "start-up", ts=-3599e6)], 41, 405),
        ([kernel(3600e6 + 100 * i, 50, "late") for i in range(3)], 43, 550),
        ([kernel(3600e6, 4e6, "late")], 41, 4_000_400),
        ([COPY | {"ts": -2e6}], 41, 1_900_400),
    ],
    ids=["one lane", "a last wait", "start-up", "late", "late and long", "a copy before"],
)
def test_work_that_is_only_unlikely_counts(events, count, us, tmp_path):
    table = load_kernels.load(write(tmp_path / "trace.json", *launched(*CHAIN, *events))).table
    assert (len(table), table.duration_ns.sum()) == (count, 1000 * us)


def test_branches_of_a_graph_on_one_lane_count_and_overlap(tmp_path):
    """Ten replays: a long kernel beside three short ones, of another queue on its lane."""
    times = [(0, 100), (60, 10), (61, 12), (62, 13)]
    kernels = [kernel(200 * i + start, us) for i in range(10) for start, us in times]
    found = load_kernels.load(write(tmp_path / "trace.json", *launched(*kernels)))
    gaps = launches.gaps(found)
    assert (len(found.table), found.table.duration_ns.sum()) == (40, 1_350_000)
    assert (gaps.busy_ns, gaps.window_ns) == (1_000_000, 1_900_000)
    assert [note[:38] for note in found.notes] == ["work of one stream overlaps for 350 us"]


def uncategorized(name: str, number: int, process: int, **arguments) -> dict:
    made = event("", name, 100 * number, 100 * number + 60, 2, **arguments) | {"pid": process}
    return {key: value for key, value in made.items() if key != "cat"}


def lanes(label: str, **arguments) -> list[dict]:
    """Ten products on a device and the calls of its library on the host, without categories."""
    named = {"ph": "M", "name": "process_name", "pid": 31, "tid": 0, "args": {"name": label}}
    work = [uncategorized("MatMulV3", number, 31, **arguments) for number in range(10)]
    calls = [uncategorized("AscendCL@aclnnMm", number, 30) for number in range(10)]
    return [named, *launched(), *calls, *work]


@pytest.mark.parametrize(
    ("label", "arguments"),
    [
        ("Ascend Hardware", {"Task Type": "AI_CORE", "Stream Id": 2}),
        ("NPU 0", {}),
        ("a name", {"Task Type": "MIX_AIC"}),
        ("a name", {"stream": 2}),
    ],
)
def test_work_is_known_by_its_lane_where_it_has_no_category(label, arguments, tmp_path):
    found = load_kernels.load(write(tmp_path / "trace.json", *lanes(label, **arguments)))
    assert list(found.table.name) == ["MatMulV3"] * 10 and set(found.table.stream) == {2}
    assert found.table.duration_ns.sum() == 600_000
    assert found.notes == ("not read: 10 events of no known category, such as AscendCL@aclnnMm",)


def test_what_nothing_tells_to_be_work_is_counted_as_not_read(tmp_path):
    found = load_kernels.load(write(tmp_path / "trace.json", *lanes("a name")))
    assert found.are_operators and found.notes[0].startswith("not read: 20 events of no known")
    assert found.notes[1] == pytorch.NO_KERNELS_NOTE
    waits = lanes("Ascend Hardware", **{"Task Type": "EVENT_WAIT"})
    task = uncategorized("MatMulV3", 20, 31, **{"Task Type": "AI_CORE"})
    found = load_kernels.load(write(tmp_path / "trace.json", *waits, task))
    assert len(found.table) == 1 and found.notes[0].startswith("not read: 20 events")


def test_pairs_of_begin_and_end_beside_operators_are_counted(tmp_path):
    pairs = [
        {"ph": phase, "cat": "operator", "id": 1, "name": "pair", "pid": 1, "tid": 1, "ts": 1005}
        for phase in "beBE"
    ]
    found = load_kernels.load(write(tmp_path / "trace.json", *launched(*CHAIN), *pairs))
    assert found.notes == ("not read: 2 events with a begin and an end apart, such as pair",)


def test_queues_of_an_xpu_are_streams(tmp_path):
    queues = [
        event("kernel", "gemm", 100 * i, 100 * i + 50, **{"sycl queue": f"0x{i % 2}"})
        for i in range(4)
    ]
    lane = event("kernel", "gemm", 900, 950, "0x2")
    found = load_kernels.load(write(tmp_path / "trace.json", *launched(*queues, lane)))
    assert list(found.table.stream) == ["0x0", "0x1", "0x0", "0x1", "0x2"]


def test_a_byte_order_mark_and_long_metadata_are_no_damage(tmp_path):
    content = {"ranks": list(range(400_000)), "traceEvents": launched(*CHAIN)}
    text = json.dumps(content)
    (tmp_path / "trace.json").write_text(text, encoding="utf-8-sig")
    assert text.index("traceEvents") > 2 * load_kernels.HEAD_BYTES
    assert len(load_kernels.load(tmp_path / "trace.json").table) == 40
    (tmp_path / "list.json").write_text(json.dumps(launched(*CHAIN)), encoding="utf-8-sig")
    assert len(load_kernels.load(tmp_path / "list.json").table) == 40


def test_an_early_launch_and_long_pauses_are_possible(tmp_path):
    """A kernel overlaps the one before it, and a host that sleeps leaves a gap of hours."""
    starts = (100, 190, 280, 7.2e9, 7.2e9 + 100)
    kernels = [event("kernel", "gemm", start, start + 100, stream=7) for start in starts]
    assert chrome_trace.load(write(tmp_path / "trace.json", *launched(*kernels))).notes == ()


@pytest.mark.parametrize(
    "categories",
    [
        ("cuda_runtime", "kernel", "gpu_memcpy"),
        ("Runtime", "Kernel", "Memcpy"),
        ("xpu_runtime", "kernel", "gpu_memcpy"),
        ("privateuse1_runtime", "privateuse1_kernel", "gpu_memcpy"),
    ],
)
@pytest.mark.parametrize("operator", ["cpu_op", "Operator", None])
def test_categories_of_all_accelerators_and_of_profiles_without_operators(
    tmp_path, categories, operator
):
    launch, kernel, copy = categories
    events = [
        event(launch, "launch", 12, 13, correlation=1),
        event(kernel, "gemm", 100, 200, correlation=1),
    ]
    events += [event(copy, "CopyHostToDevice", 210, 260, correlation=2)]
    events += [event(operator, "aten::mm", 10, 20)] if operator else []
    found = load_kernels.load(write(tmp_path / "trace.json", *events))
    assert (
        list(found.table.category) == ["kernel", "memcpy"]
        and found.table.duration_ns.sum() == 150_000
        and not found.notes
    )


def test_another_clock_another_order_and_other_numbers_change_nothing(tmp_path):
    content = gpu_trace()["traceEvents"]
    moved = [
        each | {"ts": each["ts"] + 4e9, "pid": each["pid"] + 90, "tid": f"thread {each['tid']}"}
        for each in reversed(content)
    ]
    one, other = (
        chrome_trace.load(write(tmp_path / name, *events))
        for name, events in (("1.json", content), ("2.json", moved))
    )
    assert chrome_trace.profile_tables(other) == chrome_trace.profile_tables(one)


@pytest.mark.parametrize("size", [1, 7, 100])
def test_chunks_of_any_size_give_all_values(size, tmp_path, monkeypatch):
    monkeypatch.setattr(trace_events, "CHUNK", size)
    content = {"version": 1.25e-07, "number": 12, "name": 'Größe, "]}'} | gpu_trace() | {"last": []}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8-sig")
    expected = json.loads(json.dumps(content), parse_float=str)
    read = list(trace_events.entries(path))
    events = [value for key, value in read if key == "traceEvents"]
    assert dict(read) | {"traceEvents": events} == expected


def test_a_list_of_events_may_lack_its_end(tmp_path):
    text = json.dumps(gpu_trace()["traceEvents"])
    (tmp_path / "trace.json").write_text("\n" + text[:-1] + ",")
    assert len(chrome_trace.load(tmp_path / "trace.json").kernels) == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"traceEvents": [{"ph"', "is not JSON or is cut off"),
        ('{"traceEvents": [{"ph": "M"}]', "is not JSON or is cut off"),
        ('[{"ph": "M"}, {"ph"', "is not JSON or is cut off"),
        ('{"traceEvents": []}, 7', "is not JSON or is cut off"),
        (
            '{"traceEvents": [{"ph": "X", "cat": "python_function", "name": "f"}, {"ph": "M"}, 7, null]}',
            "no operators, no kernels",
        ),
        (
            json.dumps(
                {
                    "traceEvents": [
                        event("user_annotation", "ProfilerStep#1", 100, 150),
                        event("cpu_op", "aten::mm", 900, 950),
                    ]
                }
            ),
            "no operator falls into a profiled step",
        ),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, text, message):
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        load_kernels.load(tmp_path / "trace.json")


@pytest.mark.parametrize(
    "path",
    [FIXTURES / "amd/bert_mi300x.json.gz", *sorted((ROOT / "results").glob("*/traces/*.json.gz"))],
    ids=lambda path: path.name,
)
def test_every_launch_of_a_real_trace_is_counted_or_said_not_to_be(path):
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    frame = pandas.DataFrame(
        [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    )
    found = load_kernels.load(path)
    left_out = [
        re.fullmatch(r"not counted: ([\d,]+) kernels? of ([\d.]+) ms .*", note).groups()
        for note in found.notes
    ]
    assert len(found.table) + sum(int(count.replace(",", "")) for count, _ in left_out) == len(
        frame
    )
    assert found.table.duration_ns.sum() / 1e6 + sum(
        float(ms) for _, ms in left_out
    ) == pytest.approx(frame.dur.sum() / 1e3, rel=0.01)
    assert not kernel_names.unknown(found.table.groupby("name").duration_ns.sum().to_dict())


def test_the_gpus_that_ran_kernels_are_named(tmp_path):
    """Others of the machine are not, nor is any in a trace that is a list of events alone."""
    properties = [
        {"id": number, "name": name, "numSms": 132, "totalGlobalMem": 8_000, "warpSize": 32}
        for number, name in enumerate(("NVIDIA H100", "NVIDIA H200"))
    ]
    events = launched(event("kernel", "gemm", 100, 200, stream=7) | {"pid": 1})
    content = {"deviceProperties": properties, "traceEvents": events}
    (tmp_path / "trace.json").write_text(json.dumps(content))
    (tmp_path / "list.json").write_text(json.dumps(events))
    device = {"id": 1, "name": "NVIDIA H200", "multiprocessors": 132}
    assert chrome_trace.load(tmp_path / "trace.json").devices == [device]
    assert chrome_trace.load(tmp_path / "list.json").devices == []


@pytest.mark.parametrize(
    ("us", "ns"),
    [("1.500", 1500), ("-0.500", -500), ("5017313105879.311", 5017313105879311), ("1.5e3", 1500000)]
    + [("7.25", 7250), ("0.0004", 0), (3, 3000)],
)
def test_a_time_of_any_form_is_exact_to_a_nanosecond(us, ns):
    assert trace_events.nanoseconds(us) == ns
