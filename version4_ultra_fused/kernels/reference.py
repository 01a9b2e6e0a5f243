"""Each operation of Version 4 in PyTorch, with the kernel's signature: for float64, and where no
kernel can run.
"""

from dataclasses import dataclass
from typing import NamedTuple

from common.spans import span
from tracepage.errors import UsageError
from version3_triton.kernels.checks import refuse_odd

import torch
import torch.nn.functional as F
from torch import Tensor

SUM_SCALE = 2.0**-15  # of the gradient that the sum of the losses has in e5m2


class Slot(NamedTuple):
    """Where one tensor's scale stands, and where its largest magnitude goes; both one float32
    element on the device.
    """

    scale: Tensor
    largest: Tensor
    dtype: torch.dtype


class Norm(NamedTuple):
    """What the backward pass of a norm needs: its weight [D], x + branch [N, D] in the products'
    dtype, and 1 / rms [N].
    """

    weight: Tensor
    total: Tensor
    rstd: Tensor


@dataclass(frozen=True)
class Rope:
    """The rotary tables cos and sin [S_max, Dh], float32, for sequences of one length S.

    Raises:
        UsageError: S is above S_max, or Dh is odd or 0.
    """

    cos: Tensor
    sin: Tensor
    length: int

    def __post_init__(self) -> None:
        refuse_odd(self.head_dim)
        if self.length > self.cos.shape[0]:
            raise UsageError(
                f"the rotary tables hold {self.cos.shape[0]} positions, not {self.length}"
            )

    @property
    def head_dim(self) -> int:
        return self.cos.shape[1]


def add_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Norm]:
    total = x if branch is None else x + branch.to(x.dtype)
    rstd = (total.square().mean(-1) + eps).rsqrt()
    return total, (total * rstd[:, None] * weight).to(dtype), Norm(weight, total.to(dtype), rstd)


def add_norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    norm: Norm,
    dtype: torch.dtype,
    branch_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dy_wide = dy.to(norm.rstd.dtype)
    normalized = norm.total * norm.rstd[:, None]
    scaled = dy_wide * norm.weight
    dx = norm.rstd[:, None] * (scaled - normalized * (scaled * normalized).mean(-1, keepdim=True))
    if dtotal is not None:
        dx = dx + dtotal
    dx = dx.to(dtype)
    return dx, dx.to(branch_dtype or dtype), (dy_wide * normalized).sum(0, keepdim=True)


