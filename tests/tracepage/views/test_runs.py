"""Records of runs side by side."""

from tests.conftest import V1
from tests.records import record
from tracepage.files import write_json
from tracepage.views import runs

import pytest


def shown(path, **changes):
    write_json(path, record(**changes))
    return path


def tables(paths):
    return [
        item.content for item in runs.render_runs(paths).sections[0].items if item.kind == "table"
    ]


def test_the_times_are_those_without_the_profiler(tmp_path):
    """Steps of 50, 10, 10, 21, 10, 15 and 10 ms, and two that the profiler slowed: two of seven
    took over twice the median.
    """
    summary = {"median": 10.0, "p20": 10.0, "p80": 21.0, "count": 7}
    steps = {"all": [50.0, 10.0, 10.0, 21.0, 10.0, 15.0, 10.0, 90.0, 90.0], "profiled": 2} | summary
    [times, _] = tables([shown(tmp_path / "a.json", step_ms=steps)])
    assert [list(row) for row in times.rows] == [
        ["a.json", 7, 50.0, 10.0, "10 to 21", 18.0, 50.0, 2]
    ]


def test_losses_are_equal_to_the_last_bit_or_not(tmp_path):
    near = [7.0, 6.0000000001, 5.0]
    names = [
        shown(tmp_path / f"{name}.json", **own).name
        for name, own in (("a", {}), ("b", {}), ("c", {"loss__all": near}))
    ]
    [_, losses] = tables([tmp_path / name for name in names])
    assert [
        row[list(losses.header).index("losses as in the first run")] for row in losses.rows
    ] == [None, "yes", "no"]


def test_ceilings_stand_beside_the_run_that_measured_them(tmp_path, execute):
    ceilings = {
        "flops_per_second": 2e12,
        "bytes_per_second": 3e9,
        "operation_seconds": 4e-6,
        "precision": "bf16",
    }
    paths = shown(tmp_path / "a.json"), shown(tmp_path / "b.json", ceilings=ceilings)
    assert [row[-3:] for row in tables(paths)[1].rows] == [[None] * 3, [2, 3, pytest.approx(4)]]
    assert "small operation us" in execute(V1 / "show_runs.py", *paths).out
