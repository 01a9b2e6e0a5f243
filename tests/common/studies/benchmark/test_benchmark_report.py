"""The benchmark's report: its files, what it names as missing or noisy, and its figure."""

import csv
from pathlib import Path

from common.errors import RunError
from common.files import write_json
from common.studies.benchmark import benchmark_report, benchmark_results
from tests import records

import pytest


def analyzed(measured: dict, folder: Path) -> tuple[str, str]:
    """What is printed, and the Markdown report; benchmark.* are in the folder."""
    write_json(folder / "benchmark.json", measured)
    printed = benchmark_report.analyze(folder / "benchmark.json").publish(folder, "benchmark")
    return printed, (folder / "benchmark.md").read_text()


def test_files_hold_every_cell_and_what_is_missing(tmp_path):
    for shown in analyzed(records.benchmark_of_shapes() | {"status": "interrupted"}, tmp_path):
        assert "2,000 (2.08x)" in shown and "out of memory: CUDA" in shown and "transformers 5.0" in shown
        assert "Peak of PyTorch's allocator" in shown and "At B 4, S 8 only" in shown and "+1.0e-03" in shown
        assert "Noisy" not in shown and "disagree" not in shown and "The run was interrupted" in shown
    with (tmp_path / "benchmark.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8 and rows[1]["model"] == "v2" and float(rows[1]["speedup"]) == pytest.approx((2.5 + 1 / 0.6) / 2)
    assert rows[-1]["status"] == "out of memory" and rows[-1]["ms"] == ""
    assert tuple(rows[0]) == benchmark_results.COLUMNS


def test_versions_without_their_kernels_noisy_cells_and_repeats_that_disagree_are_named(tmp_path):
    measured = records.benchmark_of_shapes(["v1", "v2", "hf"])
    measured["cells"][1]["runs"][0]["no_kernels"] = "they need a GPU"
    for run in measured["cells"][-1]["runs"]:
        run["step_ms"]["p80"] = 2 * run["step_ms"]["median"]
    for run, other in zip(measured["cells"][0]["runs"], measured["cells"][2]["runs"], strict=True):
        run["step_ms"]["median"], other["step_ms"]["median"] = other["step_ms"]["median"] + 1, run["step_ms"]["median"]
    measured["cells"][0]["runs"][1]["step_ms"]["median"] -= 2  # v1 is the slower one, then the faster one
    printed = " ".join(analyzed(measured, tmp_path)[0].split())
    assert "hf B 8 S 16 (110 %)." in printed
    assert "No Triton kernels in v2: they need a GPU. PyTorch's operations were measured in their place." in printed
    assert "The repeats disagree on which is faster: v1 or hf (B 4, S 8)." in printed


@pytest.mark.parametrize("metric, absent", [("memory", "accuracy"), ("throughput", "accuracy"), ("accuracy", "cells")])
def test_only_what_was_asked_for_is_shown(metric, absent, tmp_path):
    text, _ = analyzed(records.benchmark_of_shapes(metrics=[metric]) | {absent: []}, tmp_path)
    titles = {"memory": "## Peak MiB", "throughput": "## Tokens/s", "accuracy": "## Accuracy"}
    assert {name for name, title in titles.items() if title in text} == {metric}
    assert (tmp_path / "benchmark.png").exists() == (metric != "accuracy")  # which needs no plot


def test_nine_models_are_told_apart_and_one_batch_size_is_drawn_as_bars():
    measured = records.benchmark_of_shapes([f"m{i}" for i in range(9)])
    throughput, *_ = benchmark_report.figure(measured, "a title").axes
    assert len({(line.get_color(), line.get_marker()) for line in throughput.lines}) == 9

    shape = {"batch_sizes": [4], "sequence_lengths": [8]}
    throughput, memory = benchmark_report.figure(records.benchmark_of_shapes() | shape, "a title").axes
    assert [bar.get_height() for bar in throughput.patches] == pytest.approx([1000, 2000])
    assert [label.get_text() for label in memory.get_xticklabels()] == ["v1", "v2"] and not throughput.lines


def test_nothing_measured_is_an_error_that_says_why(tmp_path):
    measured = records.benchmark_of_shapes()
    for entry in measured["cells"] + measured["accuracy"]:
        entry |= {"status": "failed", "reason": "no compiler", "runs": []}
    write_json(tmp_path / "benchmark.json", measured | {"device": None, "environment": None})
    with pytest.raises(RunError, match="nothing was measured; the first: v1, failed: no compiler"):
        benchmark_report.analyze(tmp_path / "benchmark.json")
