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
