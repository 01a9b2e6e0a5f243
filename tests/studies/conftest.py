"""A small model for the tests of the studies."""

from pathlib import Path

import pytest

SMALL = """
model: {hidden_size: 32, num_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, intermediate_size: 48, vocab_size: 50}
training: {batch_size: 2, sequence_length: 9}
"""


@pytest.fixture
def config(tmp_path) -> Path:
    (tmp_path / "small.yaml").write_text(SMALL)
    return tmp_path / "small.yaml"
