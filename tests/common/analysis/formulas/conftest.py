"""Shapes of models and batches on which the formulas are checked against the code."""

from collections.abc import Callable

from common import config as configs
from common.config import ModelConfig
from version1_pytorch_baseline import tiny_llama_v1 as v1

import pytest
import torch
from torch import Tensor, nn

ODD = dict(vocab_size=53, hidden_size=36, num_layers=3, num_attention_heads=6, intermediate_size=44, max_sequence_length=64)
CONFIGS = {
    "MHA": ModelConfig(**ODD),
    "GQA": ModelConfig(**ODD, num_key_value_heads=2),
    "MQA": ModelConfig(**ODD, num_key_value_heads=1),
    "wide": ModelConfig(vocab_size=300, hidden_size=32, num_layers=1, num_attention_heads=2, intermediate_size=96),
}
PRESETS = {name: configs.resolve(name).model for name in ("tiny", "small", "large")}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def config(request) -> ModelConfig:
    return request.param


@pytest.fixture(params=(CONFIGS | PRESETS).values(), ids=(CONFIGS | PRESETS).keys())
def large_or_small_config(request) -> ModelConfig:
    """For tests that need no memory for the weights."""
    return request.param


@pytest.fixture(params=[(2, 7), (3, 17), (4, 33)], ids=str)
def shape(request) -> tuple[int, int]:
    """B and S."""
    return request.param


@pytest.fixture
def model_and_batch() -> Callable[..., tuple[nn.Module, Tensor, Tensor]]:
    """model_and_batch(config, shape, device): Version 1, token ids and targets."""

    def make(config: ModelConfig, shape: tuple[int, int], device: str = "cpu") -> tuple[nn.Module, Tensor, Tensor]:
        ids = [torch.randint(config.vocab_size, shape, device=device) for _ in range(2)]
        return v1.TinyLlama(config).to(device), *ids

    return make
