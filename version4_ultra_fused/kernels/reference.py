"""Each operation of Version 4 in PyTorch, with the kernel's signature: for float64, and where no kernel can run."""

from typing import NamedTuple

from common.spans import span

import torch
import torch.nn.functional as F
from torch import Tensor


class Slot(NamedTuple):
    """Where one tensor's scale stands, and where its largest magnitude goes; both one float32 element on the device."""

    scale: Tensor
    largest: Tensor
    dtype: torch.dtype


def add_norm(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    total = x if branch is None else x + branch.to(x.dtype)
    rstd = (total.square().mean(-1) + eps).rsqrt()
    return total, (total * rstd[:, None] * weight).to(dtype), total.to(dtype), rstd


def add_norm_backward(
    dy: Tensor, dtotal: Tensor | None, kept: Tensor, weight: Tensor, rstd: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    dy_wide, normalized = dy.to(rstd.dtype), kept * rstd[:, None]
    scaled = dy_wide * weight
    dx = rstd[:, None] * (scaled - normalized * (scaled * normalized).mean(-1, keepdim=True))
    if dtotal is not None:
        dx = dx + dtotal
    return dx.to(dtype), (dy_wide * normalized).sum(0, keepdim=True)


def product_norm_backward(
    dout: Tensor, matrix: Tensor, dots: Tensor | None, dtotal: Tensor, kept: Tensor, weight: Tensor, rstd: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dy = dout @ matrix
    with span("norm"):
        return add_norm_backward(dy, dtotal, kept, weight, rstd, dtype)


def sum_parts(parts: Tensor, out: Tensor) -> None:
    torch.sum(parts, 0, out=out)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates neighbouring elements; x [B, S, heads, Dh], cos and sin [S_max, Dh] of which the halves are equal."""
    half = slice(0, cos.shape[1] // 2)
    cos, sin = cos[: x.shape[1], None, half], sin[: x.shape[1], None, half]
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2).to(x.dtype)


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor, length: int, rotated: int) -> Tensor:
    by_head, heads = qkv.view(-1, length, qkv.shape[1] // cos.shape[1], cos.shape[1]), rotated // cos.shape[1]
    return torch.cat((_rotate(by_head[:, :, :heads], cos, sin), by_head[:, :, heads:]), 2).view(qkv.shape)


def qkv_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, length: int, rotated: int) -> Tensor:
    return rotate(x @ weight.T, cos, sin, length, rotated)


def rotate_back(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    dq, dk = (_rotate(x.transpose(1, 2), cos, -sin) for x in (dq, dk))
    return torch.cat((dq, dk, dv.transpose(1, 2)), 2).flatten(2).flatten(0, 1)


def gate_up_swiglu(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    gate_up = x @ weight.T
    gate, up = gate_up.unflatten(1, (-1, 2)).unbind(-1)
    return gate_up, F.silu(gate) * up


def swiglu_backward(dhidden: Tensor, gate_up: Tensor, kept: Tensor | None = None) -> tuple[Tensor, None]:
    gate, up = gate_up.unflatten(1, (-1, 2)).unbind(-1)
    sigmoid = gate.sigmoid()
    dgate, dup = dhidden * up * sigmoid * (1 + gate * (1 - sigmoid)), dhidden * gate * sigmoid
    return gate_up.copy_(torch.stack((dgate, dup), -1).flatten(1)), None


def quantize(x: Tensor, slot: Slot) -> tuple[Tensor, Tensor]:
    torch.maximum(slot.largest, x.abs().amax(), out=slot.largest)
    most = torch.finfo(slot.dtype).max
    rows = (x.float() * (1 / slot.scale)).clamp(-most, most).to(slot.dtype)
    return rows, rows.T.contiguous()


def swiglu_quantized(gate_up: Tensor, slot: Slot) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.float().unflatten(1, (-1, 2)).unbind(-1)
    return quantize(F.silu(gate) * up, slot)


def swiglu_backward_quantized(dhidden: Tensor, gate_up: Tensor, slot: Slot) -> tuple[Tensor, Tensor]:
    return quantize(swiglu_backward(dhidden.float(), gate_up.float())[0], slot)


def cross_entropy(logits: Tensor, targets: Tensor, gradient: bool) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(wide, targets)
    if gradient:
        counts = targets >= 0
        onehot = torch.zeros_like(wide).scatter_(1, targets.clamp(min=0)[:, None], 1.0)
        logits.copy_((wide.softmax(-1) - onehot) * (counts / counts.sum().clamp(min=1))[:, None])
    return loss


def add_embedding_gradient(dx: Tensor, ids: Tensor, order: Tensor, dweight: Tensor) -> None:
    dweight.index_add_(0, ids, dx[order].to(dweight.dtype))


def adamw(
    weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, gradient: Tensor, working: Tensor | None, steps: Tensor,
    lr: float | Tensor, beta1: float, beta2: float, eps: float, decay: float, scale: float = 1.0,
) -> None:  # fmt: skip
    gradient = gradient.to(weight.dtype) * scale
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (exp_avg_sq / (1 - beta2**steps)).sqrt_().add_(eps)
    weight.mul_(1 - lr * decay).sub_(exp_avg / (1 - beta1**steps) / root * lr)
    if working is not None:
        working.copy_(weight)
