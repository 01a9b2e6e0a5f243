"""Shapes of models and batches on which the formulas are checked against the code."""

from common.config import ModelConfig

import pytest

ODD = dict(
    vocab_size=53,
    hidden_size=36,
    num_layers=3,
    num_attention_heads=6,
    intermediate_size=44,
    max_sequence_length=64,
)
CONFIGS = {
    "MHA": ModelConfig(**ODD),
    "GQA": ModelConfig(**ODD, num_key_value_heads=2),
    "MQA": ModelConfig(**ODD, num_key_value_heads=1),
    "wide": ModelConfig(
        vocab_size=300, hidden_size=32, num_layers=1, num_attention_heads=2, intermediate_size=96
    ),
}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def config(request) -> ModelConfig:
    return request.param


@pytest.fixture(params=[(2, 7), (3, 17), (4, 33)], ids=str)
def shape(request) -> tuple[int, int]:
    """B and S."""
    return request.param
