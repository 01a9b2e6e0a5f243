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
from tracepage.readers import chrome_trace, kernel_names, load_kernels

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


def test_a_list_of_events_may_lack_its_end(tmp_path):
    text = json.dumps(gpu_trace()["traceEvents"])
    (tmp_path / "trace.json").write_text("\n" + text[:-1] + ",")
    assert len(chrome_trace.load(tmp_path / "trace.json").kernels) == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"traceEvents": [{"ph"', "is not JSON or is cut off"),
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
    device = {"id": 1, "name": "NVIDIA H200", "multiprocessors": 132, "memory": 8_000}
    assert chrome_trace.load(tmp_path / "trace.json").devices == [device]
    assert chrome_trace.load(tmp_path / "list.json").devices == []
