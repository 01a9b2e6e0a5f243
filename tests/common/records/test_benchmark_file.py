"""The benchmark's file: what its schema takes and refuses."""

from pathlib import Path

from common.errors import UsageError
from common.files import write_json
from common.records import benchmark_file
from tests import records

import pytest


def reread(measured: dict, folder: Path) -> benchmark_file.Benchmark:
    write_json(folder / "benchmark.json", measured)
    return benchmark_file.read(folder / "benchmark.json")


def test_runs_of_a_gpu_may_hold_what_the_pools_held(tmp_path):
    measured = records.benchmark_of_shapes()
    for cell in measured["cells"]:
        cell["runs"] = [run | {"reserved_mib": 2000.0} for run in cell["runs"]]
    assert reread(measured, tmp_path) == measured
    measured["cells"][0]["runs"][0]["reserved_mib"] = "2000"
    with pytest.raises(UsageError, match="benchmark.json: cells.0.runs.0.reserved_mib: "):
        reread(measured, tmp_path)
