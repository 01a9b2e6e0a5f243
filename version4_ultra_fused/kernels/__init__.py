"""The operations of Version 4 without autograd, in one table: a Triton kernel each, or the same in
PyTorch.

A block's backward pass is written by hand (`tiny_llama_v4.py`), so each operation and its gradient
are functions of their own. `reference.py` holds PyTorch's form of each, for float64 and where no
kernel can run. The exception is `CausalAttention`: for Version 3's and PyTorch's attention it asks
autograd for the gradient.
"""

from collections.abc import Callable
from typing import NamedTuple

from common import device as devices
from common.options import Options, Switches
from tracepage.errors import UsageError
from version3_triton import kernels as version3
from version3_triton.kernels import LOADED, missing
from version4_ultra_fused.kernels import reference


class Operations(NamedTuple):
    """The functions that a model calls, with the signatures of `reference`."""

    add_norm: Callable
    add_norm_backward: Callable
    product_norm_backward: Callable
    sum_parts: Callable
    qkv_rope: Callable
    rotate: Callable
    rotate_back: Callable
    gate_up_swiglu: Callable
    swiglu_backward: Callable
    cross_entropy: Callable
    add_embedding_gradient: Callable
    adamw: Callable
    quantize: Callable  # This and the following are for FP8.
    swiglu_quantized: Callable
    swiglu_backward_quantized: Callable
    cross_entropy_quantized: Callable


REFERENCE = Operations._make(getattr(reference, name) for name in Operations._fields)
KERNELS = REFERENCE
if LOADED:
    from version4_ultra_fused.kernels import (
        adamw,
        cross_entropy,
        elementwise,
        embedding,
        matmul,
        matmul_norm_backward,
        norm,
    )
    from version4_ultra_fused.kernels.fp8 import casts, logits

    KERNELS = Operations(
        add_norm=norm.add_norm,
        add_norm_backward=norm.add_norm_backward,
        product_norm_backward=matmul_norm_backward.product_norm_backward,
        sum_parts=norm.sum_parts,
        qkv_rope=matmul.qkv_rope,
        rotate=elementwise.rotate,
        rotate_back=elementwise.rotate_back,
        gate_up_swiglu=matmul.gate_up_swiglu,
        swiglu_backward=elementwise.swiglu_backward,
        cross_entropy=cross_entropy.cross_entropy,
        add_embedding_gradient=embedding.add_embedding_gradient,
        adamw=adamw.adamw,
        quantize=casts.quantize,
        swiglu_quantized=casts.swiglu_quantized,
        swiglu_backward_quantized=casts.swiglu_backward_quantized,
        cross_entropy_quantized=logits.cross_entropy_quantized,
    )


def choose(switches: Switches) -> Operations:
    """The table of a model: kernels, or REFERENCE where none can run.

    A model in float64 is made with REFERENCE.
    """
    absent = "no-kernels" in switches or missing(devices.select("auto"))
    return REFERENCE if absent else KERNELS


def available(options: Options) -> dict[str, bool | str]:
    """The options' switches as they can be on its device, as Version 3's `available`.

    Raises:
        UsageError: for recomputation, for FP8 or FlashAttention-4 where it cannot run, or for
            moments in bfloat16 without the memory plan.
    """
    if options.checkpoint_activations != "none":
        raise UsageError(
            "--checkpoint-activations: its blocks have a backward pass of their own, "
            "which recomputes already"
        )
    if options.switches["fa4"]:
        from version4_ultra_fused.kernels.attention import refuse_fa4

        refuse_fa4(options)
    if options.switches["fp8"]:
        from version4_ultra_fused.kernels.fp8.scales import refuse_fp8

        refuse_fp8(options)
    if options.switches["bf16-moments"] and not options.switches["memory-plan"]:
        raise UsageError("--enable-bf16-moments needs the memory plan, whose AdamW rounds them")
    switches = version3.available(options)
    # These need no kernels, so they stay as they are where there are none.
    for name in ("memory-plan", "fp32-residual-gradient", "bf16-moments"):
        switches[name] = options.switches[name]
    if not switches["memory-plan"]:
        switches |= {"side-stream": False, "early-update": False}
    return switches
