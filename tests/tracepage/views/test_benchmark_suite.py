"""The benchmark's report: its numbers, its files, and what it names as missing or noisy."""

import csv
from pathlib import Path

from tests import records
from tracepage.errors import RunError
from tracepage.files import write_json
from tracepage.views import benchmark_suite

import pytest


def analyzed(measured: dict, folder: Path) -> tuple[str, str]:
    """What is printed, and the Markdown report; benchmark.* are in the folder."""
    write_json(folder / "benchmark.json", measured)
    printed = benchmark_suite.render_benchmark(folder / "benchmark.json").publish(
        folder, "benchmark"
    )
    return printed, (folder / "benchmark.md").read_text()


def test_files_hold_every_cell_and_what_is_missing(tmp_path):
    for shown in analyzed(records.benchmark_of_shapes() | {"status": "interrupted"}, tmp_path):
        assert "out of memory: CUDA" in shown and "transformers 5.0" in shown
        assert "GPU allocator" in shown and "At B 4, S 8 only" in shown
        assert "Noisy" not in shown and "The run was interrupted" in shown
    with (tmp_path / "benchmark.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8 and rows[1]["model"] == "v2" and float(rows[1]["speedup"]) == 2
    assert rows[-1]["status"] == "out of memory" and rows[-1]["ms"] == ""
    assert tuple(rows[0]) == benchmark_suite.COLUMNS


def test_versions_without_their_kernels_and_noisy_cells_are_named(tmp_path):
    measured = records.benchmark_of_shapes(["v1", "v2", "hf"])
    measured["cells"][1]["runs"][0]["no_kernels"] = "they need a GPU"
    for run in measured["cells"][-1]["runs"]:
        run["step_ms"]["p80"] = 2 * run["step_ms"]["median"]
    printed = " ".join(analyzed(measured, tmp_path)[0].split())
    assert "hf B 8 S 16 (110 %)." in printed
    assert (
        "No Triton kernels in v2: they need a GPU. PyTorch's operations were measured in their place."
        in printed
    )


@pytest.mark.parametrize("metric, absent", [("memory", "accuracy"), ("accuracy", "cells")])
def test_only_what_was_asked_for_is_shown(metric, absent, tmp_path):
    text, _ = analyzed(records.benchmark_of_shapes(metrics=[metric]) | {absent: []}, tmp_path)
    titles = {"memory": "## Peak memory", "throughput": "## Throughput", "accuracy": "## Accuracy"}
    assert {name for name, title in titles.items() if title in text} == {metric}


def test_ratios_are_against_the_first_model(tmp_path):
    found = benchmark_suite.results(records.benchmark_of_shapes(("v2", "hf")))
    rows = benchmark_suite.table_rows(found, "tokens_per_second", "speedup")
    assert [row[-2:] for row in rows[:2]] == [[2000, 1], [1000, 0.5]]
    assert rows[-1][:3] == ["hf", 8, 16] and rows[-1][-2:] == [1000, None], (
        "the first ran out of memory there"
    )
    shown = (
        analyzed(records.benchmark_of_shapes(), tmp_path)[1]
        .replace("|", " ")
        .split("## Peak memory")[1]
    )
    assert "v2 4 8 600 1.33" in " ".join(shown.split())


def test_a_cell_has_the_median_of_its_processes():
    measured = records.benchmark_of_shapes()
    cell = measured["cells"][0]
    times = (2.0, 1.0, 9.0)
    step = cell["runs"][0]["step_ms"]
    cell["runs"] = [cell["runs"][0] | {"step_ms": step | {"median": ms}} for ms in times]
    row, *_ = benchmark_suite.table_rows(
        benchmark_suite.results(measured), "ms", "tokens_per_second", "repeats"
    )
    assert row == ["v1", 4, 8, 2, 4 * 8 / 2e-3, 3]


def test_energy_and_every_process_are_shown(tmp_path):
    measured = records.benchmark_of_shapes(metrics=["throughput", "energy"])
    for cell in measured["cells"]:
        for run in cell["runs"]:
            run["joules"] = 0.5
    text, _ = analyzed(measured, tmp_path)
    assert " 12.8, 19.2 2,000 2 " in " ".join(text.replace("|", " ").split())
    found = benchmark_suite.results(measured)
    assert benchmark_suite.table_rows(found, "ms", "joules", "mj_per_token")[1] == [
        "v2",
        4,
        8,
        16,
        0.5,
        1e3 * 0.5 / 32,
    ]


def test_the_conditions_of_a_sustained_benchmark_are_shown(tmp_path):
    """Two processes on a host that needs 4 and 6 us for a launch; one could not read its GPU."""
    measured = records.benchmark_of_shapes() | {"load_seconds": 10.0, "timed_seconds": 12.0}
    for cell in measured["cells"]:
        for run, launch in zip(cell["runs"], (4.0, 6.0), strict=False):
            state = {"clock_mhz": 1500 if launch == 4 else None, "watts": 690.0, "celsius": 61}
            run |= state | {"host_us": {"launch": launch, "mm": 8.0}}
    _, text = analyzed(measured, tmp_path)
    assert "timed steps in each: at least 10 and 12 s, after 10 s of load." in text
    assert "Host, median of all runs: 5 us a launch, 8 us an mm." in text
    table = " ".join(text.replace("|", " ").split("## GPU during")[1].split())
    assert "MHz W C" in table and "v1 4 8 1,500 690 61" in table
    _, text = analyzed(records.benchmark_of_shapes(), tmp_path)
    assert "GPU during" not in text and "Host, median" not in text


def test_nothing_measured_is_an_error_that_says_why(tmp_path):
    measured = records.benchmark_of_shapes()
    for entry in measured["cells"] + measured["accuracy"]:
        entry |= {"status": "failed", "reason": "no compiler", "runs": []}
    write_json(tmp_path / "benchmark.json", measured | {"device": None, "environment": None})
    with pytest.raises(
        RunError, match="nothing was measured; the first: v1, B 4, S 8, failed: no compiler"
    ):
        benchmark_suite.render_benchmark(tmp_path / "benchmark.json")
