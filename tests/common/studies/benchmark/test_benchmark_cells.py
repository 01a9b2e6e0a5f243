"""The benchmark's cells: they are planned, measured in turn, and failures are results."""

import os
import shutil
import subprocess
import threading

from common import files
from common.errors import UsageError
from common.files import read_json
from common.records.study_files import Benchmark
from common.studies import external_baselines, known_models
from common.studies.benchmark import benchmark_cells, benchmark_process, benchmark_report
from tests import study_options
from tests.conftest import ROOT
from tests.records import record

import pytest
import torch

SCRIPT = ROOT / "version2_pytorch_fused" / "benchmark_suite.py"
KNOWN = known_models.find(ROOT)


@pytest.mark.parametrize("name, message", [
    ("v1-captured", "--capture-step needs a GPU"), ("captured", "captured needs an NVIDIA or AMD GPU"),
    ("v4-fp8", "v4-fp8: products in FP8 need a GPU"),
])  # fmt: skip
def test_what_needs_a_gpu_is_refused_without_one(name, message, config):
    with pytest.raises(UsageError, match=message):
        benchmark_cells.plan(study_options.benchmark(config, models=[name]), KNOWN)


def test_shapes_are_resolved_smallest_first(config):
    models, shapes = benchmark_cells.plan(study_options.benchmark(config, seq_lengths=[300, 8]), KNOWN)
    assert [model.name for model in models] == ["v1", "v2"]
    assert [(shape.batch_size, shape.seq_len) for shape in shapes] == [(2, 8), (4, 8), (2, 300), (4, 300)]
    assert shapes[0].model.hidden_size == 32 and shapes[-1].model.max_sequence_length == 300


RUN = {"step_ms": {"median": 2.0, "p20": 1.0, "p80": 3.0, "count": 2}, "peak_mib": 5.0, "kind": "GPU allocator"}


def measured_with(outcome, config, path, found=RUN, **changes) -> tuple[int, list, dict]:
    """What `measure` makes of processes that answer outcome(model, batch_size), by default "ok" and what was found."""
    calls = []

    def answer(work, device, timeout, gpu):
        model, shape = work.args[0], work.args[-1]
        calls.append((model.name, shape.batch_size if work.func is benchmark_process.speed else "accuracy"))
        machine = {key: record()[key] for key in ("device", "environment")}
        return machine | {"status": "ok", "reason": None, "found": found} | outcome(model.name, shape.batch_size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark_process, "run", answer)
        models, shapes = benchmark_cells.plan(study_options.benchmark(config, **changes), KNOWN)
        code = benchmark_cells.measure(models, shapes, KNOWN["v1"], path)
    return code, calls, read_json(path, files.schema_of(Benchmark))


def test_models_are_measured_in_turn(config, tmp_path):
    code, calls, measured = measured_with(lambda *_: {}, config, tmp_path / "b.json")
    assert code == 0 and calls == [("v1", 2), ("v2", 2), ("v1", 2), ("v2", 2), ("v1", 4), ("v2", 4), ("v1", 4), ("v2", 4)]
    assert measured["status"] == "completed" and measured["device"] == record()["device"]
    assert [len(cell["runs"]) for cell in measured["cells"]] == [2] * 4 and measured["accuracy"] == []


def test_several_gpus_share_the_processes(config, tmp_path, monkeypatch):
    """Each process has a GPU of its own, both GPUs are used, and a cell that failed keeps that."""
    both, used = threading.Barrier(2, timeout=300), []

    def answer(work, device, timeout, gpu):
        used.append(gpu)
        both.wait()  # passes only while a second process runs
        failed = work.args[0].name == "v2"
        return {"status": "failed", "reason": "why"} if failed else {"status": "ok", "reason": None, "found": RUN}

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(benchmark_process, "run", answer)
    models, shapes = benchmark_cells.plan(study_options.benchmark(config, gpus=2, repeats=1), KNOWN)
    assert benchmark_cells.measure(models, shapes, KNOWN["v1"], tmp_path / "b.json") == 1
    cells = read_json(tmp_path / "b.json", files.schema_of(Benchmark))["cells"]
    assert set(used) == {"3", "5"} and [(cell["status"], len(cell["runs"])) for cell in cells] == [("ok", 1), ("failed", 0)] * 2


def test_accuracy_is_taken_at_the_smallest_shape_alone(config, tmp_path):
    found = {"loss": 1.0, "gradient_error": 0.1}
    _, calls, measured = measured_with(lambda *_: {}, config, tmp_path / "b.json", found, metrics=["accuracy"])
    assert calls == [("v1", "accuracy"), ("v2", "accuracy")] and measured["cells"] == []
    assert {(entry["batch_size"], entry["sequence_length"]) for entry in measured["accuracy"]} == {(2, 8)}


