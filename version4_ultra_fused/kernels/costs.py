"""What each Triton kernel of a training step moves and computes at least, by formula: to hold against measured times.

Bytes: every number read once and written once, and nothing kept in a cache from kernel to kernel. Left out: tables, the norms'
weights and the parts of their gradients, and what there is one of for each row or head. FLOPs are given where products are the
work; in attention they are those of its S (S + 1) / 2 pairs of query and key.

The residual stream is float32. The products and the stream's gradient have a number format of their own. In 16 bits the backward
pass reads a copy of the stream in that format, which the norm writes.

The two kinds of `_matmul` have one name, so their costs are added up. Which kernels run depends on the GPU and the shape: those
that a profile holds show it.
"""

from collections.abc import Mapping
from typing import Any

from common.config import ModelConfig
from common.precision import products_dtype
from version3_triton.kernels import HAS_TRITON, missing
from version3_triton.kernels.costs import Cost
from version4_ultra_fused.kernels.attention import form

import torch
from torch import Tensor

if HAS_TRITON:
    from version4_ultra_fused.kernels.matmul import in_epilogue
    from version4_ultra_fused.kernels.tiles import largest


Kernel = tuple[str, str]  # its name in a profile, and the phase that it runs in


def training_step(
    config: ModelConfig, batch_size: int, length: int, size: int, launched: Mapping[Kernel, int]
) -> dict[Kernel, Cost]:
    """The cost of each kernel that can run; those that did not run have one too.

    Args:
        size: bytes of a number in the matrix products, 4 or 2.
        launched: how often each kernel of the profile was launched, in any number of steps.
    """
    tokens, layers = batch_size * length, config.num_layers
    hidden, ffn, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    packed = (heads + 2 * kv_heads) * head_dim
    pairs = layers * 2 * hidden * batch_size * length * (length + 1) // 2  # q k^T, or p v
    head = tokens * layers * head_dim * size  # one head of q, k, v, ..., or of a gradient
    column = tokens * layers * size  # one of F
    norm, copy = tokens * hidden, 2 if size == 2 else 0  # of a sum, kept for the backward pass
    matrices, others = layers * hidden * (packed + hidden + 3 * ffn), hidden * (vocabulary + 2 * layers + 1)
    early = ("_adamw", "backward") in launched  # the matrices, block by block, beside the backward pass
    updates, others = matrices * 28, others * (28 if size == 4 else 30)

    short = ("_short_attention_backward", "backward") in launched
    alone, within = (launched.get((name, "backward"), 0) for name in ("_rms_norm_backward", "_matmul_norm_backward"))
    # Columns of the products that hold a norm's gradient: the fewest, in each layer, by the share of such norms.
    fused = sorted([2 * ffn, packed] if short else [2 * ffn])[: round((2 + 1 / layers) * within / max(1, alone + within))]
    first = norm * (4 - size)  # the gradient of the embedding's result has float32
    inside = packed in fused

    def products(*which: tuple[Kernel, int, int]) -> Cost:
        """Those whose epilogue replaces a kernel: that kernel, columns of the product, and elements of a token that move."""
        taken = [each[1:] for each in which if each[0] not in launched]
        moved = sum(tokens * each + hidden * columns for columns, each in taken)
        return Cost("matmul", layers * size * moved, layers * sum(2 * tokens * hidden * columns for columns, _ in taken))

    return {
        ("_rms_norm_forward", "forward"): Cost("norm", norm * (4 + size + copy + 2 * layers * (8 + 2 * size + copy))),
        ("_rms_norm_backward", "backward"): Cost(
            "norm", norm * size * (3 + layers * (2 - len(fused)) * 4) + (0 if inside else first)
        ),
        ("_matmul_norm_backward", "backward"): Cost(
            "matmul",
            layers * size * sum(tokens * (3 * hidden + each) + hidden * each for each in fused) + (first if inside else 0),
            layers * 2 * tokens * hidden * sum(fused),
        ),
        ("_rms_norm_dweight", "backward"): Cost("norm", None),
        ("_matmul", "forward"): products(
            (("_rotate", "forward"), packed, hidden + packed), (("_swiglu", "forward"), 2 * ffn, hidden + 3 * ffn)
        ),
        ("_rotate", "forward"): Cost("rope", head * 2 * (heads + kv_heads)),
        ("_rotate", "backward"): Cost("rope", head * 2 * (heads + 2 * kv_heads)),
        ("_swiglu", "forward"): Cost("swiglu", column * 3 * ffn),
        ("_swiglu_backward", "backward"): Cost("swiglu", column * 5 * ffn),
        ("_quantize", "forward"): Cost("quantize", 4 * (tokens * layers * 3 * hidden + matrices)),
        ("_quantize", "backward"): Cost("quantize", 4 * tokens * layers * (2 * hidden + packed)),
        ("_swiglu_quantized", "forward"): Cost("swiglu", tokens * layers * 6 * ffn),
        ("_swiglu_quantized", "backward"): Cost("swiglu", tokens * layers * 10 * ffn),
        ("_flash_attention_forward", "forward"): Cost("attention", head * (2 * heads + 2 * kv_heads), 2 * pairs),
        ("_flash_attention_backward_queries", "backward"): Cost("attention", head * (4 * heads + 2 * kv_heads), 3 * pairs),
        ("_flash_attention_backward_keys", "backward"): Cost("attention", head * (2 * heads + 4 * kv_heads), 4 * pairs),
        ("_short_attention_backward", "backward"): Cost("attention", head * 4 * (heads + kv_heads), 5 * pairs),
        ("_cross_entropy", "forward"): Cost("loss", tokens * 2 * vocabulary * size),
        ("_cross_entropy_mean", "forward"): Cost("loss", None),
        ("_embedding_backward", "backward"): Cost("embed", norm * 4),
        ("_adamw", "backward"): Cost("adamw", updates),
        ("_adamw", "optimizer"): Cost("adamw", others + (0 if early else updates)),
    }


