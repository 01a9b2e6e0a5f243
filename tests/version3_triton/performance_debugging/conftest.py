"""The stages of the performance-debugging exercise in this process: PyTorch's operations on a CPU,
or the kernels on a GPU.
"""

import importlib
from collections.abc import Callable

import stages
from common import data
from tests.conftest import ROOT, TINY, markov
from tracepage.files import read_json

import pytest
import torch

FOLDER = ROOT / "version3_triton/exercises/performance_debugging"
SMALL = (
    *TINY,
    "--num-kv-heads",
    "2",
    "--data",
    "synthetic",
    "--warmup-steps",
    "1",
    "--num-steps",
    "3",
    "--device",
    "cpu",
)
NAMES = {path.stem.split("_")[1]: path.stem for path in sorted(FOLDER.glob("v3_stage*.py"))}


def stage_of(name: str) -> stages.Stage:
    return importlib.import_module(NAMES.get(name, name)).STAGE


@pytest.fixture
def train(tmp_path, monkeypatch) -> Callable[..., dict]:
    """train("stage1", *flags): the record of a run on the CPU, or with gpu=True on the GPU, in a
    folder of its own.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "markov", markov)

    def train(name: str, *flags: str, gpu: bool = False) -> dict:
        with monkeypatch.context() as patch:
            if not gpu:
                patch.setattr(stages.kernels, "INTERPRETED", False)
            stage = stage_of(name)
            assert (
                stage.train(
                    stage.options(
                        [*(() if gpu else SMALL), "--metrics-out", "metrics.json", *flags]
                    )
                )
                == 0
            )
        return read_json(tmp_path / "metrics.json")

    return train


@pytest.fixture
def small_model(no_kernels) -> Callable[..., torch.nn.Module]:
    """small_model("stage2", *flags): that stage's model on the CPU."""

    def build(name: str, *flags: str) -> torch.nn.Module:
        stage = stage_of(name)
        torch.manual_seed(0)
        return stage.make_model(stage.options([*SMALL, *flags]))

    return build
