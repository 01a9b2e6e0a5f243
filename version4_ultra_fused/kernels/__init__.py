"""The operations of Version 4 without autograd, as plain functions: a Triton kernel each, or the same in PyTorch.

A block's backward pass is written by hand (`tiny_llama_v4.py`), so each operation and its gradient are functions of their own.
`reference.py` holds PyTorch's form of each, for float64 and where no kernel can run.
"""

import functools
from collections.abc import Callable

from common.spans import span
from version3_triton.kernels import HAS_TRITON, missing
from version4_ultra_fused.kernels import reference

import torch

if HAS_TRITON:
    from version4_ultra_fused.kernels import adamw as _adamw
    from version4_ultra_fused.kernels import cross_entropy as _loss
    from version4_ultra_fused.kernels import elementwise, embedding, fp8, matmul, matmul_norm_backward, norm

    KERNELS = {
        "add_norm": norm.add_norm, "add_norm_backward": norm.add_norm_backward, "sum_parts": norm.sum_parts,
        "qkv_rope": matmul.qkv_rope, "rotate_back": elementwise.rotate_back, "gate_up_swiglu": matmul.gate_up_swiglu,
        "swiglu_backward": elementwise.swiglu_backward, "cross_entropy": _loss.cross_entropy,
        "product_norm_backward": matmul_norm_backward.product_norm_backward,
        "add_embedding_gradient": embedding.add_embedding_gradient, "adamw": _adamw.adamw,
        "rotate": elementwise.rotate, "quantize": fp8.quantize, "swiglu_quantized": fp8.swiglu_quantized,
        "swiglu_backward_quantized": fp8.swiglu_backward_quantized,
    }  # fmt: skip


def _operation(name: str) -> Callable:
    """The kernel where it can run, otherwise PyTorch's operation."""
    plain = getattr(reference, name)

    @functools.wraps(plain)
    def operation(x: torch.Tensor, *arguments):
        double = any(isinstance(each, torch.Tensor) and each.dtype == torch.float64 for each in (x, *arguments))
        return plain(x, *arguments) if missing(x.device) or double else KERNELS[name](x, *arguments)

    return operation


add_norm, add_norm_backward, sum_parts, cross_entropy, add_embedding_gradient, adamw = map(
    _operation, ("add_norm", "add_norm_backward", "sum_parts", "cross_entropy", "add_embedding_gradient", "adamw")
)
qkv_rope, gate_up_swiglu = span("qkv_projection")(_operation("qkv_rope")), span("gate_up")(_operation("gate_up_swiglu"))
rotate_back, swiglu_backward, product_norm_backward = map(_operation, ("rotate_back", "swiglu_backward", "product_norm_backward"))
rotate, quantize, swiglu_quantized, swiglu_backward_quantized = map(
    _operation, ("rotate", "quantize", "swiglu_quantized", "swiglu_backward_quantized")
)