def kernel_flops(model: Any, input_ids: Tensor) -> dict[str, int]:
    """FLOPs that counters do not see: attention in our own kernels, and products with an epilogue.

    As counters do for other fused attention, all S x S pairs of query and key count, of which the kernels leave out half.
    """
    counted, dtype = {"forward": 0, "backward": 0}, products_dtype(model.one)
    if missing(input_ids.device) or dtype == torch.float64:
        return counted
    block: Any = model.layers[0]  # a Block of tiny_llama_v4.py, which imports this file
    qkv, ffn, layers = block.self_attn.qkv_proj, block.mlp.down_proj.in_features, len(model.layers)
    tokens, length, hidden = input_ids.numel(), input_ids.shape[1], model.embed_tokens.embedding_dim
    pairs = layers * 2 * tokens * length * hidden
    queries = torch.empty((), dtype=dtype, device=input_ids.device)
    queries = queries.expand(tokens // length, hidden // qkv.head_dim, length, qkv.head_dim)
    chosen = form(queries, bool(model.switches["exact-attention"]))
    if chosen != "library":
        counted = {"forward": 2 * pairs, "backward": (5 if chosen == "short" else 7) * pairs}
    for epilogue, columns in (("rope", qkv.out_features), ("swiglu", 2 * ffn)):
        factors = (torch.empty(rows, hidden, dtype=dtype, device="meta") for rows in (tokens, columns))
        if in_epilogue(epilogue, tokens, columns, *factors):
            counted["forward"] += layers * 2 * tokens * hidden * columns
    for columns in (2 * ffn, qkv.out_features) if chosen == "short" else (2 * ffn,):
        matrices = (torch.empty(tokens, width, dtype=dtype, device="meta") for width in (columns, hidden))
        if in_epilogue("norm", tokens, hidden, *matrices, most=largest("norm", columns)):
            counted["backward"] += layers * 2 * tokens * hidden * columns
    return counted
