"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of queries and keys in one launch.

A head's halves (a, b) at position s turn by the angles of `cos` and `sin` [S, Dh]:

    forward     a' = a cos - b sin        b' = b cos + a sin
    backward    the same with -sin: a rotation's transpose turns back

Nothing is saved but the tables. Every number of q and k is read once and written once, 2 N Dh (H +
K) each way for N = B S; the eager version moves five times as many, in five operators for q and
five for k. Inputs may be strided, as the parts of a fused QKV product are; outputs and gradients
are [B, S, heads, Dh] in memory, seen as [B, heads, S, Dh], as the products before and after want
them.
"""

from tracepage.errors import UsageError
from version3_triton.kernels.checks import checked, refuse_odd
from version3_triton.kernels.launch_sizes import ceil_div, tile
from version3_triton.kernels.memory import in_matrix, read

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable


@triton.jit
def _rotate(
    x_ptr,  # [B, HEADS, S, Dh], strided
    y_ptr,  # [B, S, HEADS, Dh] in memory
    cos_ptr,  # [S_max, Dh]
    sin_ptr,  # [S_max, Dh]
    program,  # the number of the tile
    rows,  # B S HEADS
    length,  # S
    batch_stride,  # elements between sequences of x
    head_stride,  # elements between heads
    position_stride,  # elements between positions
    HEADS: tl.constexpr,  # H or K
    HALF: tl.constexpr,  # Dh / 2
    SIGN: tl.constexpr,  # 1 forward, -1 backward
    ROWS: tl.constexpr,  # heads of a tile
    BLOCK: tl.constexpr,  # Dh / 2, rounded up to a power of two
):
    """Turns ROWS heads; row = (b S + s) HEADS + h."""
    row = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = in_matrix(row, rows, column, HALF)
    head = row % HEADS
    token = row // HEADS
    position = token % length
    batch = token // length
    source = (batch * batch_stride + head * head_stride + position * position_stride)[
        :, None
    ] + column[None, :]
    table = position[:, None] * (2 * HALF) + column[None, :]
    cos = read(cos_ptr + table, inside)
    sin = read(sin_ptr + table, inside) * SIGN
    first = read(x_ptr + source, inside)
    second = read(x_ptr + source + HALF, inside)
    target = y_ptr + row[:, None] * (2 * HALF) + column[None, :]
    tl.store(target, first * cos - second * sin, mask=inside)
    tl.store(target + HALF, second * cos + first * sin, mask=inside)


@triton.jit
def _rope_forward(
    q_ptr,  # [B, H, S, Dh], strided
    k_ptr,  # [B, K, S, Dh], strided
    q_out_ptr,  # [B, S, H, Dh] in memory
    k_out_ptr,  # [B, S, K, Dh] in memory
    cos_ptr,  # [S_max, Dh]
    sin_ptr,  # [S_max, Dh]
    tokens,  # B S
    length,  # S
    q_programs,  # programs that turn q
    q_batch,  # elements between sequences of q
    q_head,  # elements between heads of q
    q_position,  # elements between positions of q
    k_batch,  # elements between sequences of k
    k_head,  # elements between heads of k
    k_position,  # elements between positions of k
    H: tl.constexpr,  # query heads
    K: tl.constexpr,  # key heads
    HALF: tl.constexpr,  # Dh / 2
    SIGN: tl.constexpr,  # 1 forward, -1 backward
    ROWS: tl.constexpr,  # heads of a tile
    BLOCK: tl.constexpr,  # Dh / 2, rounded up to a power of two
):
    """The first q_programs programs turn q, the others k. SIGN is 1 forward and -1 backward."""
    program = tl.program_id(0)
    if program < q_programs:
        _rotate(
            q_ptr,
            q_out_ptr,
            cos_ptr,
            sin_ptr,
            program,
            tokens * H,
            length,
            q_batch,
            q_head,
            q_position,
            H,
            HALF,
            SIGN,
            ROWS,
            BLOCK,
        )
    else:
        _rotate(
            k_ptr,
            k_out_ptr,
            cos_ptr,
            sin_ptr,
            program - q_programs,
            tokens * K,
            length,
            k_batch,
            k_head,
            k_position,
            K,
            HALF,
            SIGN,
            ROWS,
            BLOCK,
        )


def _turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sign: int) -> tuple[Tensor, Tensor]:
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    batch, heads, length, head_dim = q.shape
    kv_heads = k.shape[1]
    tokens = batch * length
    turned = [x.new_empty(batch, length, x.shape[1], head_dim).transpose(1, 2) for x in (q, k)]
    blocks = tile("rope", head_dim // 2, q.device)
    q_programs, k_programs = (ceil_div(tokens * n, blocks.rows) for n in (heads, kv_heads))
    _rope_forward[q_programs + k_programs,](
        q,
        k,
        *turned,
        cos,
        sin,
        tokens,
        length,
        q_programs,
        *q.stride()[:3],
        *k.stride()[:3],
        H=heads,
        K=kv_heads,
        HALF=head_dim // 2,
        SIGN=sign,
        ROWS=blocks.rows,
        BLOCK=blocks.columns,
        num_warps=blocks.warps,
    )
    return turned[0], turned[1]


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos = cos.contiguous()
        sin = sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _turn(q, k, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq: Tensor, dk: Tensor):
        cos, sin = ctx.saved_tensors
        return *_turn(dq, dk, cos, sin, -1), None, None


@checked
def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys by their positions, computed in float32.

    Args:
        q: [B, H, S, Dh], Dh even.
        k: [B, K, S, Dh].
        cos, sin: [S_max, Dh] with S_max >= S, from `common.rope.rope_tables`.

    Returns:
        Rotated q and k, shapes and types unchanged.

    Raises:
        UsageError: S is longer than the tables, Dh is odd or 0, or shapes differ.
    """
    known = q.ndim == k.ndim == 4 and cos.ndim == 2 and cos.shape == sin.shape
    if not known or q.shape[::2] != k.shape[::2] or not q.shape[3] == k.shape[3] == cos.shape[1]:
        shapes = [[*x.shape] for x in (q, k, cos, sin)]
        raise UsageError(
            "RoPE takes q and k alike but for their heads, and two tables [S_max, Dh], "
            f"not {shapes}"
        )
    refuse_odd(q.shape[3])
    if q.shape[2] > cos.shape[0]:
        raise UsageError(f"the rotary tables hold {cos.shape[0]} positions, not {q.shape[2]}")
    return _Rope.apply(q, k, cos, sin)
