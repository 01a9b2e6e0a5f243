"""The gradient of causal attention over at most 128 positions, where one program holds all scores of a head.

With p, d, c and ds as in Version 3's `flash_attention.py`, all in registers:

    dv = p^T do        dq = c ds k        dk = c ds^T q

Version 3's two kernels compute the scores and do v^T twice, because one owns queries and the other keys. Here a program owns a
key/value head and the query heads that share it, so each product is computed once: 5 instead of 7. It reads q, k and v packed as
the product gave them, and writes their gradients packed, turned back by RoPE, for the next product. There are B K programs.
"""

import math

from version3_triton.kernels.checks import interpretable
from version3_triton.kernels.flash_attention import LOG2_E
from version3_triton.kernels.launch_sizes import dot_precision

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = {16: 4, 32: 4, 64: 4, 128: 8}  # by the rows of a tile


@triton.jit
def _turned_back(x, cos_ptr, sin_ptr, length, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """RoPE's transpose on neighbouring columns of x [ROWS, BLOCK]."""
    row, pair = tl.arange(0, ROWS), tl.arange(0, BLOCK // 2)
    inside = (row < length)[:, None] & (pair < DIM // 2)[None, :]
    table = row[:, None] * DIM + pair[None, :]
    cos, sin = tl.load(cos_ptr + table, mask=inside, other=0.0), tl.load(sin_ptr + table, mask=inside, other=0.0)
    first, second = tl.split(tl.reshape(x, (ROWS, BLOCK // 2, 2)))
    return tl.reshape(tl.join(first * cos + second * sin, second * cos - first * sin), (ROWS, BLOCK))


@triton.jit
def _short_attention_backward(
        qkv_ptr, o_ptr, do_ptr, lse_ptr, cos_ptr, sin_ptr, out_ptr, length, scale, factor,
        H: tl.constexpr, K: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch, kv_head = tl.program_id(0) // K, tl.program_id(0) % K
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (row < length)[:, None] & (column < DIM)[None, :]
    token = batch.to(tl.int64) * length + row
    packed = token[:, None] * ((H + 2 * K) * DIM) + column[None, :]
    own = token[:, None] * (H * DIM) + column[None, :]
    k = tl.load(qkv_ptr + packed + (H + kv_head) * DIM, mask=inside, other=0.0)
    v = tl.load(qkv_ptr + packed + (H + K + kv_head) * DIM, mask=inside, other=0.0)
    dk, dv = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for group in range(H // K):
        head = kv_head * (H // K) + group
        q = tl.load(qkv_ptr + packed + head * DIM, mask=inside, other=0.0)
        o = tl.load(o_ptr + own + head * DIM, mask=inside, other=0.0)
        do = tl.load(do_ptr + own + head * DIM, mask=inside, other=0.0)
        lse = tl.load(lse_ptr + (batch * H + head).to(tl.int64) * length + row, mask=row < length, other=float("inf"))
        d = tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)
        p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse[:, None])
        p = tl.where(row[None, :] <= row[:, None], p, 0.0)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        ds = (p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - d[:, None])).to(q.dtype)
        dk = tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)
        dq = _turned_back(tl.dot(ds, k, input_precision=PRECISION) * factor, cos_ptr, sin_ptr, length, DIM, ROWS, BLOCK)
        tl.store(out_ptr + packed + head * DIM, dq.to(out_ptr.dtype.element_ty), mask=inside)
    dk = _turned_back(dk * factor, cos_ptr, sin_ptr, length, DIM, ROWS, BLOCK)
    tl.store(out_ptr + packed + (H + kv_head) * DIM, dk.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + packed + (H + K + kv_head) * DIM, dv.to(out_ptr.dtype.element_ty), mask=inside)


@interpretable
def attend_backward(
    qkv: Tensor, o: Tensor, lse: Tensor, dout: Tensor, cos: Tensor, sin: Tensor, length: int, heads: int, kv_heads: int
) -> Tensor:
    """The gradient of q, k and v before RoPE, packed [B S, (H + 2 K) Dh].

    Args:
        qkv: [B S, (H + 2 K) Dh], after RoPE.
        o, lse: from Version 3's `flash_attention.attend`; o [B S, H Dh].
        dout: [B S, H Dh].
        cos, sin: [S_max, Dh], float32.
        length: S, at most 128.
    """
    head_dim, out = cos.shape[1], torch.empty_like(qkv)
    factor = 1 / math.sqrt(head_dim)
    rows = max(16, triton.next_power_of_2(length))
    _short_attention_backward[qkv.shape[0] // length * kv_heads,](
        qkv, o, dout, lse, cos, sin, out, length, factor * LOG2_E, factor,
        H=heads, K=kv_heads, DIM=head_dim, PRECISION=dot_precision(qkv.dtype), ROWS=rows,
        BLOCK=max(16, triton.next_power_of_2(head_dim)), num_warps=WARPS[rows], num_stages=1,
    )  # fmt: skip
    return out
