"""Rotary position embedding as PyTorch operations, against a rotation of complex numbers."""

from common.rope import apply_rope, rope_tables
from tests.oracle import assert_close

import pytest
import torch
from torch import Tensor


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_rope_turns_complex_numbers(kv_heads: int) -> None:
    length, head_dim, theta = 33, 12, 10000.0
    q, k = torch.randn(2, 4, length, head_dim), torch.randn(2, kv_heads, length, head_dim)
    position = torch.arange(length, dtype=torch.float64)[:, None]
    frequency = theta ** (-2 * torch.arange(head_dim // 2, dtype=torch.float64) / head_dim)
    turn = torch.polar(torch.ones(length, head_dim // 2, dtype=torch.float64), position * frequency)

    def rotated(x: Tensor) -> Tensor:
        z = turn * torch.complex(*x.double().chunk(2, dim=-1))
        return torch.cat((z.real, z.imag), dim=-1).float()

    cos, sin = rope_tables(head_dim, 64, theta)  # longer than the sequence
    for ours, expected in zip(apply_rope(q, k, cos, sin), (rotated(q), rotated(k)), strict=True):
        assert_close(ours, expected)


def test_rope_makes_scores_depend_on_distance_alone() -> None:
    cos, sin = rope_tables(16, 64, 10000.0)
    q, k = (torch.randn(16).expand(1, 1, 64, 16) for _ in range(2))
    q, k = apply_rope(q, k, cos, sin)
    scores = (q @ k.transpose(-2, -1))[0, 0]  # [64, 64], equal along each diagonal
    # some may be small, of which rounding is a large share
    diagonals = [scores.diagonal(-distance) for distance in (0, 1, 17)]
    assert_close(
        torch.cat(diagonals),
        torch.cat([diagonal[:1].expand_as(diagonal) for diagonal in diagonals]),
    )