def product_norm_backward(
    dout: Tensor,
    dots: Tensor | None,
    matrix: Tensor,
    dtotal: Tensor,
    norm: Norm,
    *,
    dtype: torch.dtype,
    branch_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dy = dout @ matrix
    with span("norm"):
        return add_norm_backward(dy, dtotal, norm, dtype, branch_dtype)


def sum_parts(parts: Tensor, out: Tensor) -> None:
    torch.sum(parts, 0, out=out)


def _rotate(x: Tensor, rope: Rope, sign: int) -> Tensor:
    """Rotates neighbouring elements of x [B, S, heads, Dh]; -1 rotates back. The halves of the
    tables are equal.
    """
    half = rope.head_dim // 2
    cos = rope.cos[: rope.length, None, :half]
    sin = rope.sin[: rope.length, None, :half] * sign
    first = x[..., 0::2]
    second = x[..., 1::2]
    return (
        torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
        .flatten(-2)
        .to(x.dtype)
    )


def rotate(qkv: Tensor, rope: Rope, rotated: int) -> Tensor:
    by_head = qkv.unflatten(1, (-1, rope.head_dim))
    heads = rotated // rope.head_dim
    by_head = by_head.unflatten(0, (len(qkv) // rope.length, rope.length))
    return torch.cat((_rotate(by_head[:, :, :heads], rope, 1), by_head[:, :, heads:]), 2).view(
        qkv.shape
    )


def qkv_rope(x: Tensor, weight: Tensor, rope: Rope, rotated: int) -> Tensor:
    return rotate(x @ weight.T, rope, rotated)


def rotate_back(dq: Tensor, dk: Tensor, dv: Tensor, rope: Rope) -> Tensor:
    dq, dk = (_rotate(x.transpose(1, 2), rope, -1) for x in (dq, dk))
    return torch.cat((dq, dk, dv.transpose(1, 2)), 2).flatten(2).flatten(0, 1)


def gate_up_swiglu(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    gate_up = x @ weight.T
    gate, up = gate_up.unflatten(1, (-1, 2)).unbind(-1)
    return gate_up, F.silu(gate) * up


def swiglu_backward(
    dhidden: Tensor, gate_up: Tensor, total: Tensor | None = None
) -> tuple[Tensor, None]:
    gate, up = gate_up.unflatten(1, (-1, 2)).unbind(-1)
    sigmoid = gate.sigmoid()
    dgate = dhidden * up * sigmoid * (1 + gate * (1 - sigmoid))
    dup = dhidden * gate * sigmoid
    return gate_up.copy_(torch.stack((dgate, dup), -1).flatten(1)), None


def quantize(x: Tensor, slot: Slot) -> tuple[Tensor, Tensor]:
    torch.maximum(slot.largest, x.abs().amax(), out=slot.largest)
    most = torch.finfo(slot.dtype).max
    rows = (x.float() * (1 / slot.scale)).clamp(-most, most).to(slot.dtype)
    return rows, rows.T.contiguous()


def swiglu_quantized(gate_up: Tensor, slot: Slot) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.float().unflatten(1, (-1, 2)).unbind(-1)
    return quantize(F.silu(gate) * up, slot)


def swiglu_backward_quantized(
    dhidden: Tensor, gate_up: Tensor, slot: Slot
) -> tuple[Tensor, Tensor]:
    return quantize(swiglu_backward(dhidden.float(), gate_up.float())[0], slot)


def cross_entropy(logits: Tensor, targets: Tensor, gradient: bool) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(wide, targets)
    if gradient:
        counts = targets >= 0
        onehot = torch.zeros_like(wide).scatter_(1, targets.clamp(min=0)[:, None], 1.0)
        logits.copy_((wide.softmax(-1) - onehot) * (counts / counts.sum().clamp(min=1))[:, None])
    return loss


def logits_scale(targets: Tensor) -> Tensor:
    """The scale of the gradient of logits, one float32 element (`fp8/logits.py`)."""
    return SUM_SCALE / (targets != -100).sum().clamp(min=1)


def cross_entropy_quantized(
    logits: Tensor, targets: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gradient = logits.float()
    loss = cross_entropy(gradient, targets, True)
    scale = logits_scale(targets)
    rows = (gradient / scale).to(dtype)
    return loss, scale, rows, rows.T.contiguous()


def add_embedding_gradient(dx: Tensor, ids: Tensor, order: Tensor, dweight: Tensor) -> None:
    dweight.index_add_(0, ids, dx[order].to(dweight.dtype))


def random_bits(step: Tensor, start: int, size: int) -> Tensor:
    """32 bits for each of `size` parameters from the number `start` on, as int64; `adamw.py` says
    how they are made.
    """
    low = 0xFFFFFFFF
    counter = torch.arange(start // 4, start // 4 + -(-size // 4), device=step.device)
    a = counter & low
    b = counter >> 32
    c = torch.zeros_like(counter)
    d = c
    key = step.long()
    other_key = 0
    for _ in range(10):
        product = 0xD2511F53 * a  # of 64 bits
        other_product = 0xCD9E8D57 * c
        a = (other_product >> 32 & low) ^ b ^ key
        c = (product >> 32 & low) ^ d ^ other_key
        b = other_product & low
        d = product & low
        key = (key + 0x9E3779B9) & low
        other_key = (other_key + 0xBB67AE85) & low
    return torch.stack((a, b, c, d), 1).flatten()[:size]


def rounded(x: Tensor, random: Tensor) -> Tensor:
    """x in bfloat16, rounded with 16 random bits for each element; NaN stays."""
    bits = x.float().view(torch.int32) + random.view(x.shape).int()
    result = (bits >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(x.isnan(), x.to(torch.bfloat16), result)


def adamw(
    weight: Tensor,
    moments: tuple[Tensor, Tensor],
    gradient: Tensor,
    working: Tensor | None,
    steps: Tensor,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    scale: float = 1.0,
    start: int = 0,
) -> None:
    (exp_avg, exp_avg_sq) = (moment.to(weight.dtype) for moment in moments)
    (beta1, beta2) = betas
    gradient = gradient.to(weight.dtype) * scale
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (exp_avg_sq / (1 - beta2**steps)).sqrt_().add_(eps)
    weight.mul_(1 - lr * weight_decay).sub_(exp_avg / (1 - beta1**steps) / root * lr)
    if moments[0].dtype == torch.bfloat16:
        bits = random_bits(steps, start, weight.numel())
        moments[0].copy_(rounded(exp_avg, bits & 0xFFFF))
        moments[1].copy_(rounded(exp_avg_sq, bits >> 16))
    if working is not None:
        working.copy_(weight)
