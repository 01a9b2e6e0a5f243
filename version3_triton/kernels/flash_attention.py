"""Causal attention without an [S, S] matrix in memory (Dao et al. 2022, arXiv:2205.14135; Dao 2023,
arXiv:2307.08691).

For a query row i, keys j <= i, scale c = 1 / sqrt(Dh):

    s_ij = c q_i k_j                l_i = log sum_j exp(s_ij)
    p_ij = exp(s_ij - l_i)          o_i = sum_j p_ij v_j

Forward: a program holds BLOCK_M queries and goes over the keys in blocks, with a running maximum m
and sum (online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867); a larger maximum rescales
what was summed so far. Saved are q, k, v, o and l.

Backward, with d_i = sum_e o_ie do_ie, recomputes p from l:

    ds_ij = p_ij (do_i v_j - d_i)   dq_i = c sum_j ds_ij k_j
    dk_j = c sum_i ds_ij q_i        dv_j = sum_i p_ij do_i

in two launches without atomics: one owns blocks of queries (dq, and d for the next), the other
blocks of keys (dk, dv); that one goes over all heads that share a key head, so grouped heads need
neither copies of K and V nor sums afterwards. The price is that s and do v^T are computed twice: 7
products in place of 5, against bits that never change.

Bytes in 16 bits: forward 2 B S Dh (2 H + 2 K), backward three times as many in its two kernels,
against 4 and more passes over B H S^2 numbers. FLOPs: the products take 2 B H S^2 Dh forward (the
half at or before the diagonal) and 7/2 of that backward. Scores and sums are float32, products of
float32 as `launch_sizes.dot_precision` says; exponentials are to base 2, with log2(e) in the scale.
"""

import math

from tracepage.errors import UsageError
from version3_triton.kernels.checks import checked
from version3_triton.kernels.dependent_launch import begin
from version3_triton.kernels.launch_sizes import (
    TileConfig,
    attention_blocks,
    ceil_div,
    dot_precision,
)
from version3_triton.kernels.memory import in_matrix

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

LOG2_E = math.log2(math.e)
MAX_HEAD_DIM = 128
MAX_HEADS = 65535  # B H, which is a grid's second dimension
MAX_OFFSET = 2**31  # Rows of a head are counted in int32.


