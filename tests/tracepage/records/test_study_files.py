"""The files of the studies: all measured ones are valid, and one that lacks what its report needs
is named in one line.
"""

from common.training import flop_counters
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
        ({"models": ["v1", "renamed"]}, "cells: there is not one for each model and shape"),
        ({"environment": {"python": "3.11"}}, "environment.torch: Field required"),
    ],
)
def test_a_damaged_benchmark_is_named_with_its_field(tmp_path, change, message):
    path = tmp_path / "benchmark.json"
    write_json(path, records.benchmark_of_shapes() | change)
    with pytest.raises(UsageError, match=message) as error:
        study_files.read_benchmark(path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


def test_an_ablation_with_a_renamed_fusion_is_named_with_its_field(tmp_path):
    study = read_json(ROOT / "results/h100/v2_ablation_tiny_fp32.json")
    fusions = study["combinations"][1]["fusions"]
    fusions["flash"] = fusions.pop("flash_attention")
    write_json(tmp_path / "fusion_ablation.json", study)
    wrong = "fusion_ablation.json: combinations.1.fusions.flash_attention: Field required"
    with pytest.raises(UsageError, match=wrong):
        files.read(tmp_path / "fusion_ablation.json", study_files.Ablation)


@pytest.mark.parametrize("place", ["counts.0.step", "parts.causal", "run.data.sha256"])
def test_flop_counts_without_what_their_report_reads_are_refused(tmp_path, place):
    [path, _] = flop_counters.write(tmp_path, {}, records.record())
    content = read_json(path)
    *parents, last = (int(key) if key.isdigit() else key for key in place.split("."))
    section = content
    for key in parents:
        section = section[key]
    del section[last]
    write_json(path, content)
    with pytest.raises(UsageError, match=f"flops_profile.json: {place}: Field required"):
        files.read(path, study_files.FlopCounts)
