"""Memory that you choose. ../README.md has the problems.

Replace each line that names its problem, and run `pytest test_exercises.py` in the folder above.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from common.config import ModelConfig

import torch
from torch.utils.checkpoint import CheckpointPolicy

MULTIPROCESSORS = 132  # of an H100
aten = torch.ops.aten
KEPT = {
    aten.mm,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
}


def kept_bytes(model: ModelConfig, tokens: int, kind: str) -> int:
    """Bytes that a block of Version 2 keeps in bf16 for its backward pass.

    `kind` is none, block or selective.
    """
    raise NotImplementedError("kept_bytes: problem 1 of README.md")


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
    raise NotImplementedError("peak_bytes: problem 2 of README.md")


def holders(snapshot: Mapping[str, Any]) -> Counter[str]:
    """Bytes at the peak of a --memory-snapshot by place; `before`: those from before its step."""
    raise NotImplementedError("holders: problem 3 of README.md")


def policy(
    context: object, operator: object, *arguments: object, **named: object
) -> CheckpointPolicy:
    """Keeps the results of matrix products and of fused attention; all else is computed again."""
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
