"""FLOPs of Version 4's kernels that counters do not see, for FLOP counts."""

from typing import Any

from common.precision import products_dtype
from version3_triton.kernels import HAS_TRITON
from version4_ultra_fused.kernels import REFERENCE
from version4_ultra_fused.kernels.attention import form

import torch
from torch import Tensor

if HAS_TRITON:
    from version4_ultra_fused.kernels.matmul import in_epilogue


def kernel_flops(model: Any, input_ids: Tensor) -> dict[str, int]:
    """FLOPs that counters do not see: attention in our own kernels, and products with an epilogue.

    As counters do for other fused attention, all S x S pairs of query and key count, of which the
    kernels leave out half.
    """
    counted = {"forward": 0, "backward": 0}
    dtype = products_dtype(model.one)
    if model.operations is REFERENCE:
        return counted
    block: Any = model.layers[0]  # a Block of tiny_llama_v4.py, which imports this file
    qkv = block.self_attn.qkv_proj
    ffn = block.mlp.down_proj.in_features
    layers = len(model.layers)
    tokens = input_ids.numel()
    length = input_ids.shape[1]
    hidden = model.embed_tokens.embedding_dim
    pairs = layers * 2 * tokens * length * hidden
    queries = torch.empty((), dtype=dtype, device=input_ids.device)
    queries = queries.expand(tokens // length, hidden // qkv.head_dim, length, qkv.head_dim)
    chosen = form(queries, model.switches)
    if chosen != "library":
        counted = {"forward": 2 * pairs, "backward": (7 if chosen == "version3" else 5) * pairs}
    for epilogue, columns in (("rope", qkv.out_features), ("swiglu", 2 * ffn)):
        factors = (
            torch.empty(rows, hidden, dtype=dtype, device="meta") for rows in (tokens, columns)
        )
        if in_epilogue(epilogue, tokens, columns, *factors):
            counted["forward"] += layers * 2 * tokens * hidden * columns
    for columns in (2 * ffn, qkv.out_features) if chosen == "short" else (2 * ffn,):
        matrices = (
            torch.empty(tokens, width, dtype=dtype, device="meta") for width in (columns, hidden)
        )
        if in_epilogue("norm", tokens, hidden, *matrices, depth=columns):
            counted["backward"] += layers * 2 * tokens * hidden * columns
    return counted
