"""Trials: kernels that write FP8 where another kernel writes bf16 today, for `quantize` to read.

    TRIAL_NORM=1      the norm of whole rows, by rows and transposed from one tile
    TRIAL_NORM=2      the norm by rows in FP8, and a kernel that transposes bytes
    TRIAL_ROTATE=1    the gradient of q, k and v before RoPE
    TRIAL_WEIGHTS=1   AdamW writes the blocks' weights, tile by tile, in place of bf16 copies
    TRIAL_HEAD=2      the gradient of logits, whose scale needs no maximum: |softmax - onehot| <= 1

Bytes moved for each number, where today's kernel and `quantize` move 4 more (at the head 2 more):

    norm, 1           14       reads x (4) and branch (2), writes their sum (4 + 2) and y (1 + 1)
    norm, 2           13 + 2
    weights           28       reads g (2), w, m, v (12), writes w, m, v (12) and w (1 + 1)
    rotate             4       reads 2, writes 1 + 1
    head               6       reads logits twice (2 + 2), writes 1 + 1
"""

import math

from version3_triton.kernels.checks import checked
from version3_triton.kernels.dependent_launch import begin, dependent
from version3_triton.kernels.launch_sizes import ceil_div, tile
from version3_triton.kernels.linear_cross_entropy import IGNORE_INDEX
from version3_triton.kernels.memory import in_matrix, read
from version4_ultra_fused.kernels.cross_entropy import (
    BLOCK,
    _cross_entropy,
    _cross_entropy_mean,
)
from version4_ultra_fused.kernels.fp8.casts import COLUMNS, TOKENS, _empty, _store, _stored
from version4_ultra_fused.kernels.fp8.scales import trial
from version4_ultra_fused.kernels.reference import LOGITS_SCALE, Norm, Rope, Slot, Stored

import torch
import triton
import triton.language as tl
from torch import Tensor

LOGITS = tl.constexpr(1 / LOGITS_SCALE)


@triton.jit
def _add_norm_quantized(
    x_ptr,  # [N, D]
    add_ptr,  # [N, D]: what is added to x; or None
    weight_ptr,  # [D]
    sum_ptr,  # [N, D]: the sum, rounded to its dtype
    copy_ptr,  # [N, D]: the sum in another dtype
    rstd_ptr,  # [N], float32
    rows_ptr,  # [N, D]: the norm
    columns_ptr,  # [D, N]: the norm transposed
    scale_ptr,  # one float32 element: s
    largest_ptr,  # one float32 element: the largest magnitude
    N,  # tokens
    D,  # columns
    eps,  # added to the mean square
    ADD: tl.constexpr,  # whether there is something to add
    COPY: tl.constexpr,  # whether to write the copy
    TRANSPOSED: tl.constexpr,  # whether to write the norm transposed
    MAX: tl.constexpr,  # the format's largest number
    TOKENS: tl.constexpr,  # rows of a tile
    BLOCK: tl.constexpr,  # D, rounded up to a power of two
    DEPENDENT: tl.constexpr = False,  # whether the launch is dependent
):
    begin(DEPENDENT, True)
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, BLOCK)
    inside = in_matrix(row, N, column, D)
    place = row.to(tl.int64)[:, None] * D + column[None, :]
    x = read(x_ptr + place, inside)
    if ADD:
        x += read(add_ptr + place, inside)
        total = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + place, total, mask=inside)
        x = total.to(tl.float32)
    rstd = 1 / tl.sqrt(tl.sum(x * x, axis=1) / D + eps)
    if COPY:
        tl.store(copy_ptr + place, x, mask=inside)
    tl.store(rstd_ptr + row, rstd, mask=row < N)
    weight = read(weight_ptr + column, column < D)
    y = _stored(x * rstd[:, None] * weight[None, :], scale_ptr, largest_ptr, MAX)
    y = y.to(rows_ptr.dtype.element_ty)
    _store(y, row, column, N, D, rows_ptr)
    if TRANSPOSED:
        _store(tl.trans(y), column, row, D, N, columns_ptr)


