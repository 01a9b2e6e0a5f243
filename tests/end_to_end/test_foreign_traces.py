"""Traces of other programs: counted once more by hand, damaged, renamed, moved, stretched and
doubled.
"""

import gzip
import json
from pathlib import Path

from tests import small_traces
from tests.conftest import ROOT
from tests.small_traces import event
from tracepage.errors import UsageError
from tracepage.readers import load_kernels
from tracepage.readers.source import Source
from tracepage.views import launches

import pandas
import pytest

TRACE = ROOT / "results/h200/traces/v4_small.json.gz"
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
EVENTS = json.loads(gzip.decompress(TRACE.read_bytes()))["traceEvents"]
SECOND = 1e6  # us


def launched(correlation: int, start: float, end: float, launch: str, kernel: str) -> list[dict]:
    """A launch of the host and the kernel that it starts."""
    return [
        event(launch, "hipLaunchKernel", start - 8, start - 6, correlation=correlation),
        event(kernel, f"k{correlation}", start, end, 0, stream=3, correlation=correlation),
    ]


def two_launches(launch: str = "cuda_runtime", kernel: str = "kernel") -> list[dict]:
    """Kernels of 90 and of 60 us."""
    return [*launched(1, 20, 110, launch, kernel), *launched(2, 130, 190, launch, kernel)]


def traced(*events: dict) -> str:
    return json.dumps({"traceEvents": events})


MM = event("cpu_op", "aten::mm", 0, 9)
STEP = event("user_annotation", "ProfilerStep#4", 0, 400)
# a captured graph's launch has a correlation, and its kernels have none
GRAPH = [
    event("cuda_runtime", "hipGraphLaunch", 5, 9, correlation=8),
    *(event("kernel", "in_graph", 20 + 2 * i, 21.5 + 2 * i, 0, stream=3) for i in range(40)),
]
ALREADY_OVER = event("kernel", "k3", 250, 247, 0, stream=3, correlation=3)
# old kinetos wrote a kernel without times beside those of 2023
AT_ZERO = [
    *(each | {"ts": each["ts"] + 1.7e15} for each in two_launches()),
    event("kernel", "k3", 0, 0, 0, stream=3, correlation=3) | {"ts": 0},
]
NCU_HEADER = "ID,Process ID,Kernel Name,Stream,Section Name,Metric Name,Metric Unit,Metric Value"
NCU = f'{NCU_HEADER}\n0,3,"axpy<1, 2>",7,Command line profiler metrics,gpu__time_duration.sum,'

COUNTED = {  # name: (content, launches, us)
    "gpu_only.json": (traced(*two_launches()), 2, 150),
    "old_categories.json": (traced(MM | {"cat": "Operator"}, *two_launches("Runtime", "Kernel")), 2, 150),
    "private_use.json": (
        traced(MM, *two_launches(kernel="privateuse1_kernel")[1::2], event("mtia_ccp_events", "k3", 200, 230, 0, correlation=3)),
        3,
        180,
    ),
    "negative_duration.json": (traced(MM, *two_launches(), ALREADY_OVER), 2, 150),
    "start_at_zero.json": (traced(*AT_ZERO), 2, 150),
    "graph_without_correlation.json": (traced(STEP, MM, *launched(1, 10, 15, "cuda_runtime", "kernel"), *GRAPH), 41, 65),
    "nsys_sum.csv": ("Time (%),Total Time (ns),Instances,Avg (ns),Name\n100.0,800,2,400,axpy\n", 1, 0.8),
    "nsys_trace.csv": ("Start (us),Duration (us),CorrId,Name\n5,0.8,2,axpy\n", 1, 0.8),
    "ncu_german.csv": (f'{NCU}us,"2.345,67"\n', 1, 2345.67),
    "ncu_german_ns.csv": (f'{NCU}ns,"2.345.678"\n', 1, 2345.678),
}  # fmt: skip
PYTHON = '{"traceEvents": [{"ph": "X", "cat": "python_function", "name": "'
REFUSED = {  # name: (content, message)
    "backslash.json": (PYTHON + 'C:\\src.py", "ts": 1, "dur": 1}]}', f"line 1 column {len(PYTHON) + 3}"),
    "control.json": (PYTHON + 'main.py \x01", "ts": 1, "dur": 1}]}', f"line 1 column {len(PYTHON) + 9}"),
    "zstd.json.zst": (b"\x28\xb5\x2f\xfd\x04\x58\x11\x00" + traced(MM).encode(), "packed by zstd .* is none of"),
    "utf16.json": (traced(MM, *two_launches()).encode("utf-16"), "is UTF-16, .* is none of"),
    "nsys_api.csv": ("Time (%),Total Time (ns),Num Calls,Avg (ns),Name\n100.0,800,2,400,cudaFree\n", "is a table of nsys without kernels"),
    "nsys_text.txt": (" Time (%)  Total Time (ns)  Instances\n", "is a table of nsys as text"),
    "timeline.nsys-rep": (b"\x07\x00nsys", "nsys export --type sqlite .*timeline.nsys-rep` writes"),
    "step_without_operators.json": (
        traced(STEP | {"dur": 20}, event("cpu_op", "aten::mm", 50, 90, shapes=[[4, 4], [4, 4]])),
        "no operator falls into a profiled step",
    ),
}  # fmt: skip


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def loaded(path: Path, events: list[dict]) -> Source:
    path.write_text(json.dumps({"traceEvents": events}))
    return load_kernels.load(path)


def busy(kernels: Source) -> float:
    found = launches.gaps(kernels)
    return found.busy_ns / found.window_ns


