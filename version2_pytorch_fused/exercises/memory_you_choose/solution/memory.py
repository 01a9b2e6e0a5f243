"""Memory that you choose: one way to do it. ../README.md has the problems."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from common.config import ModelConfig
from tracepage.cost import flops

import torch
from torch.utils.checkpoint import CheckpointPolicy

MULTIPROCESSORS = 132  # of an H100
aten = torch.ops.aten
KEPT = {
    aten.mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def kept_bytes(model: ModelConfig, tokens: int, kind: str) -> int:
    """Bytes that a block of Version 2 keeps in bf16 for its backward pass.

    `kind` is none, block or selective.
    """
    hidden = model.hidden_size
    ffn = model.intermediate_size
    heads = model.num_attention_heads
    kv = model.num_key_value_heads * model.head_dim
    if kind == "block":
        return tokens * 4 * hidden  # the residual stream
    qkv = 2 * (hidden + 2 * kv)
    gate_up = 4 * ffn
    attended = 2 * hidden + 4 * heads
    if kind == "selective":
        return tokens * (4 * hidden + qkv + attended + 2 * hidden + gate_up + 2 * hidden)
    norms = 2 * (4 * hidden + 4 * hidden + 4)  # x, x / rms, 1 / rms
    inputs = 2 * 2 * hidden
    rotated = 2 * (hidden + kv)
    activated = 2 * 2 * ffn  # silu(gate), silu(gate) * up
    return tokens * (norms + inputs + qkv + rotated + attended + gate_up + activated)


def block_work_bytes(model: ModelConfig, batch: int, length: int, kind: str) -> int:
    """Bytes that the backward pass of one block works in, the larger of two moments; those that
    `none` keeps are among them.

    With --deterministic attention sums the gradient of q in several float32 copies, for the same
    bits in each run.
    """
    tokens = batch * length
    hidden = model.hidden_size
    kv = model.num_key_value_heads * model.head_dim
    copies = math.ceil(MULTIPROCESSORS / (batch * model.num_attention_heads))
    swiglu = kept_bytes(model, tokens, "none") + 4 * tokens * (model.intermediate_size + hidden)
    attention = tokens * (28 * hidden + 6 * kv + 4 * hidden * copies)
    results = 4 * tokens * hidden if kind == "selective" else 0  # of o_proj and down_proj
    return max(swiglu, attention) + results


def peak_bytes(model: ModelConfig, batch: int, length: int, kind: str) -> int:
    """Bytes at the peak of a training step in bf16 by autocast, the largest of its four moments."""
    weights = flops.parameters(model)["total"]
    tokens = batch * length
    kept = kept_bytes(model, tokens, kind)
    work = block_work_bytes(model, batch, length, kind)
    casts = 2 * weights if kind == "none" else 0
    last_norm = casts + model.num_layers * kept + 28 * tokens * model.hidden_size
    last_block = casts + (model.num_layers - 1) * kept + work
    return 12 * weights + max(last_norm, last_block, 4 * weights + work, 8 * weights)


def holders(snapshot: Mapping[str, Any]) -> Counter[str]:
    """Bytes at the peak of a --memory-snapshot by place; `before`: those from before its step."""
    alive = {}
    now = 0
    most = -1
    peak = {}
    for block, size, place in snapshot["events"]:
        now += size
        if size > 0:
            alive[block] = size, place
        else:
            del alive[block]
        if now > most:
            most = now
            peak = dict(alive)
    held = Counter({"before": snapshot["before_bytes"]})
    for size, place in peak.values():
        held[snapshot["places"][place]] += size
    return held


def policy(
    context: object, operator: object, *arguments: object, **named: object
) -> CheckpointPolicy:
    """Keeps the results of matrix products and of fused attention; all else is computed again."""
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
