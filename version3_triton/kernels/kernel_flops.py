"""FLOPs of Version 3's kernels that counters do not see, for FLOP counts."""

from typing import Any

from version3_triton.kernels import KERNELS, REFERENCE

from torch import Tensor


def kernel_flops(model: Any, input_ids: Tensor) -> dict[str, int]:
    """FLOPs that counters do not see: two products in the forward kernel of attention, seven in its
    backward kernels.

    As counters do for other fused attention, all S x S pairs of query and key count, of which the
    kernels leave out half.
    """
    attention = model.operations.attention
    if attention is not KERNELS.attention or attention is REFERENCE.attention:
        return {"forward": 0, "backward": 0}
    pairs = input_ids.numel() * input_ids.shape[1]
    product = 2 * pairs * model.embed_tokens.embedding_dim * len(model.layers)
    return {"forward": 2 * product, "backward": 7 * product}
