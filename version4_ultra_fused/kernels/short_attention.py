"""The gradient of causal attention over at most 128 positions.

With p, d, c and ds as in Version 3's `flash_attention.py`, all in registers:

    dv = p^T do        dq = c ds k        dk = c ds^T q

Version 3's two kernels compute the scores and do v^T twice, because one owns queries and the other
keys. Here a program owns at most 64 positions of a key/value head and of the query heads that share
it, as keys and as queries. On the diagonal, where its queries meet its keys, each product is
computed once: 5 instead of 7. Only where later queries meet earlier keys are the scores and do v^T
computed by both programs. If the query heads of a key are even in number, a program takes two at a
time, one below the other: half as many products in a row, each of twice the rows. The kernel reads
q, k and v packed as the product gave them, and writes their gradients packed, rotated back by RoPE,
for the next product. There are B K programs for each 64 positions.
"""

import math

from version3_triton.kernels.checks import checked
from version3_triton.kernels.dependent_launch import begin, dependent
from version3_triton.kernels.flash_attention import LOG2_E
from version3_triton.kernels.launch_sizes import ceil_div, dot_precision
from version3_triton.kernels.memory import in_matrix
from version4_ultra_fused.kernels.reference import Rope
from version4_ultra_fused.kernels.tiles import largest

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64  # most positions of a program


@triton.jit
def _load(
    ptr,  # the head
    first,  # the first position
    length,  # S
    stride,  # elements between positions
    DIM: tl.constexpr,  # Dh
    ROWS: tl.constexpr,  # positions of a program
    BLOCK: tl.constexpr,  # Dh, rounded up to a power of two
    PACK: tl.constexpr = 1,  # neighbouring heads, one below the other
):
    """ROWS rows of each head from row `first` on, [PACK ROWS, BLOCK]; zeros outside."""
    number = tl.arange(0, PACK * ROWS)
    row = first + number % ROWS
    column = tl.arange(0, BLOCK)
    inside = in_matrix(row, length, column, DIM)
    start = row * stride + number // ROWS * DIM
    return tl.load(ptr + start[:, None] + column[None, :], mask=inside, other=0.0)


