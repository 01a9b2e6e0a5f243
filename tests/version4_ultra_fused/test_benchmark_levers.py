"""The levers' benchmark: every way to do the work runs; its times need a GPU."""

from types import SimpleNamespace

from tests import models
from tests.conftest import ROOT, runs_kernels
from tests.oracle import DEVICE

import pytest
import torch

pytest.importorskip("triton")
from version4_ultra_fused import benchmark_levers

SCRIPT = ROOT / "version4_ultra_fused/benchmark_levers.py"


@pytest.fixture
def small(monkeypatch) -> None:
    """Every preset has a small model."""
    training = SimpleNamespace(batch_size=2, sequence_length=8, learning_rate=1e-3)
    settings = SimpleNamespace(model=models.config(), training=training)
    monkeypatch.setattr(benchmark_levers.configs, "resolve", lambda *arguments, **settings_: settings)


@runs_kernels
def test_every_way_runs(small):
    found = dict(benchmark_levers.levers("tiny", DEVICE, torch.float16))  # the interpreter has no right bfloat16
    assert {name: len(ways) for name, ways in found.items()} == {
        "rope": 2, "swiglu": 2, "norm after q, k and v": 2, "norm after gate and up": 2, "attention": 3, "norm_backward": 2
    }  # fmt: skip
    for ways in found.values():
        for work in ways.values():
            work()


def test_a_whole_step_is_timed_as_it_is_and_without_each_lever(small, no_kernels):
    found = dict(benchmark_levers.steps("tiny", torch.device("cpu"), 0))
    assert len(found) == 8 and all(us["count"] == 50 and 10 < us["p20"] <= us["median"] for us in found.values())


def test_without_a_gpu_it_is_refused(refused):
    assert "need a GPU" in refused(SCRIPT)
