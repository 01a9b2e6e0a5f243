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


@runs_kernels
def test_every_way_runs(monkeypatch):
    settings = SimpleNamespace(model=models.config(), training=SimpleNamespace(batch_size=2, sequence_length=8))
    monkeypatch.setattr(benchmark_levers.configs, "resolve", lambda *arguments, **settings_: settings)
    found = dict(benchmark_levers.levers("tiny", DEVICE, torch.float16))  # the interpreter has no right bfloat16
    assert {name: len(ways) for name, ways in found.items()} == {
        "rope": 2, "swiglu": 2, "attention": 3, "norm_backward": 2
    }  # fmt: skip
    for ways in found.values():
        for work in ways.values():
            work()


def test_without_a_gpu_it_is_refused(refused):
    assert "need a GPU" in refused(SCRIPT)
