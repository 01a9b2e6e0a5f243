"""A process of the benchmark: its steps, and its end as a status."""

import io
import os
import pickle
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

from common.config import ModelConfig
from common.files import read_json
from common.precision import Precision
from common.studies import accuracy, known_models
from common.studies.benchmark import benchmark_cells, benchmark_process
from common.training.step import Prepared
from tests import study_options
from tests.conftest import ROOT, altered_version

import pytest
import torch

KNOWN = known_models.find(ROOT)


def test_the_steps_of_a_process_and_the_loss_after_them(monkeypatch):
    losses = []

    def step(batch):
        losses.append(float(len(losses)))
        return torch.tensor(losses[-1])

    network = torch.nn.Linear(1, 1)
    network.switches = {"rmsnorm": False, "no-kernels": "no GPU"}
    prepared = Prepared(network, None, step)
    monkeypatch.setattr(benchmark_process, "built", lambda *_: (prepared, Precision(torch.device("cpu"), None)))
    errors = {"logits": 0.1, "gradient of a": 1.0, "gradient of b": 2.0}
    monkeypatch.setattr(accuracy, "errors_against_float64", lambda *_: errors)
    model = Namespace(load=lambda: None, flags=())
    settings = Namespace(device="cpu", model=ModelConfig(), batch_size=1, seq_len=4, seed=0, accuracy_steps=3, num_steps=5)
    found = benchmark_process.errors(model, model, settings)
    assert found["loss"] == 3 and (found["logits_error"], found["gradient"], found["gradient_error"]) == (0.1, "b", 2.0)
    losses.clear()
    timed = benchmark_process.speed(model, settings)
    assert timed["step_ms"]["count"] == 5 and timed["no_kernels"] == "no GPU"
    assert len(losses) == benchmark_process.WARMUP + 1 + 5


@pytest.mark.parametrize("name, deterministic", [("v1", True), ("hf", False)])
def test_only_versions_run_with_deterministic_algorithms(name, deterministic, config):
    if name == "hf":
        pytest.importorskip("transformers")
    models, shapes = benchmark_cells.plan(study_options.benchmark(config, models=[name]), KNOWN)
    benchmark_process.built(models[0], shapes[0])
    assert torch.are_deterministic_algorithms_enabled() == deterministic


def test_on_a_gpu_processes_import_before_the_first_of_a_group_works_and_end_without_a_job(monkeypatch):
    monkeypatch.setattr(benchmark_process, "ready", [])
    monkeypatch.setattr(benchmark_process, "AHEAD", ("this", "is_not_installed.at_all"))  # `this` prints a poem
    work = partial(benchmark_process.run, os.getpid, "cpu", 300)
    assert work()["status"] == "ok" and not benchmark_process.ready, "on a CPU none waits"
    monkeypatch.setattr(benchmark_process.devices, "is_gpu", lambda device: True)
    pids = [work()["found"]]
    waiting = [each.pid for each in benchmark_process.ready]
    assert len(waiting) == benchmark_process.READY - 1
    pids.append(work()["found"])
    assert pids[1] == waiting[0] != pids[0] and [each.pid for each in benchmark_process.ready] == waiting[1:]
    for unused in benchmark_process.ready:
        said, _ = unused.communicate(b"", 300)
        assert unused.returncode == 0 and said == b"", "they have said that they imported, and have nothing to do"


def test_a_waiting_process_that_ends_while_it_imports_is_a_job_that_failed(monkeypatch):
    monkeypatch.setattr(benchmark_process, "ready", [])
    monkeypatch.setattr(benchmark_process, "AHEAD", ("json.nothing",))  # json is there, the module is not
    monkeypatch.setattr(benchmark_process.devices, "is_gpu", lambda device: True)
    assert benchmark_process.run(os.getpid, "cpu", 300)["status"] == "failed"
    for other in benchmark_process.ready:
        other.communicate(b"", 300)


def failing(folder: Path, code: str) -> known_models.Model:
    """Version 1 whose training step runs this code first."""
    return known_models.Model("broken", altered_version(folder, code))


@pytest.mark.parametrize("code, status, reason", [
    ("raise torch.OutOfMemoryError('CUDA out of memory')", "out of memory", "OutOfMemoryError: CUDA out of memory"),
    ("raise ValueError('two\\n lines')", "failed", "ValueError: two lines"),
], ids=["memory", "error"])  # fmt: skip
def test_an_exception_in_a_process_is_a_status(code, status, reason, config, tmp_path, monkeypatch):
    _, shapes = benchmark_cells.plan(study_options.benchmark(config), KNOWN)
    work, result = partial(benchmark_process.speed, failing(tmp_path, code), shapes[0]), tmp_path / "result.json"
    monkeypatch.setattr(sys, "stdin", Namespace(buffer=io.BytesIO(pickle.dumps((work, "cpu", result)))))
    benchmark_process.main()
    outcome = read_json(result)
    assert (outcome["status"], outcome["reason"]) == (status, reason) and outcome["device"]["kind"] == "cpu"


def test_the_end_of_a_process_is_a_status_and_one_that_takes_too_long_is_ended(config, tmp_path):
    """That of one that the system kills: tests/common/studies/test_batch_size.py."""
    model = failing(tmp_path, "print('\\nlast words', flush=True); os._exit(3)")
    _, shapes = benchmark_cells.plan(study_options.benchmark(config), KNOWN)
    outcome = benchmark_process.run(partial(benchmark_process.speed, model, shapes[0]), "cpu", 900)
    assert outcome == {"status": "failed", "reason": "last words"}

    models, shapes = benchmark_cells.plan(study_options.benchmark(config, timeout=0.2), KNOWN)
    outcome = benchmark_process.run(partial(benchmark_process.speed, models[0], shapes[0]), "cpu", shapes[0].timeout)
    assert outcome == {"status": "timed out", "reason": "not done after 0.2 s"}
