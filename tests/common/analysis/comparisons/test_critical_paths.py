"""Several profiles side by side: a column each, and only of runs under the same conditions."""

from common.analysis.comparisons import critical_paths
from common.errors import UsageError
from common.files import read_json, write_json
from tests import branched_traces
from tests.conftest import cells

import pytest


def test_a_column_for_each_profile(tmp_path):
    paths = [
        branched_traces.write(tmp_path / "first", scales=(2.0,), version="v1", step_ms__median=0.5),
        branched_traces.write(tmp_path / "second", captured=True, version="v4", step_ms__median=0.05),
    ]
    report = critical_paths.compare(paths)
    header, *rows = cells(report.markdown())
    found = {label: values for label, *values in rows}
    assert header == ["quantity", "v1", "v4, captured"]
    assert found["median step without the profiler, us"] == ["500", "50"]
    assert found["from the first start to the last end, us"] == ["86", "43"]
    assert found["kernels, copies and fills"] == ["6", "6"] and found["on the critical path"] == ["3", "3"]
    assert found["gaps between them, us"] == ["8", "4"] and found["busy, %"] == ["90.7", "90.7"]
    assert [path.name for path in report.write(tmp_path / "out", "critical_paths", ("csv",))] == ["critical_paths.csv"]


def test_two_profiles_of_one_version_have_their_files_names(tmp_path):
    first, second = branched_traces.write(tmp_path / "first"), branched_traces.write(tmp_path / "second")
    second = second.rename(second.with_name("profile_2.json"))
    assert cells(critical_paths.compare([first, second]).markdown())[0] == ["quantity", "v1, profile_1", "v1, profile_2"]


def test_other_conditions_and_a_profile_without_kernels_are_refused(tmp_path):
    paths = [branched_traces.write(tmp_path / str(size), training__batch_size=size) for size in (8, 16)]
    with pytest.raises(UsageError, match=r"differ in more than the version: batch size \(8 and 16\)"):
        critical_paths.compare(paths)

    first, second = branched_traces.write(tmp_path / "first"), branched_traces.write(tmp_path / "second")
    trace = read_json(second.parent / "trace_1.json")
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event["cat"] != "kernel"]
    write_json(second.parent / "trace_1.json", trace)
    with pytest.raises(UsageError, match="holds no kernels of a GPU"):
        critical_paths.compare([first, second])