@triton.jit
def _store(
    ptr,  # the head
    x,  # [ROWS, BLOCK]
    ROTATED: tl.constexpr,  # whether RoPE is turned back
    cos_ptr,  # [S_max, Dh]
    sin_ptr,  # [S_max, Dh]
    first,  # the first position
    length,  # S
    stride,  # elements between positions
    DIM: tl.constexpr,  # Dh
    ROWS: tl.constexpr,  # positions of a program
    BLOCK: tl.constexpr,  # Dh, rounded up to a power of two
    PACK: tl.constexpr = 1,  # neighbouring heads, one below the other
):
    """Writes x [PACK ROWS, BLOCK] where `_load` reads; if ROTATED after RoPE's transpose on
    neighbouring columns.
    """
    number = tl.arange(0, PACK * ROWS)
    row = first + number % ROWS
    column = tl.arange(0, BLOCK)
    if ROTATED:
        pair = tl.arange(0, BLOCK // 2)
        inside = in_matrix(row, length, pair, DIM // 2)
        table = row[:, None] * DIM + pair[None, :]
        cos = tl.load(cos_ptr + table, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + table, mask=inside, other=0.0)
        left, right = tl.split(tl.reshape(x, (PACK * ROWS, BLOCK // 2, 2)))
        left, right = left * cos + right * sin, right * cos - left * sin
        x = tl.reshape(tl.join(left, right), (PACK * ROWS, BLOCK))
    inside = in_matrix(row, length, column, DIM)
    start = row * stride + number // ROWS * DIM
    tl.store(ptr + start[:, None] + column[None, :], x, mask=inside)


@triton.jit
def _scores(
    q_ptr,  # queries of PACK heads
    lse_ptr,  # their log-sum-exp, to base 2
    o_ptr,  # their result
    do_ptr,  # the gradient of o
    k,  # [ROWS, BLOCK]
    v,  # [ROWS, BLOCK]
    first,  # the first query
    length,  # S
    packed,  # elements between positions of q
    row_of_o,  # elements between positions of o
    scale,  # c log2(e)
    DIAGONAL: tl.constexpr,  # whether these are the queries of the keys' positions
    PRECISION: tl.constexpr,  # `launch_sizes.dot_precision`, for products of float32
    DIM: tl.constexpr,  # Dh
    ROWS: tl.constexpr,  # positions of a program
    BLOCK: tl.constexpr,  # Dh, rounded up to a power of two
    PACK: tl.constexpr,  # heads
):
    """q, do, p and ds of ROWS queries of each head from `first` on and the keys k; on the diagonal
    p is 0 for later keys.
    """
    number = tl.arange(0, PACK * ROWS)
    row = number % ROWS
    q = _load(q_ptr, first, length, packed, DIM, ROWS, BLOCK, PACK)
    do = _load(do_ptr, first, length, row_of_o, DIM, ROWS, BLOCK, PACK)
    o = _load(o_ptr, first, length, row_of_o, DIM, ROWS, BLOCK, PACK)
    place = number // ROWS * length + first + row
    lse = tl.load(lse_ptr + place, mask=first + row < length, other=float("inf"))
    d = tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)
    p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse[:, None])
    if DIAGONAL:
        p = tl.where(tl.arange(0, ROWS)[None, :] <= row[:, None], p, 0.0)
    ds = (p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - d[:, None])).to(q.dtype)
    return q, do, p.to(do.dtype), ds


@triton.jit
def _short_attention_backward(
    qkv_ptr,  # [B, S, H + 2 K, Dh]
    o_ptr,  # [B, S, H, Dh]
    do_ptr,  # as o: its gradient
    lse_ptr,  # [B, H, S], to base 2
    cos_ptr,  # [S_max, Dh]
    sin_ptr,  # [S_max, Dh]
    out_ptr,  # as qkv: its gradient before RoPE
    dots_ptr,  # [K, B S], float32; or None
    length,  # S
    scale,  # c log2(e)
    factor,  # c
    H: tl.constexpr,  # query heads
    K: tl.constexpr,  # key heads
    DIM: tl.constexpr,  # Dh
    PRECISION: tl.constexpr,  # `launch_sizes.dot_precision`, for products of float32
    ROWS: tl.constexpr,  # positions of a program
    BLOCK: tl.constexpr,  # Dh, rounded up to a power of two
    DOTS: tl.constexpr,  # whether to write dots
    PACK: tl.constexpr,  # query heads at a time, which divides H / K
    DEPENDENT: tl.constexpr = False,  # whether the launch is dependent
):
    begin(DEPENDENT)
    batch = tl.program_id(0) // K
    kv_head = tl.program_id(0) % K
    first = tl.program_id(1) * ROWS
    packed: tl.constexpr = (H + 2 * K) * DIM
    row_of_o: tl.constexpr = H * DIM
    qkv_ptr += batch.to(tl.int64) * length * packed
    out_ptr += batch.to(tl.int64) * length * packed
    o_ptr += batch.to(tl.int64) * length * row_of_o
    do_ptr += batch.to(tl.int64) * length * row_of_o
    k_ptr = qkv_ptr + (H + kv_head) * DIM
    v_ptr = qkv_ptr + (H + K + kv_head) * DIM
    tables = (cos_ptr, sin_ptr, first, length)
    k = _load(k_ptr, first, length, packed, DIM, ROWS, BLOCK)
    v = _load(v_ptr, first, length, packed, DIM, ROWS, BLOCK)
    dk = tl.zeros((ROWS, BLOCK), tl.float32)
    dv = tl.zeros((ROWS, BLOCK), tl.float32)
    dots = tl.zeros((PACK * ROWS,), tl.float32)
    for group in range(H // K // PACK):
        head = kv_head * (H // K) + group * PACK
        pointers = (
            qkv_ptr + head * DIM,
            lse_ptr + (batch * H + head).to(tl.int64) * length,
            o_ptr + head * DIM,
            do_ptr + head * DIM,
        )
        q, do, p, ds = _scores(
            *pointers,
            k,
            v,
            first,
            length,
            packed,
            row_of_o,
            scale,
            True,
            PRECISION,
            DIM,
            ROWS,
            BLOCK,
            PACK,
        )
        dv = tl.dot(tl.trans(p), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)
        dq = tl.dot(ds, k, input_precision=PRECISION)
        if DOTS:
            dots += tl.sum(dq * q.to(tl.float32), axis=1)
        for later in range(first + ROWS, length, ROWS):
            q, do, p, ds = _scores(
                *pointers,
                k,
                v,
                later,
                length,
                packed,
                row_of_o,
                scale,
                False,
                PRECISION,
                DIM,
                ROWS,
                BLOCK,
                PACK,
            )
            dv = tl.dot(tl.trans(p), do, dv, input_precision=PRECISION)
            dk = tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)
        for earlier in range(0, first, ROWS):
            keys = _load(k_ptr, earlier, length, packed, DIM, ROWS, BLOCK)
            values = _load(v_ptr, earlier, length, packed, DIM, ROWS, BLOCK)
            q, do, p, ds = _scores(
                *pointers,
                keys,
                values,
                first,
                length,
                packed,
                row_of_o,
                scale,
                False,
                PRECISION,
                DIM,
                ROWS,
                BLOCK,
                PACK,
            )
            part = tl.dot(ds, keys, input_precision=PRECISION)
            if DOTS:
                dots += tl.sum(part * q.to(tl.float32), axis=1)
            dq += part
        _store(out_ptr + head * DIM, dq * factor, True, *tables, packed, DIM, ROWS, BLOCK, PACK)
    if DOTS:
        k = _load(k_ptr, first, length, packed, DIM, ROWS, BLOCK)
        v = _load(v_ptr, first, length, packed, DIM, ROWS, BLOCK)
        dots = tl.sum(tl.reshape(dots, (PACK, ROWS)), axis=0)
        dots = (dots + tl.sum(dk * k.to(tl.float32), axis=1)) * factor + tl.sum(
            dv * v.to(tl.float32), axis=1
        )
        row = first + tl.arange(0, ROWS)
        rows = tl.num_programs(0) // K * length
        tl.store(dots_ptr + kv_head * rows + batch * length + row, dots, mask=row < length)
    _store(out_ptr + (H + kv_head) * DIM, dk * factor, True, *tables, packed, DIM, ROWS, BLOCK)
    _store(out_ptr + (H + K + kv_head) * DIM, dv, False, *tables, packed, DIM, ROWS, BLOCK)


@checked
def attend_backward(
    dout: Tensor,
    qkv: Tensor,
    attended: tuple[Tensor, Tensor],
    rope: Rope,
    heads: tuple[int, int, int],
) -> tuple[Tensor, Tensor | None]:
    """The gradient of q, k and v before RoPE, packed [B S, (H + 2 K) Dh].

    It also returns `dots` [K, B S] of `product_norm_backward`, if that will need them; otherwise
    None.

    Args:
        dout: [B S, H Dh].
        qkv: [B S, (H + 2 K) Dh], after RoPE.
        attended: o [B S, H Dh] and its log-sum-exp, from Version 3's `flash_attention.attend`.
        rope: for at most 128 positions.
        heads: H, K, K.
    """
    o, lse = attended
    length = rope.length
    kv_heads = heads[1]
    head_dim = rope.head_dim
    out = qkv.new_empty(qkv.shape)
    # o has the stream's shape, and rotations change no dot product.
    needed = o.numel() <= largest("norm", qkv.shape[1])
    dots = qkv.new_empty(kv_heads, qkv.shape[0], dtype=torch.float32) if needed else None
    factor = 1 / math.sqrt(head_dim)
    rows = max(16, min(ROWS, triton.next_power_of_2(length)))
    pack = 2 if heads[0] // kv_heads % 2 == 0 else 1
    _short_attention_backward[qkv.shape[0] // length * kv_heads, ceil_div(length, rows)](
        qkv.contiguous(),
        o.contiguous(),
        dout.contiguous(),
        lse,
        rope.cos,
        rope.sin,
        out,
        dots,
        length,
        factor * LOG2_E,
        factor,
        H=heads[0],
        K=kv_heads,
        DIM=head_dim,
        PRECISION=dot_precision(qkv.dtype),
        ROWS=rows,
        BLOCK=max(16, triton.next_power_of_2(head_dim)),
        PACK=pack,
        num_warps=max(4, rows * pack // 16),
        num_stages=1,
        DOTS=needed,
        **dependent(),
    )
    return out, dots
