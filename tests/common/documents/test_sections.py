"""Sections of reports in documents: tables of several files are joined, and what cannot be shown is said in one line."""

import json
from pathlib import Path

from common.documents.sections import section
from common.errors import UsageError
from tests import records
from tests.conftest import ROOT, cells

import pytest

SECONDS = {"median": 2.0, "p20": 1.0, "p80": 3.0, "count": 9}


def benchmark(path: Path, compute: str, **models: dict) -> None:
    """A benchmark of one shape: by model its run, or why there is none."""
    found = []
    for model, outcome in models.items():
        status = {"status": "failed", "reason": outcome} if isinstance(outcome, str) else {"status": "ok", "reason": None}
        runs = [] if isinstance(outcome, str) else [{"step_ms": SECONDS, "kind": "GPU allocator"} | outcome]
        found.append({"model": model, "batch_size": 8, "sequence_length": 128, "runs": runs} | status)
    path.write_text(json.dumps(records.benchmark(found, precision={"compute": compute})))


def test_tables_of_several_files_are_joined_and_columns_say_by_what_the_files_differ(tmp_path):
    """The order is that of the presets. A model that failed has no row. The conditions stand above the table."""
    benchmark(tmp_path / "peers_small_bf16.json", "bf16", v1={"peak_mib": 100.0}, liger="why")
    benchmark(tmp_path / "peers_tiny_bf16.json", "bf16", v1={"peak_mib": 100.0})
    text = section("step-time", tmp_path / "peers_*.json")
    assert text.startswith("A GPU; torch 2.13.0; bf16, D 256")
    header, *rows = cells(text)
    assert header[:6] == ["preset", "model", "B", "S", "ms/step", "p20 to p80"]
    assert [row[:6] for row in rows] == [[preset, "v1", "8", "128", "2", "1 to 3"] for preset in ("tiny", "small")]


def test_a_profiling_lab_has_sections_too():
    assert "2 threads; torch 2.13.0+cpu; fp32" in section("components", ROOT / "results/cpu/profiling_lab.json")


def test_what_cannot_be_shown_is_said(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(records.record()))
    benchmark(tmp_path / "benchmark.json", "fp32", v1={"peak_mib": 100.0})
    for anchor, name, message in (
        ("weak", "none*.json", "there is no"), ("weak", "run.json", "no renderer of schema tiny-llama-run/1"),
        ("weak", "benchmark.json", "has no section weak; there are throughput, step-time, memory"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            section(anchor, tmp_path / name)
