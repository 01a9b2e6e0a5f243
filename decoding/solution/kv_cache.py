"""A solution of ../README.md: the KV cache, attention of one query, and the bytes of a token.

T is the length of the cache, of which the tokens so far fill the beginning. No shape depends on the
position, which stays on the device: so one graph holds every step.
"""

import math

from common.config import ModelConfig
from tracepage.cost import flops

import torch
from torch import Tensor


def append(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> None:
    """Writes keys and values of S tokens, [B, K, S, Dh], into the cache at their positions, [S].

    The cache has two tensors [B, K, T, Dh].
    """
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v)


def attend(q: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """One query, [B, H, 1, Dh], to the cached keys up to its own position, [1] -> [B, H, 1, Dh].

    Query head h reads key/value head h // (H / K).
    """
    batch, kv_heads, length, head_dim = keys.shape
    # The queries of a group are the rows of one product.
    grouped = q.reshape(batch, kv_heads, -1, head_dim)  # [B, K, H / K, Dh]
    scores = grouped @ keys.transpose(2, 3) / math.sqrt(head_dim)  # [B, K, H / K, T]
    future = torch.arange(length, device=q.device) > position  # [T]
    scores = scores.masked_fill(future, float("-inf"))
    return (scores.softmax(dim=-1) @ values).reshape(q.shape)


def token_bytes(config: ModelConfig, length: int, itemsize: int) -> tuple[int, int]:
    """Bytes that the next token reads once: of all weights, and of a cache of `length` tokens.

    A number has `itemsize` bytes.
    """
    weights = flops.parameters(config)["total"]
    cache = 2 * config.num_layers * config.num_key_value_heads * config.head_dim * length
    return weights * itemsize, cache * itemsize
