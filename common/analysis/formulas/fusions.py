"""Operators and bytes of each fusion in one layer of Version 1, before and after it, forward and backward.

Bytes count as in `footprint`, in float32. Those after a fusion are a lower bound: inputs read once, outputs written once.
"""

from collections.abc import Iterator
from typing import NamedTuple

from common.analysis.formulas import footprint
from common.analysis.formulas.footprint import FLOAT
from common.config import ModelConfig


class Change(NamedTuple):
    """One fusion in one pass over one layer: the numbers of operators and of float32 bytes, before and after it."""

    fusion: str
    phase: str
    operators: tuple[int, int]
    bytes: tuple[int, int]


def layer_changes(config: ModelConfig, batch_size: int, sequence_length: int) -> list[Change]:
    """The changes that the fusions make in one layer of Version 1, forward and backward, for B, K and S above 1.

    No fusion changes the output and down projections. With these two, the numbers before add up to the layer.
    """
    layers, hidden, ffn = config.num_layers, config.hidden_size, config.intermediate_size
    tokens, kv_size = batch_size * sequence_length, config.num_key_value_heads * config.head_dim
    n, m, f, table = tokens * hidden, tokens * kv_size, tokens * ffn, sequence_length * config.head_dim
    rows = tokens * config.num_attention_heads
    grouped = config.num_key_value_heads < config.num_attention_heads
    eager = footprint.totals(footprint.operations(config, batch_size, sequence_length), "group")
    core = sum(eager[group]["bytes"] for group in ("attention products", "copies", "scale, mask, softmax")) // layers
    one_core = FLOAT * (2 * n + 2 * m + rows)  # q, k and v in; output and log-sum-exp out
    # Backward: 4 products; derivatives of softmax, mask (a copy and a fill) and scale; copies of four gradients (out, q, k, v);
    # with K < H two sums over the query heads that share a head.
    back = FLOAT * (13 * rows * sequence_length + 12 * n + 4 * m + (2 * (n + m) if grouped else 0)) + sequence_length**2
    one_back = FLOAT * (4 * n + 4 * m + rows)  # q, k, v, output, its gradient, log-sum-exp in; three gradients out
    return [
        *_joined("Q, K, V: one product", tokens, hidden, (hidden, kv_size, kv_size)),
        Change("RoPE", "forward", (10, 1), (FLOAT * (10 * (n + m) + 4 * table), FLOAT * 2 * (n + m + table))),
        Change("RoPE", "backward", (10, 1), (FLOAT * (10 * (n + m) + 4 * table), FLOAT * 2 * (n + m + table))),
        Change("flash attention", "forward", (12, 1), (core, one_core)),
        Change("flash attention", "backward", (14 if grouped else 12, 1), (back, one_back)),
        *_joined("gate, up: one product", tokens, hidden, (ffn, ffn)),
        Change("SwiGLU", "forward", (2, 1), (FLOAT * 5 * f, FLOAT * 3 * f)),
        Change("SwiGLU", "backward", (3, 1), (FLOAT * 9 * f, FLOAT * 5 * f)),
        _twice("forward", 7, 10 * n + 6 * tokens + hidden, 4 * n + tokens + hidden),
        _twice("backward", 15, 26 * n + 10 * tokens + 2 * hidden, 4 * n + tokens + 2 * hidden),
    ]


def _twice(phase: str, operators: int, before: int, after: int) -> Change:
    return Change("residual + RMSNorm, twice", phase, (2 * operators, 2), (2 * FLOAT * before, 2 * FLOAT * after))


def _joined(fusion: str, tokens: int, inputs: int, outputs: tuple[int, ...]) -> Iterator[Change]:
    """Products of one input [tokens, inputs] with several weights [inputs, output], and one product with all of the weights.

    The backward pass has two products for each. It adds up the gradients of the input before the fusion, and joins those of the
    outputs after it.
    """
    parts, x, w, y = len(outputs), tokens * inputs, inputs * sum(outputs), tokens * sum(outputs)
    apart, one = parts * x + w + y, x + w + y
    yield Change(fusion, "forward", (parts, 1), (FLOAT * apart, FLOAT * one))
    before, after = 2 * apart + (parts - 1) * 3 * x, 2 * one + 2 * y
    yield Change(fusion, "backward", (3 * parts - 1, 3), (FLOAT * before, FLOAT * after))