def shares(kernels: Source) -> list[float]:
    return list(launches.summary(kernels).share)


def moved(events: list[dict], by: float, factor: float = 1.0) -> list[dict]:
    return [
        event
        | {key: event[key] * factor + by * (key == "ts") for key in ("ts", "dur") if key in event}
        for event in events
    ]


def other_run(events: list[dict]) -> list[dict]:
    """The same events as a second run has them: later, with other correlations and steps of other
    numbers.
    """
    changed = []
    for shifted in moved(events, SECOND):
        arguments = shifted.get("args", {})
        for key in ("correlation", "External id"):
            if arguments.get(key):
                arguments = arguments | {key: arguments[key] + 10**8}
        name = (
            shifted["name"].replace("ProfilerStep#", "ProfilerStep#9")
            if "ProfilerStep#" in shifted.get("name", "")
            else shifted["name"]
        )
        changed.append(shifted | {"args": arguments, "name": name})
    return changed


@pytest.fixture(scope="module")
def real() -> Source:
    return load_kernels.load(TRACE)


def counted_by_hand(events: list[dict]) -> pandas.DataFrame:
    """The device's events whose launch, found by its correlation, lies after the beginning of the
    first step.
    """
    frame = pandas.DataFrame([event for event in events if event.get("ph") == "X"])
    frame["correlation"] = [
        isinstance(each, dict) and each.get("correlation") for each in frame.args
    ]
    begin = frame.ts[
        (frame.cat == "user_annotation") & frame.name.str.startswith("ProfilerStep#")
    ].min()
    launched = frame[
        frame.cat.isin(["cuda_runtime", "cuda_driver"]) & (frame.ts >= begin)
    ].correlation
    return frame[frame.cat.isin(DEVICE) & frame.correlation.isin(launched)]


def check_count(path: Path, events: list[dict]) -> None:
    kernels = load_kernels.load(path)
    every = pandas.DataFrame([event for event in events if event.get("cat") in DEVICE])
    assert len(kernels.trace.kernels) == len(every)
    ms = kernels.trace.kernels.duration_ns.sum() / 1e6
    assert ms == pytest.approx(every.dur.sum() / 1e3, rel=1e-6)
    by_hand = counted_by_hand(events)
    assert len(kernels.table) == kernels.table.calls.sum() == len(by_hand) > 0
    assert kernels.table.duration_ns.sum() == pytest.approx(1e3 * by_hand.dur.sum(), rel=1e-6)


TRACES = sorted(ROOT.glob("results/*/**/*trace*/*.json.gz")) + sorted(
    ROOT.glob("results/*/*trace*.json.gz")
)


@pytest.mark.parametrize("path", TRACES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_launches_and_time_are_those_of_an_independent_count(path):
    check_count(path, json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])


@pytest.mark.parametrize("launch", ["hipLaunchKernel", "hipExtModuleLaunchKernel"])
def test_launches_of_hip_are_those_of_an_independent_count(launch, tmp_path):
    trace = small_traces.gpu_trace(launch)
    check_count(written(tmp_path / "trace.json", json.dumps(trace)), trace["traceEvents"])


@pytest.mark.parametrize("name", COUNTED)
def test_a_small_damaged_file_is_read_right(name, tmp_path):
    content, count, us = COUNTED[name]
    table = load_kernels.load(written(tmp_path / name, content)).table
    assert (len(table), table.duration_ns.sum() / 1e3) == (count, pytest.approx(us))


@pytest.mark.parametrize("name", REFUSED)
def test_a_small_foreign_file_is_refused_by_name(name, tmp_path):
    content, message = REFUSED[name]
    with pytest.raises(UsageError, match=message):
        load_kernels.load(written(tmp_path / name, content))


def test_other_names_of_kernels_change_no_number(real, tmp_path):
    renamed = [
        event | {"name": f"k_{event['name']}"} if event.get("cat") == "kernel" else event
        for event in EVENTS
    ]
    found = loaded(tmp_path / "trace.json", renamed)
    assert (len(found.table), found.steps, busy(found)) == (
        len(real.table),
        real.steps,
        pytest.approx(busy(real)),
    )
    assert shares(found) == pytest.approx(shares(real))


@pytest.mark.parametrize(
    ("by", "factor"), [(3600 * SECOND, 1.0), (0.0, 2.0)], ids=["later", "slower"]
)
def test_a_moved_or_stretched_trace_has_the_same_shares(real, tmp_path, by, factor):
    found = loaded(tmp_path / "trace.json", moved(EVENTS, by, factor))
    assert len(found.table) == len(real.table) and busy(found) == pytest.approx(
        busy(real), rel=1e-3
    )
    assert found.table.duration_ns.sum() == pytest.approx(
        factor * real.table.duration_ns.sum(), rel=1e-6
    )


def test_a_doubled_trace_has_twice_the_launches_and_the_same_shares(real, tmp_path):
    # kernels before the first step of the second run would be kernels between two steps
    kept = set(counted_by_hand(EVENTS).ts)
    events = [event for event in EVENTS if event.get("cat") not in DEVICE or event["ts"] in kept]
    found = loaded(tmp_path / "trace.json", events + other_run(events))
    assert len(found.table) == 2 * len(real.table) and found.steps == 2 * real.steps
    assert shares(found) == pytest.approx(shares(real))


def test_the_order_of_events_changes_nothing(real, tmp_path):
    found = loaded(tmp_path / "trace.json", EVENTS[::-1])
    assert len(found.table) == len(real.table) and busy(found) == pytest.approx(busy(real))
