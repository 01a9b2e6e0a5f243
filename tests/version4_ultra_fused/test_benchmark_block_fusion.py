"""The benchmark of the single kernel of a block: what it refuses, its table, and where the two paths break even."""

import copy

from common.config import ModelConfig
from tests.conftest import ROOT
from version4_ultra_fused import benchmark_block_fusion

import pytest

SCRIPT = ROOT / "version4_ultra_fused" / "benchmark_block_fusion.py"


def summary(median: float) -> dict[str, float | int]:
    return {"median": median, "p20": 0.9 * median, "p80": 1.1 * median, "count": 100}


MEASURED = {
    "schema": benchmark_block_fusion.SCHEMA,
    "device": {"kind": "cuda", "name": "a GPU", "memory_mib": 1.0, "multiprocessors": 128},
    "environment": {"torch": "2.11"},
    "model": ModelConfig().model_dump(),
    "precision": {"compute": "bf16", "tf32": False},
    "sequence_length": 128,
    "rows": [
        {"batch_size": size, "single_ms": summary(single), "layered_ms": summary(layered), "difference": 0.01}
        for size, single, layered in ((32, 0.1, 0.04), (64, 0.1, 0.08), (128, 0.1, 0.12), (192, 0.2, 0.16))
    ],
}


def test_without_a_gpu_it_ends_in_one_line(refused):
    assert "needs a GPU" in refused(SCRIPT)
    assert "needs a GPU" in refused(SCRIPT, "--device", "cpu", "--use-amp")


def test_batch_sizes_are_positive_numbers(refused):
    assert "'0' is not a positive whole number" in refused(SCRIPT, "--batch-sizes", "8,0")


def test_the_table_has_a_row_for_each_batch_size_and_the_ratio():
    lines = benchmark_block_fusion.report(MEASURED).splitlines()
    assert lines[0].startswith("One block forward, S 128, D 256") and "bf16, a GPU, torch 2.11" in lines[0]
    rows = [line.split() for line in lines[3:7]]
    assert [(row[0], row[-1]) for row in rows] == [("32", "0.4"), ("64", "0.8"), ("128", "1.2"), ("192", "0.8")]
    assert rows[2] == ["128", "1", "100", "90", "110", "120", "108", "132", "1.2"]  # times in us
    assert lines[-1] == "The single kernel is faster at B = 128. It breaks even near B = 96."


@pytest.mark.parametrize(
    "layered, ends",
    [(0.01, "The single kernel is never faster."), (1.0, "The single kernel is faster at B = 32, 64, 128, 192.")],
)
def test_without_a_crossing_there_is_no_break_even(layered, ends):
    measured = copy.deepcopy(MEASURED)
    for row in measured["rows"]:
        row["layered_ms"] = summary(layered)
    assert benchmark_block_fusion.break_even(measured["rows"]) is None
    assert benchmark_block_fusion.report(measured).endswith(ends)
