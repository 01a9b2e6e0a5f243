"""What each Triton kernel of a training step moves and computes at least, by formula: to hold against measured times.

Bytes: every number read once and written once, nothing read twice and nothing kept in a cache from kernel to kernel. Left out:
tables, the norms' weights and the parts of their gradients, and what there is one of for each row or head. FLOPs are given where
products are the work, in attention: those of its S (S + 1) / 2 pairs of query and key. The sum of a norm's parts has no formula:
how many there are depends on the GPU. Under autocast the residual stream stays float32 and the rest is in 16 bits. In float32
both gradients of `add_rms_norm` are one tensor, and the last norm's sum goes nowhere.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

from common.config import ModelConfig
from version3_triton.kernels import missing

from torch import Tensor


class Cost(NamedTuple):
    """All launches of a kernel in one training step; `bytes` is None where no formula says, `flops` where they don't matter."""

    operation: str
    bytes: int | None
    flops: int | None = None


def training_step(
    config: ModelConfig, batch_size: int, length: int, size: int, launched: Collection[tuple[str, str]] = ()
) -> dict[tuple[str, str], Cost]:
    """The cost of each kernel, by its name in a profile and the phase that it runs in.

    A profile shows a kernel by the name of its function, which begins with its file's; RoPE's one kernel turns both ways.

    Args:
        size: bytes of a number in the matrix products, 4 or 2.
        launched: the kernels of the profile, on which no cost depends here.
    """
    tokens, layers = batch_size * length, config.num_layers
    hidden, ffn, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    product = layers * 2 * hidden * batch_size * length * (length + 1) // 2  # q k^T, or p v
    norm = tokens * hidden
    head = tokens * layers * head_dim * size  # one head of q, k, v, ..., or of a gradient
    column = tokens * layers * size  # one of F
    return {
        ("_rms_norm_forward", "forward"): Cost("norm", norm * (4 + size + 2 * layers * (8 + 2 * size))),
        ("_rms_norm_backward", "backward"): Cost(
            "norm", norm * (8 + size + 2 * layers * (16 if size == 4 else 12 + 2 * size) - 4)
        ),
        ("_rms_norm_dweight", "backward"): Cost("norm", None),
        ("_rope_forward", "forward"): Cost("rope", head * 2 * (heads + kv_heads)),
        ("_rope_forward", "backward"): Cost("rope", head * 2 * (heads + kv_heads)),
        ("_flash_attention_forward", "forward"): Cost("attention", head * (2 * heads + 2 * kv_heads), 2 * product),
        ("_flash_attention_backward_queries", "backward"): Cost("attention", head * (4 * heads + 2 * kv_heads), 3 * product),
        ("_flash_attention_backward_keys", "backward"): Cost("attention", head * (2 * heads + 4 * kv_heads), 4 * product),
        ("_swiglu_forward", "forward"): Cost("swiglu", column * 3 * ffn),
        ("_swiglu_backward", "backward"): Cost("swiglu", column * 5 * ffn),
        ("_linear_cross_entropy_loss_and_gradient", "forward"): Cost("loss", tokens * 2 * vocabulary * size),
    }


def kernel_flops(model: Any, input_ids: Tensor) -> dict[str, int]:
    """FLOPs that counters do not see: two products in the forward kernel of attention, seven in its backward kernels.

    As counters do for other fused attention, all S x S pairs of query and key count, of which the kernels leave out half.
    """
    if not model.switches["triton-attention"] or missing(input_ids.device):
        return {"forward": 0, "backward": 0}
    product = 2 * input_ids.numel() * input_ids.shape[1] * model.embed_tokens.embedding_dim * len(model.layers)
    return {"forward": 2 * product, "backward": 7 * product}
