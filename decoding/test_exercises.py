"""Tests for the problems: of starter/, or with KERNEL_EXERCISES=solution of solution/."""

from pathlib import Path

import exercise_tools as exercises
from common.attention import attention
from common.config import PRESETS, ModelConfig

import pytest
import torch

cache = exercises.load(Path(__file__).parent, "kv_cache")
SHAPES = [(4, 4), (8, 2), (3, 1)]  # H and K


def prompt(heads: int, kv_heads: int) -> tuple[torch.Tensor, ...]:
    """q, k, v of five tokens of two texts in float64, and caches of eight positions that hold older
    texts.
    """
    torch.manual_seed(0)
    query = (2, heads, 5, 16)
    new = (2, kv_heads, 5, 16)
    cached = (2, kv_heads, 8, 16)
    shapes = (query, new, new, cached, cached)
    return tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)


def test_problem1_append():
    _, k, v, keys, values = prompt(4, 2)
    before = keys.clone(), values.clone()
    assert cache.append(keys, values, k, v, torch.arange(2, 7)) is None
    for held, new, old in ((keys, k, before[0]), (values, v, before[1])):
        torch.testing.assert_close(
            held, torch.cat((old[:, :, :2], new, old[:, :, 7:]), dim=2), rtol=0, atol=0
        )


@pytest.mark.parametrize("heads, kv_heads", SHAPES)
def test_problem1_attend(heads, kv_heads):
    """Token by token it is causal attention of the prompt, whatever else stands in the cache."""
    q, k, v, keys, values = prompt(heads, kv_heads)
    expected = attention(q, k, v)
    for i in range(5):
        position = torch.tensor([i])
        cache.append(keys, values, k[:, :, i : i + 1], v[:, :, i : i + 1], position)
        torch.testing.assert_close(
            cache.attend(q[:, :, i : i + 1], keys, values, position), expected[:, :, i : i + 1]
        )


def test_problem1_reads_no_position():
    """On the device `meta` no number exists, so code that reads one fails, as in a capture."""
    q = torch.empty(3, 8, 1, 16, device="meta")
    keys = torch.empty(3, 2, 8, 16, device="meta")
    position = torch.empty(1, dtype=torch.long, device="meta")
    assert cache.append(keys, keys, q[:, :2], q[:, :2], position) is None
    assert cache.attend(q, keys, keys, position).shape == q.shape


def test_problem2_bytes():
    """Prediction 1; the embedding is also the head."""
    for itemsize in (2, 4):
        expected = 1_034_512_384 * itemsize, 576 * 11_264 * itemsize
        assert (
            cache.token_bytes(ModelConfig(**PRESETS["large"]["model"]), 576, itemsize) == expected
        )