@pytest.mark.parametrize("status, code", [("out of memory", 0), ("timed out", 1), ("failed", 1)])
def test_a_failed_cell_is_not_repeated_and_the_rest_goes_on(status, code, config, tmp_path):
    def outcome(model, batch_size):
        return {"status": status, "reason": "why"} if (model, batch_size) == ("v2", 2) else {}

    got, calls, measured = measured_with(outcome, config, tmp_path / "b.json")
    assert got == code and calls.count(("v2", 2)) == 1 and calls.count(("v2", 4)) == 2
    cell = measured["cells"][1]
    assert (cell["status"], cell["reason"]) == (status, "why")
    assert f"- v2, B 2, S 8: {status}: why" in benchmark_report.analyze(tmp_path / "b.json").markdown()


def test_a_package_may_have_another_name_than_its_module(monkeypatch):
    metadata = benchmark_cells.importlib.metadata
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"triton": ["pytorch-triton-rocm"]})
    monkeypatch.setattr(metadata, "version", {"pytorch-triton-rocm": "3.6.0"}.__getitem__)
    assert benchmark_cells._version("triton") == "3.6.0"


def test_a_whole_benchmark(execute, config, monkeypatch, tmp_path):
    """Its errors against float64 are computed in this process, which is quicker than a new one."""

    def run(work, device, *limits):
        if work.func is benchmark_process.speed:
            return in_a_process(work, device, *limits)
        return {"status": "ok", "reason": None, "found": work()}

    in_a_process = benchmark_process.run
    monkeypatch.setattr(benchmark_process, "run", run)
    names = ["v1", "hf" if external_baselines.importlib.util.find_spec("transformers") else "v2"]
    printed = execute(
        SCRIPT, "--models", ",".join(names), "--batch-sizes", "2", "--seq-lengths", "9", "--config", config, "--num-steps", "2",
        "--repeats", "1", "--accuracy-steps", "3", "--metrics", "throughput,memory,accuracy",
    )  # fmt: skip
    assert f"{2 * len(names):4d} of {2 * len(names)}" in printed.out
    assert "Peak resident memory of the whole process" in printed.out
    folder = tmp_path / "benchmark_suite"
    assert sorted(path.name for path in folder.iterdir()) == [
        f"benchmark.{kind}" for kind in ("csv", "html", "json", "md", "png")
    ]
    measured = files.read(folder / "benchmark.json", Benchmark)
    assert measured["device"]["kind"] == "cpu" and measured["models"] == names and measured["precision"] == {"compute": "fp32"}
    assert measured["packages"].keys() == ({"transformers"} if "hf" in names else set())
    for cell in measured["cells"]:
        assert cell["status"] == "ok" and cell["runs"][0]["step_ms"]["count"] == 2 and cell["runs"][0]["peak_mib"] > 50
    losses = [entry["loss"] for entry in measured["accuracy"]]
    assert len(losses) == len(names) and max(losses) - min(losses) < 1e-4
    for entry in measured["accuracy"]:
        assert entry["floor"] < entry["loss"] < 6 and 0 < entry["gradient_error"] < 1e-4 and 0 < entry["logits_error"] < 1e-5


@pytest.mark.parametrize("part", ["ablation", "benchmark", "captured", "peers"])
@pytest.mark.parametrize(("status", "code", "precisions", "end"), [
    (None, 0, ("bf16", "fp32"), ""), ("completed", 1, ("bf16", "fp32"), ""), ("interrupted", 130, ("fp32",), ".interrupted"),
    ("interrupted", 1, ("fp32",), ".interrupted"),
])  # fmt: skip
def test_what_a_study_that_failed_or_was_stopped_measured_is_kept(part, status, code, precisions, end, tmp_path):
    """A failed model makes the exit code 1, and the rest goes on; `python` is a stand-in."""
    for folder in ("bin", "results", "version2_pytorch_fused"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "results/keep.sh", tmp_path / "results")
    script = shutil.copy(ROOT / "results/measure_versions.sh", tmp_path / "results")
    python = tmp_path / "bin/python"
    write = f"""echo '{{"status": "{status}"}}' | tee "$2/benchmark.json" >"$2/fusion_ablation.json"; exit {code}"""
    python.write_text(f'#!/bin/sh\nwhile [ "$1" != --output-dir ]; do shift; done\n{write}\n')
    python.chmod(0o755)
    path = f"{python.parent}:{os.environ['PATH']}"
    done = subprocess.run(["bash", script, "name", part, "tiny:2"], env={**os.environ, "PATH": path})
    assert done.returncode == code
    written = [f"{part.replace('ablation', 'v2_ablation')}_tiny_{precision}.json{end}" for precision in precisions]
    assert sorted(path.name for path in (tmp_path / "results/name").iterdir()) == written
