"""The benchmark's file: what its schema takes and refuses."""

from common.errors import UsageError
from common.files import write_json
from common.records import benchmark_file
from tests import records

import pytest


def test_runs_of_a_gpu_may_hold_what_the_pools_held(tmp_path):
    measured = records.benchmark_of_shapes()
    for cell in measured["cells"]:
        cell["runs"] = [run | {"reserved_mib": 2000.0} for run in cell["runs"]]
    write_json(tmp_path / "benchmark.json", measured)
    assert benchmark_file.read(tmp_path / "benchmark.json") == measured
    measured["cells"][0]["runs"][0]["reserved_mib"] = "2000"
    write_json(tmp_path / "benchmark.json", measured)
    with pytest.raises(UsageError, match="benchmark.json: cells.0.runs.0.reserved_mib: "):
        benchmark_file.read(tmp_path / "benchmark.json")


@pytest.mark.parametrize("key, kept, message", [
    ("cells", slice(1, None), "cells: there is none of v1, 4, 8"), ("device", None, "device and environment: they are null"),
])  # fmt: skip
def test_a_cell_for_each_shape_and_a_device_are_needed(tmp_path, key, kept, message):
    measured = records.benchmark_of_shapes()
    write_json(tmp_path / "benchmark.json", measured | {key: kept and measured[key][kept]})
    with pytest.raises(UsageError, match=message):
        benchmark_file.read(tmp_path / "benchmark.json")
