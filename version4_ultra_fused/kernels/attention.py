"""Causal attention on packed q, k and v, and its gradient before RoPE, in three forms.

    S at most 128, Dh at most 64    with the sizes of `sm_90` and in 16 bits: Version 3's forward kernel, and one
                                    for the whole gradient (`short_attention.py`)
    S at most 256, or exact         Version 3's kernels
    longer                          PyTorch's fused attention, which on Hopper is cuDNN's

Measured on an H200 in bf16, forward and backward with RoPE's gradient, in us (LOG.md has the table):

    S, Dh, H of K heads      128, 32, 8 of 8    128, 64, 8 of 4    512, 128, 8 of 4    2048, 64, 32 of 4
    one backward kernel      8.6                16                 -                   -
    Version 3's kernels      14                 20                 201                 994
    cuDNN                    23                 29                 184                 768

cuDNN adds parts of dq in any order, so its gradients can differ in their last bits from run to run. All other kernels always
give the same bits.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from common.spans import span
from version3_triton.kernels import INTERPRETED, LOADED, missing, reference
from version4_ultra_fused import kernels
from version4_ultra_fused.kernels.reference import Rope

import torch
from torch import Tensor

SHORT, VERSION3 = 128, 256  # the longest sequences for the first two forms

if LOADED:
    from version3_triton.kernels import flash_attention, launch_sizes
    from version3_triton.kernels.dependent_launch import dependent
    from version4_ultra_fused.kernels import short_attention


def form(q: Tensor, exact: bool) -> str:
    """Which form of attention runs for q [B, H, S, Dh]: `short`, `version3` (its kernels) or `library`."""
    batch, heads, length, head_dim = q.shape
    if missing(q.device) or q.dtype.itemsize > 4:
        return "library"
    if batch * heads > flash_attention.MAX_HEADS or head_dim > flash_attention.MAX_HEAD_DIM:
        return "library"
    measured = INTERPRETED or launch_sizes.family() == "sm_90"  # elsewhere the short form spills registers
    if measured and q.dtype.itemsize == 2 and length <= SHORT and head_dim <= 64:
        return "short"
    return "version3" if exact or length <= VERSION3 else "library"


@contextmanager
def any_order() -> Iterator[None]:
    """Inside it PyTorch may take kernels whose sums have no fixed order, such as cuDNN's attention."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class CausalAttention:
    """One attention: computed when made, `out` [B S, H Dh], and later its `gradient`.

    Args:
        qkv: [B S, (H + 2 K) Dh], after RoPE.
        heads: H, K, K.
        exact: take kernels that repeat bit for bit, at any length.
        chosen: a form of `form`, in place of the measured choice.
    """

    @span("attention_core")
    def __init__(self, qkv: Tensor, rope: Rope, heads: tuple[int, int, int], exact: bool, chosen: str = "") -> None:
        self.qkv, self.rope, self.heads = qkv, rope, heads
        self.batch = qkv.shape[0] // rope.length
        split = qkv.view(self.batch, rope.length, sum(heads), rope.head_dim).split(heads, dim=2)  # 3 x [B, S, H or K, Dh]
        q, k, v = (x.transpose(1, 2) for x in split)
        chosen = chosen or form(q, exact)
        self.short, version3 = chosen == "short", chosen == "version3"
        if self.short:
            out, self.lse = flash_attention.attend(q, k, v, **dependent())
            self.out = out.transpose(1, 2).flatten(2).flatten(0, 1)
            return
        self.order = nullcontext if version3 or exact else any_order
        self.inputs = tuple(x.detach().requires_grad_() for x in (q, k, v))
        with torch.set_grad_enabled(not torch.is_inference_mode_enabled()), self.order():
            self.graph = (flash_attention if version3 else reference).attention(*self.inputs)  # [B, H, S, Dh]
        self.out = self.graph.detach().transpose(1, 2).flatten(2).flatten(0, 1)

    @span("attention_core")
    def gradient(self, dout: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gradient of q, k and v before RoPE [B S, (H + 2 K) Dh], from that of `out`; and `dots` of its kernel, or None."""
        if self.short:
            return short_attention.attend_backward(dout, self.qkv, (self.out, self.lse), self.rope, self.heads)
        dout = dout.view(self.batch, self.rope.length, self.heads[0], self.rope.head_dim).transpose(1, 2)
        with self.order():
            return kernels.rotate_back(*torch.autograd.grad(self.graph, self.inputs, dout), self.rope), None
