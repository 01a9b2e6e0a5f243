"""The files of the studies: all measured ones are valid, and one that lacks what its report needs
is named in one line.
"""

from tests import records
from tests.conftest import ROOT
from tracepage import files
from tracepage.errors import UsageError
from tracepage.files import read_json, write_json
from tracepage.records import study_files

import pytest

READERS = {
    files.schema_of(model): lambda path, model=model: files.read(path, model)
    for model in (study_files.Ablation, study_files.FlopCounts, study_files.KernelBenchmark)
} | {files.schema_of(study_files.Benchmark): study_files.read_benchmark}
MEASURED = [
    path
    for path in sorted((ROOT / "results").rglob("*.json"))
    if read_json(path).get("schema") in READERS
]


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: str(path.relative_to(ROOT / "results")))
def test_every_measured_study_is_valid(path):
    content = read_json(path)
    assert READERS[content["schema"]](path) == content, "nothing is changed or left out"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"device": None}, "cells.0: nothing was measured, but the status is ok"),
        ({"models": []}, "models: List should have at least 1 item"),
        ({"precision": {"compute": "int4"}}, "precision.compute: "),
        ({"cells": [{"status": "ok"}]}, "cells.0.reason: Field required"),
    ],
)
def test_a_damaged_benchmark_is_named_with_its_field(tmp_path, change, message):
    path = tmp_path / "benchmark.json"
    write_json(path, records.benchmark_of_shapes() | change)
    with pytest.raises(UsageError, match=message) as error:
        study_files.read_benchmark(path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)
