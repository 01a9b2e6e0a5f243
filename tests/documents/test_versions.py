"""Versions and peers beside each other, and losses from the same seed: numbers worked out by hand."""

import gzip
import json
from pathlib import Path

from common import ROOT
from documents import versions
from tests import records
from tests.conftest import cells
from tests.small_traces import gpu_trace
from tracepage.errors import UsageError
from tracepage.files import write_json

import pytest


def suite(path: Path, spread: tuple[float, ...] = (1.0, 0.0, -0.5), **models: float | str) -> None:
    """A benchmark of one shape: by model its ms per step, around which its processes spread, or why
    there are none.
    """
    entries = []
    for model, outcome in models.items():
        times = [outcome + extra for extra in spread] if isinstance(outcome, float) else []
        memory = {"peak_mib": 9.0, "reserved_mib": 512.0, "kind": "GPU allocator"}
        runs = [
            {"step_ms": {"median": ms, "p20": ms, "p80": ms, "count": 2}} | memory for ms in times
        ]
        place = {"model": model.replace("_", "-"), "batch_size": 8, "sequence_length": 128}
        entries.append(place | {"status": "ok" if times else outcome, "reason": None, "runs": runs})
    write_json(path, records.benchmark(entries))


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two presets in bf16 and one in fp32; the first version was measured in two files of tiny."""
    suite(tmp_path / "peers_tiny_fp32.json", v2=3.0)
    suite(tmp_path / "peers_tiny_bf16.json", v4=2.0, v1=8.0, captured_bf16=3.0, v4_fp8=1.0)
    suite(
        tmp_path / "peers_small_bf16.json",
        v1=6.0,
        v4=4.0,
        liger="failed",
        liger_compile_captured=3.5,
    )
    suite(tmp_path / "captured_tiny_bf16.json", v1=9.0, v1_captured=4.0, v2_captured=1.0)
    return tmp_path


def test_versions_show_how_many_times_faster_than_the_first_they_are(folder):
    """Of the versions only the first is shown captured, and none in FP8."""
    assert cells(versions.versions(folder)) == [
        ["model", "tiny, bf16, 8 x 128", "small, bf16, 8 x 128"],
        ["v1", "8.75 (7.5 to 10), 0.50", "6 (5.5 to 7), 0.50"],
        ["v1-captured", "4 (3.5 to 5), 2.19x, 0.50", ""],
        ["v4", "2 (1.5 to 3), 4.38x, 0.50", "4 (3.5 to 5), 1.5x, 0.50"],
    ]
    assert versions.ratio([7.5, 10.0], [1.5, 3.0]) == pytest.approx((8.75 / 2.25, 2.5, 10 / 1.5))


def test_all_models(folder):
    header, *found = cells(versions.versions_and_peers(folder))
    assert header == ["model", "tiny, fp32, 8 x 128", "tiny, bf16, 8 x 128", "small, bf16, 8 x 128"]
    assert [row[0] for row in found] == [
        "v1",
        "v1-captured",
        "v2",
        "v2-captured",
        "v4",
        "v4-fp8",
        "captured-bf16",
        "liger",
        "liger-compile-captured",
    ]
    assert found[2] == ["v2", "3 (2.5 to 4), 0.50", "", ""] and found[7] == ["liger", "", "", ""]


def test_a_range_that_cannot_be_seen_is_not_shown(tmp_path):
    suite(tmp_path / "peers_tiny_bf16.json", (0.001, 0.0), v1=20.0, v4=0.1)
    assert [row[1] for row in cells(versions.versions(tmp_path))[1:]] == [
        "20, 0.50",
        "0.101 (0.1 to 0.101), 199x, 0.50",
    ]


def test_limits_have_the_step_with_and_without_launches_up_to_a_version(folder):
    """Version 1 at tiny: 8.75 ms with a launch for each of its 5 kernels, 4 ms captured."""
    (folder / "traces").mkdir()
    (folder / "traces/v1_tiny.json.gz").write_bytes(gzip.compress(json.dumps(gpu_trace()).encode()))
    header, *rows = cells(versions.limits(folder, Path("version4_last")))
    assert header == [
        "size",
        "model",
        "kernels",
        "step, us per kernel",
        "step, ms",
        "captured, ms",
        "waits for the host, %",
    ]
    assert rows == [
        ["tiny", "v1", "5", "1,750", "8.75", "4", "54.3"],
        ["tiny", "v4", "", "", "", "2", ""],
    ]
    assert cells(versions.limits(folder, Path("version3_before")))[1:] == rows[:1]


def test_kinds_have_their_shares_in_the_time_of_a_step_s_kernels(tmp_path):
    path = tmp_path / "v1_tiny.json.gz"
    path.write_bytes(gzip.compress(json.dumps(gpu_trace()).encode()))
    header, row = cells(versions.kinds(path))
    assert header == ["trace", "kernels", "ms of all", "matrix products %", "other %", "copies %"]
    assert row == ["v1, tiny", "5", "0.105", "57.1", "33.3", "9.52"]  # 60, 35 and 10 us


def test_benchmarks_of_one_case_are_of_one_device(tmp_path):
    for name in ("peers_small_bf16.json", "captured_small_bf16.json"):
        study = json.loads((ROOT / "results/h200" / name).read_text())
        study["device"] |= {"name": "NVIDIA H100"} if name.startswith("captured") else {}
        (tmp_path / name).write_text(json.dumps(study))
    with pytest.raises(UsageError, match="small_bf16.json is of another device or model"):
        versions.versions(tmp_path)
    with pytest.raises(UsageError, match="has no peers_PRESET_FORMAT.json"):
        versions.versions(tmp_path / "..")


def test_curves_show_how_far_the_others_have_come(tmp_path):
    expected = [5.0 - 0.01 * i for i in range(40)]
    apart = {"v1": {}, "v2": {7: 1e-3}, "v3": {20: -0.25}}
    paths = []
    for version, differences in apart.items():
        losses = [loss + differences.get(i, 0) for i, loss in enumerate(expected)]
        paths.append(tmp_path / f"curve_{version}.json")
        write_json(paths[-1], records.record(version=version, loss={"uniform": 6.9, "all": losses}))
    header, *rows = cells(versions.curves(*paths))
    assert header == ["largest difference to Version 1 up to step", "Version 2", "Version 3"]
    assert rows == [
        [step, "1.0e-03", "0.0e+00" if step in ("8", "16") else "2.5e-01"]
        for step in ("8", "16", "24", "32", "40")
    ]