@triton.jit
def _block(pointer, rows, length, row_stride, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[rows, BLOCK_D] of a head, zeros beyond Dh. Beyond the sequence the last row again, so that
    loads need no mask there.

    Such queries are not stored, or have p = 0 by a log-sum-exp of infinity; such keys fall to the
    causal mask.
    """
    column = tl.arange(0, BLOCK_D)
    place = pointer + tl.minimum(rows, length - 1)[:, None] * row_stride + column[None, :]
    return (
        tl.load(place)
        if DIM == BLOCK_D
        else tl.load(place, mask=(column < DIM)[None, :], other=0.0)
    )


@triton.jit
def _write(
    pointer,  # the head
    rows,  # [rows]: positions
    length,  # S
    row_stride,  # elements between positions
    block,  # [rows, BLOCK_D]
    DIM: tl.constexpr,  # Dh
    BLOCK_D: tl.constexpr,  # Dh, rounded up to a power of two
):
    column = tl.arange(0, BLOCK_D)
    inside = in_matrix(rows, length, column, DIM)
    tl.store(
        pointer + rows[:, None] * row_stride + column[None, :],
        block,
        mask=inside,
    )


@triton.jit
def _head(pointer, batch, head, batch_stride, head_stride):
    """Where a head of a strided tensor begins."""
    return pointer + batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride


@triton.jit
def _own_head(pointer, batch, head, length, HEADS: tl.constexpr, DIM: tl.constexpr):
    """The same of a tensor that is [B, S, HEADS, DIM] in memory, as o, do, dq, dk and dv are."""
    return pointer + (batch.to(tl.int64) * length * HEADS + head) * DIM


@triton.jit
def _flash_attention_forward(
    q_ptr,  # [B, H, S, Dh], strided
    k_ptr,  # [B, K, S, Dh], strided
    v_ptr,  # as k
    o_ptr,  # [B, S, H, Dh] in memory
    lse_ptr,  # [B, H, S], float32: l, to base 2
    length,  # S
    scale,  # c log2(e)
    q_batch,  # elements between sequences of q
    q_head,  # elements between heads of q
    q_row,  # elements between positions of q
    k_batch,  # elements between sequences of k
    k_head,  # elements between heads of k
    k_row,  # elements between positions of k
    v_batch,  # elements between sequences of v
    v_head,  # elements between heads of v
    v_row,  # elements between positions of v
    H: tl.constexpr,  # query heads
    GROUPS: tl.constexpr,  # query heads that share a key head
    DIM: tl.constexpr,  # Dh
    BLOCK_D: tl.constexpr,  # Dh, rounded up to a power of two
    PRECISION: tl.constexpr,  # `launch_sizes.dot_precision`, for products of float32
    BLOCK_M: tl.constexpr,  # queries of a tile
    BLOCK_N: tl.constexpr,  # keys of a tile
    DEPENDENT: tl.constexpr = False,  # whether the launch is dependent
):
    begin(DEPENDENT, True)
    # The last rows have the most keys: they start first.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    batch = tl.program_id(1) // H
    head = tl.program_id(1) % H
    kv_head = head // GROUPS
    query = first + tl.arange(0, BLOCK_M)
    k_ptr = _head(k_ptr, batch, kv_head, k_batch, k_head)
    v_ptr = _head(v_ptr, batch, kv_head, v_batch, v_head)
    q = _block(_head(q_ptr, batch, head, q_batch, q_head), query, length, q_row, DIM, BLOCK_D)
    o = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    diagonal = first // BLOCK_N * BLOCK_N
    end = tl.minimum(first + BLOCK_M, length)
    for masked in tl.static_range(2):  # Before the diagonal every query sees every key.
        for start in range(diagonal if masked else 0, end if masked else diagonal, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            k = _block(k_ptr, key, length, k_row, DIM, BLOCK_D)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if masked:
                s = tl.where(key[None, :] <= query[:, None], s, float("-inf"))
            new = tl.maximum(highest, tl.max(s, axis=1) * scale)
            p = tl.exp2(s * scale - new[:, None])  # One multiply-add and one exponential a score.
            shrink = tl.exp2(highest - new)
            total = total * shrink + tl.sum(p, axis=1)
            v = _block(v_ptr, key, length, v_row, DIM, BLOCK_D)
            o = tl.dot(p.to(v.dtype), v, o * shrink[:, None], input_precision=PRECISION)
            highest = new
    _write(
        _own_head(o_ptr, batch, head, length, H, DIM),
        query,
        length,
        H * DIM,
        o / total[:, None],
        DIM,
        BLOCK_D,
    )
    place = tl.program_id(1).to(tl.int64) * length + query
    tl.store(lse_ptr + place, highest + tl.log2(total), mask=query < length)


@triton.jit
def _flash_attention_backward_queries(
    q_ptr,  # [B, H, S, Dh], strided
    k_ptr,  # [B, K, S, Dh], strided
    v_ptr,  # as k
    o_ptr,  # [B, S, H, Dh] in memory
    do_ptr,  # as o: its gradient
    lse_ptr,  # [B, H, S], float32: l, to base 2
    d_ptr,  # [B, H, S], float32: sums of o do
    dq_ptr,  # as o: the gradient of q
    length,  # S
    scale,  # c log2(e)
    factor,  # c
    q_batch,  # elements between sequences of q
    q_head,  # elements between heads of q
    q_row,  # elements between positions of q
    k_batch,  # elements between sequences of k
    k_head,  # elements between heads of k
    k_row,  # elements between positions of k
    v_batch,  # elements between sequences of v
    v_head,  # elements between heads of v
    v_row,  # elements between positions of v
    H: tl.constexpr,  # query heads
    GROUPS: tl.constexpr,  # query heads that share a key head
    DIM: tl.constexpr,  # Dh
    BLOCK_D: tl.constexpr,  # Dh, rounded up to a power of two
    PRECISION: tl.constexpr,  # `launch_sizes.dot_precision`, for products of float32
    BLOCK_M: tl.constexpr,  # queries of a tile
    BLOCK_N: tl.constexpr,  # keys of a tile
):
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    batch = tl.program_id(1) // H
    head = tl.program_id(1) % H
    kv_head = head // GROUPS
    query = first + tl.arange(0, BLOCK_M)
    k_ptr = _head(k_ptr, batch, kv_head, k_batch, k_head)
    v_ptr = _head(v_ptr, batch, kv_head, v_batch, v_head)
    q = _block(_head(q_ptr, batch, head, q_batch, q_head), query, length, q_row, DIM, BLOCK_D)
    o = _block(_own_head(o_ptr, batch, head, length, H, DIM), query, length, H * DIM, DIM, BLOCK_D)
    do = _block(
        _own_head(do_ptr, batch, head, length, H, DIM), query, length, H * DIM, DIM, BLOCK_D
    )
    place = tl.program_id(1).to(tl.int64) * length + query
    lse = tl.load(lse_ptr + place, mask=query < length, other=0.0)
    d = tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)
    tl.store(d_ptr + place, d, mask=query < length)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    diagonal = first // BLOCK_N * BLOCK_N
    end = tl.minimum(first + BLOCK_M, length)
    for masked in tl.static_range(2):
        for start in range(diagonal if masked else 0, end if masked else diagonal, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            k = _block(k_ptr, key, length, k_row, DIM, BLOCK_D)
            v = _block(v_ptr, key, length, v_row, DIM, BLOCK_D)
            p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse[:, None])
            if masked:
                p = tl.where(key[None, :] <= query[:, None], p, 0.0)
            ds = p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - d[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    _write(
        _own_head(dq_ptr, batch, head, length, H, DIM),
        query,
        length,
        H * DIM,
        dq * factor,
        DIM,
        BLOCK_D,
    )


@triton.jit
def _flash_attention_backward_keys(
    q_ptr,  # [B, H, S, Dh], strided
    k_ptr,  # [B, K, S, Dh], strided
    v_ptr,  # as k
    do_ptr,  # as o: its gradient
    lse_ptr,  # [B, H, S], float32: l, to base 2
    d_ptr,  # [B, H, S], float32: sums of o do
    dk_ptr,  # [B, S, K, Dh] in memory: the gradient of k
    dv_ptr,  # as dk: the gradient of v
    length,  # S
    scale,  # c log2(e)
    factor,  # c
    q_batch,  # elements between sequences of q
    q_head,  # elements between heads of q
    q_row,  # elements between positions of q
    k_batch,  # elements between sequences of k
    k_head,  # elements between heads of k
    k_row,  # elements between positions of k
    v_batch,  # elements between sequences of v
    v_head,  # elements between heads of v
    v_row,  # elements between positions of v
    H: tl.constexpr,  # query heads
    GROUPS: tl.constexpr,  # query heads that share a key head
    DIM: tl.constexpr,  # Dh
    BLOCK_D: tl.constexpr,  # Dh, rounded up to a power of two
    PRECISION: tl.constexpr,  # `launch_sizes.dot_precision`, for products of float32
    BLOCK_M: tl.constexpr,  # queries of a tile
    BLOCK_N: tl.constexpr,  # keys of a tile
):
    first = tl.program_id(0) * BLOCK_N  # The first keys have the most queries.
    K: tl.constexpr = H // GROUPS
    batch = tl.program_id(1) // K
    kv_head = tl.program_id(1) % K
    key = first + tl.arange(0, BLOCK_N)
    k = _block(_head(k_ptr, batch, kv_head, k_batch, k_head), key, length, k_row, DIM, BLOCK_D)
    v = _block(_head(v_ptr, batch, kv_head, v_batch, v_head), key, length, v_row, DIM, BLOCK_D)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    diagonal = first // BLOCK_M * BLOCK_M
    # From here on every query sees every key.
    clear = tl.minimum((first + BLOCK_N + BLOCK_M - 2) // BLOCK_M * BLOCK_M, length)
    for group in range(GROUPS):
        head = kv_head * GROUPS + group
        q_head_ptr = _head(q_ptr, batch, head, q_batch, q_head)
        do_head_ptr = _own_head(do_ptr, batch, head, length, H, DIM)
        row = (batch * H + head).to(tl.int64) * length
        # Rows are keys and columns queries, so that no product needs its first factor turned.
        for seen in tl.static_range(2):
            for start in range(clear if seen else diagonal, length if seen else clear, BLOCK_M):
                query = start + tl.arange(0, BLOCK_M)
                q = _block(q_head_ptr, query, length, q_row, DIM, BLOCK_D)
                do = _block(do_head_ptr, query, length, H * DIM, DIM, BLOCK_D)
                lse = tl.load(lse_ptr + row + query, mask=query < length, other=float("inf"))
                d = tl.load(d_ptr + row + query, mask=query < length, other=0.0)
                s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
                p = tl.exp2(s * scale - lse[None, :])
                if not seen:
                    p = tl.where(key[:, None] <= query[None, :], p, 0.0)
                dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
                ds = p * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - d[None, :])
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    _write(
        _own_head(dk_ptr, batch, kv_head, length, K, DIM),
        key,
        length,
        K * DIM,
        dk * factor,
        DIM,
        BLOCK_D,
    )
    _write(
        _own_head(dv_ptr, batch, kv_head, length, K, DIM), key, length, K * DIM, dv, DIM, BLOCK_D
    )


def _new(x: Tensor) -> Tensor:
    """[B, heads, S, Dh], in memory [B, S, heads, Dh]: what the products before and after attention
    want.
    """
    batch, heads, length, head_dim = x.shape
    return x.new_empty(batch, length, heads, head_dim).transpose(1, 2)


def _sizes(q: Tensor, k: Tensor, blocks: TileConfig) -> dict[str, object]:
    head_dim = q.shape[-1]
    return {
        "H": q.shape[1],
        "GROUPS": q.shape[1] // k.shape[1],
        "DIM": head_dim,
        "BLOCK_D": max(16, 1 << (head_dim - 1).bit_length()),
        "PRECISION": dot_precision(q.dtype),
        **blocks.arguments,
    }


@checked
def attend(q: Tensor, k: Tensor, v: Tensor, **launch: bool) -> tuple[Tensor, Tensor]:
    """Attention without autograd, in memory as `attention` says, and l to base 2 [B, H, S] in
    float32.

    Args:
        q, k, v: as of `attention`, with Dh contiguous.
        launch: from `dependent_launch.dependent`.

    Raises:
        UsageError: B H or a head's offsets are too large.
    """
    batch, heads, length, head_dim = q.shape
    end = (length - 1) * max(heads * head_dim, q.stride(2), k.stride(2), v.stride(2)) + head_dim
    if batch * heads > MAX_HEADS or end > MAX_OFFSET:
        raise UsageError(
            f"the attention kernel takes B H to {MAX_HEADS} and heads that end within "
            f"2^31 numbers, not {batch * heads} and {end}: switch it off"
        )
    o = _new(q)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    blocks = attention_blocks("forward", head_dim, q.dtype)
    _flash_attention_forward[ceil_div(length, blocks.m), batch * heads](
        q,
        k,
        v,
        o,
        lse,
        length,
        LOG2_E / math.sqrt(head_dim),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        **_sizes(q, k, blocks),
        **launch,
    )
    return o, lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        o, lse = attend(q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do: Tensor):
        q, k, v, o, lse = ctx.saved_tensors
        # Nothing to do where o went straight into the output projection, and no hook on saved
        # tensors gave it other strides.
        o, do = (x.transpose(1, 2).contiguous() for x in (o, do))
        batch, heads, length, head_dim = q.shape
        dq = _new(q)
        dk = _new(k)
        dv = _new(v)
        d = torch.empty_like(lse)
        factor = 1 / math.sqrt(head_dim)
        strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
        numbers = (length, factor * LOG2_E, factor, *strides)
        blocks = attention_blocks("queries", head_dim, q.dtype)
        _flash_attention_backward_queries[ceil_div(length, blocks.m), batch * heads](
            q,
            k,
            v,
            o,
            do,
            lse,
            d,
            dq,
            *numbers,
            **_sizes(q, k, blocks),
        )
        blocks = attention_blocks("keys", head_dim, q.dtype)
        _flash_attention_backward_keys[ceil_div(length, blocks.n), batch * k.shape[1]](
            q,
            k,
            v,
            do,
            lse,
            d,
            dk,
            dv,
            *numbers,
            **_sizes(q, k, blocks),
        )
        return dq, dk, dv


@checked
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention; query head h reads key/value head h // (H / K).

    Args:
        q: [B, H, S, Dh], Dh at most 128.
        k, v: [B, K, S, Dh], K divides H; any strides with Dh contiguous, one type for all three.

    Returns:
        [B, H, S, Dh], in memory [B, S, H, Dh].

    Raises:
        UsageError: Dh is larger or 0, k and v don't fit q in shape or type, B H is above 65,535, or
            a head of an input or of the result does not end within 2^31 numbers of its beginning.
    """
    if not q.ndim == k.ndim == v.ndim == 4 or not k.shape[1] or not q.shape[3]:
        shapes = [[*x.shape] for x in (q, k, v)]
        raise UsageError(
            "attention takes q [B, H, S, Dh], k and v [B, K, S, Dh], with K and Dh at least 1, "
            f"not {shapes}"
        )
    batch, heads, length, head_dim = q.shape
    kv_heads = k.shape[1]
    if heads % kv_heads or not k.shape == v.shape == (batch, kv_heads, length, head_dim):
        raise UsageError(
            f"attention of q {[*q.shape]} takes k and v alike but for fewer heads, "
            f"not {[*k.shape]}, {[*v.shape]}"
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype.itemsize not in (2, 4):
        raise UsageError(
            "attention takes q, k and v in one type of 16 or 32 bits, "
            f"not {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if head_dim > MAX_HEAD_DIM:
        raise UsageError(
            f"the attention kernel takes head dimensions to {MAX_HEAD_DIM}, not {head_dim}: "
            "switch it off"
        )
    return _Attention.apply(q, k, v)
