"""The operations of Version 4 without autograd, as plain functions: a Triton kernel each, or the
same in PyTorch.

A block's backward pass is written by hand (`tiny_llama_v4.py`), so each operation and its gradient
are functions of their own. `reference.py` holds PyTorch's form of each, for float64 and where no
kernel can run. The exception is `CausalAttention`: for Version 3's and PyTorch's attention it asks
autograd for the gradient.
"""

from collections.abc import Callable

from common.spans import span
from version3_triton.kernels import LOADED, operation
from version4_ultra_fused.kernels import reference

KERNELS: dict[str, Callable] = {}
if LOADED:
    from version4_ultra_fused.kernels import adamw as _adamw
    from version4_ultra_fused.kernels import cross_entropy as _loss
    from version4_ultra_fused.kernels import (
        elementwise,
        embedding,
        matmul,
        matmul_norm_backward,
        norm,
    )
    from version4_ultra_fused.kernels.fp8 import casts

    KERNELS = {
        "add_norm": norm.add_norm,
        "add_norm_backward": norm.add_norm_backward,
        "sum_parts": norm.sum_parts,
        "qkv_rope": matmul.qkv_rope,
        "rotate_back": elementwise.rotate_back,
        "gate_up_swiglu": matmul.gate_up_swiglu,
        "swiglu_backward": elementwise.swiglu_backward,
        "cross_entropy": _loss.cross_entropy,
        "product_norm_backward": matmul_norm_backward.product_norm_backward,
        "add_embedding_gradient": embedding.add_embedding_gradient,
        "adamw": _adamw.adamw,
        "rotate": elementwise.rotate,
        "quantize": casts.quantize,
        "swiglu_quantized": casts.swiglu_quantized,
        "swiglu_backward_quantized": casts.swiglu_backward_quantized,
    }


add_norm = operation(reference.add_norm, KERNELS)
add_norm_backward = operation(reference.add_norm_backward, KERNELS)
product_norm_backward = operation(reference.product_norm_backward, KERNELS)
sum_parts = operation(reference.sum_parts, KERNELS)
qkv_rope = span("qkv_projection")(operation(reference.qkv_rope, KERNELS))
rotate_back = operation(reference.rotate_back, KERNELS)
gate_up_swiglu = span("gate_up")(operation(reference.gate_up_swiglu, KERNELS))
swiglu_backward = operation(reference.swiglu_backward, KERNELS)
cross_entropy = operation(reference.cross_entropy, KERNELS)
add_embedding_gradient = operation(reference.add_embedding_gradient, KERNELS)
adamw = operation(reference.adamw, KERNELS)
rotate = operation(reference.rotate, KERNELS)  # this and the following for products in FP8
quantize = operation(reference.quantize, KERNELS)
swiglu_quantized = operation(reference.swiglu_quantized, KERNELS)
swiglu_backward_quantized = operation(reference.swiglu_backward_quantized, KERNELS)
