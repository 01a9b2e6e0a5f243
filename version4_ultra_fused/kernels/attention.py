"""Causal attention on packed q, k and v, and its gradient before RoPE, in four forms.

    S at most 128, Dh at most 64    with the sizes of `sm_90` and in 16 bits: Version 3's forward
                                    kernel, and one for the whole gradient (`short_attention.py`)
    S from 1,024, if asked for      FlashAttention-4 (arXiv:2603.05451), of the package flash-attn-4
    S at most 256, or else          Version 3's kernels
    deterministic
    longer                          PyTorch's fused attention, which on Hopper is cuDNN's

Measured on an H200 in bf16, forward and backward with RoPE's gradient, in us, when a program of the
one backward kernel took one query head at a time (LOG.md has the table):

    S, Dh, H of K heads    128, 32, 8 of 8   128, 64, 8 of 4   512, 128, 8 of 4   2048, 64, 32 of 4
    one backward kernel    8.6               16                -                  -
    Version 3's kernels    14                20                201                994
    cuDNN                  23                29                184                768

cuDNN adds parts of dq in any order, so its gradients can differ in their last bits from run to run.
So do those of FlashAttention-4 without --deterministic. All other kernels always give the same
bits.
"""

from collections.abc import Sequence
from importlib.util import find_spec

from common import device as devices
from common.options import Options, Switches
from common.spans import span
from tracepage.errors import UsageError
from version3_triton.kernels import INTERPRETED, LOADED, reference
from version4_ultra_fused.kernels import REFERENCE, Operations
from version4_ultra_fused.kernels.reference import Rope

import torch
from torch import Tensor

SHORT = 128  # the longest sequence for this form
VERSION3 = 256  # the same
FA4 = 1024  # the shortest sequence for FlashAttention-4

if LOADED:
    from version3_triton.kernels import flash_attention, launch_sizes
    from version3_triton.kernels.dependent_launch import dependent
    from version4_ultra_fused.kernels import short_attention


def refuse_fa4(options: Options) -> None:
    """UsageError, with the reason, where --enable-fa4 cannot run or has no effect."""
    device = devices.select(options.device)
    if (
        device.type != "cuda"
        or torch.version.hip
        or torch.cuda.get_device_capability(device)[0] not in (9, 10)
    ):
        raise UsageError("--enable-fa4: FlashAttention-4 needs a Hopper or Blackwell GPU")
    if not find_spec("flash_attn") or not find_spec("flash_attn.cute"):
        raise UsageError(
            "--enable-fa4: flash-attn-4 is not installed: pip install flash-attn-4==4.0.0b36"
        )
    if (
        not options.use_amp
        or options.seq_len < FA4
        or options.model.head_dim not in range(8, 129, 8)
    ):
        raise UsageError(
            f"--enable-fa4 needs --use-amp, --seq-len from {FA4} on, "
            "and a head dimension of 8, 16, ... 128"
        )


def form(q: Tensor, switches: Switches) -> str:
    """Which form of attention runs for q [B, H, S, Dh]: `short`, `version3` (its kernels), `fa4` or
    `library`.
    """
    batch, heads, length, head_dim = q.shape
    if q.dtype.itemsize > 4:
        return "library"
    if switches["fa4"] and q.dtype.itemsize == 2 and length >= FA4:
        return "fa4"
    if batch * heads > flash_attention.MAX_HEADS or head_dim > flash_attention.MAX_HEAD_DIM:
        return "library"
    # Elsewhere the short form spills registers.
    measured = INTERPRETED or launch_sizes.family() == "sm_90"
    if measured and q.dtype.itemsize == 2 and length <= SHORT and head_dim <= 64:
        return "short"
    if length <= VERSION3 or torch.are_deterministic_algorithms_enabled():
        return "version3"
    return "library"


def fa4(inputs: Sequence[Tensor]) -> Tensor:
    """FlashAttention-4 of q [B, H, S, Dh], and k and v [B, K, S, Dh]."""
    from flash_attn.cute import flash_attn_func

    q, k, v = (x.transpose(1, 2) for x in inputs)
    exact = torch.are_deterministic_algorithms_enabled()
    return flash_attn_func(q, k, v, causal=True, deterministic=exact)[0].transpose(1, 2)


class CausalAttention:
    """One attention: computed when made, `out` [B S, H Dh], and later its `gradient`.

    Args:
        qkv: [B S, (H + 2 K) Dh], after RoPE.
        rope: its tables.
        heads: H, K, K.
        switches: `fa4` is FlashAttention-4.
        operations: the model's; with REFERENCE the form is `library`.
    """

    @span("attention_core")
    def __init__(
        self,
        qkv: Tensor,
        rope: Rope,
        heads: tuple[int, int, int],
        switches: Switches,
        operations: Operations,
    ) -> None:
        self.qkv = qkv
        self.rope = rope
        self.heads = heads
        self.batch = qkv.shape[0] // rope.length
        # 3 x [B, S, H or K, Dh]
        split = qkv.view(self.batch, rope.length, sum(heads), rope.head_dim).split(heads, dim=2)
        q, k, v = (x.transpose(1, 2) for x in split)
        self.form = "library" if operations is REFERENCE else form(q, switches)
        self.rotate_back = operations.rotate_back
        if self.form == "short":
            out, self.lse = flash_attention.attend(q, k, v, **dependent())
            self.out = out.transpose(1, 2).flatten(2).flatten(0, 1)
            return
        self.inputs = tuple(x.detach().requires_grad_() for x in (q, k, v))
        with torch.set_grad_enabled(not torch.is_inference_mode_enabled()):
            if self.form == "fa4":
                self.graph = fa4(self.inputs)  # [B, H, S, Dh]
            elif self.form == "version3":
                self.graph = flash_attention.attention(*self.inputs)
            else:
                self.graph = reference.attention(*self.inputs)
        self.out = self.graph.detach().transpose(1, 2).flatten(2).flatten(0, 1)

    @span("attention_core")
    def gradient(self, dout: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gradient of q, k and v before RoPE [B S, (H + 2 K) Dh], from that of `out`; and
        `dots` of its kernel, or None.
        """
        if self.form == "short":
            return short_attention.attend_backward(
                dout, self.qkv, (self.out, self.lse), self.rope, self.heads
            )
        by_head = (self.batch, self.rope.length, self.heads[0], self.rope.head_dim)
        dout = dout.view(by_head).transpose(1, 2)
        gradients = torch.autograd.grad(self.graph, self.inputs, dout)
        return self.rotate_back(*gradients, self.rope), None