@triton.jit
def _transpose(
    x_ptr,  # [N, C]
    out_ptr,  # [C, N]
    N,  # tokens
    C,  # columns
    TOKENS: tl.constexpr,  # rows of a tile
    COLUMNS: tl.constexpr,  # columns of a tile
):
    n = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = n.to(tl.int64)[:, None] * C + c[None, :]
    x = tl.load(x_ptr + place, mask=in_matrix(n, N, c, C))
    _store(tl.trans(x), c, n, C, N, out_ptr)


@triton.jit
def _rotate_back_quantized(
    q,  # [B, H, S, Dh], strided
    k,  # [B, K, S, Dh], strided
    v,  # as k
    rows_ptr,  # [B, S, H + 2 K, Dh]
    columns_ptr,  # the result transposed
    scale_ptr,  # one float32 element: s
    largest_ptr,  # one float32 element: the largest magnitude
    cos_ptr,  # [S_max, Dh]
    sin_ptr,  # [S_max, Dh]
    tokens,  # B S
    length,  # S
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    H: tl.constexpr,  # query heads
    K: tl.constexpr,  # key heads
    DIM: tl.constexpr,  # Dh
    MAX: tl.constexpr,  # the format's largest number
    TOKENS: tl.constexpr,  # tokens of a program
    BLOCK: tl.constexpr,  # Dh, rounded up to a power of two
):
    head = tl.program_id(1)
    source = q
    batch = q_batch
    step = q_head
    row = q_row
    number = head
    if head >= H:
        source = k
        batch = k_batch
        step = k_head
        row = k_row
        number = head - H
    if head >= H + K:
        source = v
        batch = v_batch
        step = v_head
        row = v_row
        number = head - H - K
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, BLOCK)
    pair = tl.arange(0, BLOCK // 2)
    inside = in_matrix(token, tokens, column, DIM)
    start = (
        (token // length).to(tl.int64) * batch
        + number.to(tl.int64) * step
        + (token % length).to(tl.int64) * row
    )
    place = start[:, None] + column[None, :]
    first, second = tl.split(tl.reshape(read(source + place, inside), (TOKENS, BLOCK // 2, 2)))
    table = (token % length)[:, None] * DIM + pair[None, :]
    pairs = tl.where(head < H + K, DIM // 2, 0)  # v is not rotated
    rotated = in_matrix(token, tokens, pair, pairs)
    cos = tl.load(cos_ptr + table, mask=rotated, other=1.0)
    sin = tl.load(sin_ptr + table, mask=rotated, other=0.0)
    x = tl.join(first * cos + second * sin, second * cos - first * sin)
    x = _stored(tl.reshape(x, (TOKENS, BLOCK)), scale_ptr, largest_ptr, MAX)
    x = x.to(rows_ptr.dtype.element_ty)
    place = (token.to(tl.int64) * (H + 2 * K) + head)[:, None] * DIM + column[None, :]
    tl.store(rows_ptr + place, x, mask=inside)
    place = (head * DIM + column).to(tl.int64)[:, None] * tokens + token[None, :]
    tl.store(columns_ptr + place, tl.trans(x), mask=in_matrix(column, DIM, token, tokens))


@triton.jit
def _logits_gradient(
    z_ptr,  # [N, V]: logits
    targets_ptr,  # [N]
    losses_ptr,  # [N], float32: log sum exp z - z_t
    rows_ptr,  # the result by rows
    columns_ptr,  # the result transposed
    N,  # tokens
    V,  # vocabulary
    TOKENS: tl.constexpr,  # rows of a tile
    COLUMNS: tl.constexpr,  # columns of a tile
):
    n = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start = n.to(tl.int64) * V
    target = tl.load(targets_ptr + n, mask=n < N, other=IGNORE_INDEX)
    known = (target >= 0) & (target < V)
    sums = read(losses_ptr + n, n < N) + read(z_ptr + start + target, known)
    z = read(z_ptr + start[:, None] + c[None, :], in_matrix(n, N, c, V))
    dz = tl.exp(z - sums[:, None]) - tl.where(c[None, :] == target[:, None], 1.0, 0.0)
    otherwise = tl.where(target == IGNORE_INDEX, 0.0, float("nan"))
    dz = tl.where(known[:, None], dz * LOGITS, otherwise[:, None])
    dz = dz.to(rows_ptr.dtype.element_ty)
    _store(dz, n, c, N, V, rows_ptr)
    _store(tl.trans(dz), c, n, V, N, columns_ptr)


@triton.jit
def _adamw_quantized(
    w_ptr,  # [O, I], float32
    m_ptr,  # [O, I], float32
    v_ptr,  # [O, I], float32
    g_ptr,  # [O, I]: the gradient
    rows_ptr,  # the weight in FP8 by rows
    columns_ptr,  # the weight in FP8 transposed
    scale_ptr,  # one float32 element: s
    stored_scale_ptr,  # the same, kept with the weight
    largest_ptr,  # one float32 element: the largest magnitude
    step_ptr,  # one float32 element: t
    rows,  # O
    columns,  # I
    lr,  # a number, or one float32 element
    blend1,  # 1 - beta1
    blend2,  # 1 - beta2
    log_beta1,  # to base 2
    log_beta2,  # to base 2
    eps,  # added to the root
    decay,
    RATE_ON_DEVICE: tl.constexpr,  # whether lr is an element
    MAX: tl.constexpr,  # the format's largest number
    TOKENS: tl.constexpr,  # rows of a tile
    COLUMNS: tl.constexpr,  # columns of a tile
):
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = in_matrix(row, rows, column, columns)
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    step = tl.load(step_ptr)
    if RATE_ON_DEVICE:
        lr = tl.load(lr)
    correction1 = 1 - tl.exp2(step * log_beta1)
    correction2 = 1 - tl.exp2(step * log_beta2)
    g = read(g_ptr + place, inside)
    w = tl.load(w_ptr + place, mask=inside, other=0.0)
    m = tl.load(m_ptr + place, mask=inside, other=0.0)
    v = tl.load(v_ptr + place, mask=inside, other=0.0)
    m += blend1 * (g - m)
    v += blend2 * (g * g - v)
    w = w * (1 - lr * decay) - lr * (m / correction1) / (tl.sqrt(v / correction2) + eps)
    tl.store(m_ptr + place, m, mask=inside)
    tl.store(v_ptr + place, v, mask=inside)
    tl.store(w_ptr + place, w, mask=inside)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(stored_scale_ptr, tl.load(scale_ptr))
    w = _stored(w, scale_ptr, largest_ptr, MAX).to(rows_ptr.dtype.element_ty)
    _store(w, row, column, rows, columns, rows_ptr)
    _store(tl.trans(w), column, row, columns, rows, columns_ptr)


def _transposed(rows: Tensor, columns: Tensor) -> None:
    _transpose[ceil_div(rows.shape[0], 128), ceil_div(rows.shape[1], 128)](
        rows,
        columns,
        *rows.shape,
        TOKENS=128,
        COLUMNS=128,
        num_warps=8,
    )


@checked
def add_norm_quantized(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, slot: Slot, dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor, Tensor], Norm]:
    """`add_norm` whose norm is stored as by `quantize`; the sum that is kept is in `dtype`."""
    tokens, size = x.shape
    x = x.contiguous()
    branch = None if branch is None else branch.contiguous()
    total = x if branch is None else torch.empty_like(x)
    rows, columns = _empty(tokens, size, slot)
    rstd = x.new_empty(tokens, dtype=torch.float32)
    rounded = total if x.dtype == dtype else torch.empty_like(x, dtype=dtype)
    transposed = trial("NORM") != 2
    block = triton.next_power_of_2(size)
    by_row = tile("norm_forward", size, x.device)
    tile_rows = (trial("TOKENS") or 16) if transposed else by_row.rows
    warps = (trial("WARPS") or 16) if transposed else by_row.warps
    _add_norm_quantized[ceil_div(tokens, tile_rows),](
        x,
        branch,
        weight,
        total,
        rounded,
        rstd,
        rows,
        columns,
        slot.scale,
        slot.largest,
        tokens,
        size,
        eps,
        ADD=branch is not None,
        COPY=rounded is not total,
        TRANSPOSED=transposed,
        MAX=torch.finfo(slot.dtype).max,
        TOKENS=tile_rows,
        BLOCK=block,
        num_warps=warps,
        **dependent(),
    )
    if not transposed:
        _transposed(rows, columns)
    return total, (rows, columns), Norm(weight, rounded, rstd)


@checked
def rotate_back_quantized(
    dq: Tensor, dk: Tensor, dv: Tensor, rope: Rope, slot: Slot
) -> tuple[Tensor, Tensor]:
    """`rotate_back` whose result is stored as by `quantize`."""
    dq, dk, dv = (x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk, dv))
    batch, heads, length, head_dim = dq.shape
    kv_heads = dk.shape[1]
    rows, columns = _empty(batch * length, (heads + 2 * kv_heads) * head_dim, slot)
    block = triton.next_power_of_2(head_dim)
    tile_rows = max(32, 4096 // block)
    _rotate_back_quantized[ceil_div(batch * length, tile_rows), heads + 2 * kv_heads](
        dq,
        dk,
        dv,
        rows,
        columns,
        slot.scale,
        slot.largest,
        rope.cos,
        rope.sin,
        batch * length,
        length,
        *dq.stride()[:3],
        *dk.stride()[:3],
        *dv.stride()[:3],
        H=heads,
        K=kv_heads,
        DIM=head_dim,
        MAX=torch.finfo(slot.dtype).max,
        TOKENS=tile_rows,
        BLOCK=block,
        num_warps=4,
    )
    return rows, columns


@checked
def cross_entropy_quantized(
    logits: Tensor, targets: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The mean loss, its gradient by rows and transposed, and the gradient's scale."""
    tokens, vocabulary = logits.shape
    targets = targets.contiguous()
    losses = logits.new_empty(tokens, dtype=torch.float32)
    mean = logits.new_empty((), dtype=torch.float32)
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    _cross_entropy[tokens,](
        logits,
        targets,
        losses,
        vocabulary,
        1 / tokens,
        GRADIENT=False,
        SHORT=vocabulary <= block,
        BLOCK=block,
        num_warps=max(4, block // 1024),
        **dependent(),
    )
    _cross_entropy_mean[1,](
        losses,
        targets,
        mean,
        logits,
        tokens,
        vocabulary,
        GRADIENT=False,
        BLOCK=2048,
        num_warps=8,
        **dependent(),
    )
    rows = torch.empty_like(logits, dtype=dtype)
    columns = rows.new_empty(vocabulary, tokens)
    _logits_gradient[ceil_div(tokens, TOKENS), ceil_div(vocabulary, COLUMNS)](
        logits,
        targets,
        losses,
        rows,
        columns,
        tokens,
        vocabulary,
        TOKENS=TOKENS,
        COLUMNS=COLUMNS,
        num_warps=4,
    )
    return mean, rows, columns, LOGITS_SCALE / (targets != IGNORE_INDEX.value).sum().clamp(min=1)


@checked
def adamw_quantized(
    weight: Tensor,
    moments: tuple[Tensor, Tensor],
    gradient: Tensor,
    slot: Slot,
    stored: Stored,
    steps: Tensor,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """`adamw` of a matrix [O, I], which also stores the new weight as by `quantize`."""
    _adamw_quantized[ceil_div(weight.shape[0], TOKENS), ceil_div(weight.shape[1], COLUMNS)](
        weight,
        *moments,
        gradient,
        stored.rows,
        stored.columns,
        slot.scale,
        stored.scale,
        slot.largest,
        steps,
        *weight.shape,
        lr,
        *(1 - beta for beta in betas),
        *(math.log2(beta) for beta in betas),
        eps,
        weight_decay,
        RATE_ON_DEVICE=isinstance(lr, Tensor),
        MAX=torch.finfo(slot.dtype).max,
        TOKENS=TOKENS,
        COLUMNS=COLUMNS,
        num_warps=8,
    )
