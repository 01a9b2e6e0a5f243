"""Traces of other programs: counted once more by hand, damaged, renamed, moved, stretched and
doubled.
"""

import gzip
import json
from pathlib import Path

from tests.conftest import ROOT
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
SAMPLES = ROOT.parent / "shared/samples"  # no part of the repository
COUNTED = {  # launches and us
    "gpu_only.json": (2, 150),
    "oldcats.json": (2, 150),
    "privateuse.json": (2, 150),
    "neg_dur.json": (2, 150),
    "kineto109_ts0.json": (2, 200),
    "graph_nocorr.json": (101, 505),
    "ncu_de.csv": (1, 1234.56),
    "ncu_de2.csv": (1, 1234.567),
}
REFUSED = {
    "backslash.json": "line 1 column 70",
    "ctrl.json": "line 1 column 79",
    "zst.json.zst": "is none of",
    "utf16.json": "is none of",
    "nsys_kern_sum.csv": "is none of",
    "cpu_step_ended.json": "no operator falls into a profiled step",
}
needs_samples = pytest.mark.skipif(
    not SAMPLES.exists(), reason="needs the samples of other programs' traces"
)


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
    for event in moved(events, SECOND):
        arguments = event.get("args", {})
        for key in ("correlation", "External id"):
            if arguments.get(key):
                arguments = arguments | {key: arguments[key] + 10**8}
        name = (
            event["name"].replace("ProfilerStep#", "ProfilerStep#9")
            if "ProfilerStep#" in event.get("name", "")
            else event["name"]
        )
        changed.append(event | {"args": arguments, "name": name})
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


TRACES = [
    *sorted(ROOT.glob("results/*/*traces/*.json.gz")),
    *sorted(SAMPLES.glob("rocprof/torch-profiler-*/*.json.gz")),
]


@pytest.mark.parametrize("path", TRACES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_launches_and_time_are_those_of_an_independent_count(path):
    found, by_hand = (
        load_kernels.load(path),
        counted_by_hand(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]),
    )
    assert len(found.table) == found.table.calls.sum() == len(by_hand) > 0
    assert found.table.duration_ns.sum() == pytest.approx(1e3 * by_hand.dur.sum(), rel=1e-6)


@needs_samples
def test_small_damaged_files_are_read_right_or_named():
    for name, (count, us) in COUNTED.items():
        table = load_kernels.load(SAMPLES / "failing" / name).table
        assert (len(table), table.duration_ns.sum() / 1e3) == (count, pytest.approx(us)), name
    for name, message in REFUSED.items():
        with pytest.raises(UsageError, match=message):
            load_kernels.load(SAMPLES / "failing" / name)


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
