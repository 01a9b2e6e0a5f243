"""RoPE and SwiGLU beside a library's matrix product, as kernels of their own, forward and backward.

`rotate` and `swiglu` run where `tiles.py` has no epilogue for a product of this size on this GPU.
`rotate_back` runs after every form of attention but the short one. `swiglu_backward` always runs,
but for FP8. Rows that are combined are neighbours, as in `memory/interleaved.py`, so a program
reads consecutive memory and each pair is in one thread. Bytes moved, e for an element:

    rotate             2 Dh (H + K) e a token        in place
    rotate_back        2 Dh (H + 2 K) e a token      packs dq, dk and dv as well
    swiglu             3 F e a token
    swiglu_backward    5 F e a token                 in place of gate and up
"""

from version3_triton.kernels.checks import checked
from version3_triton.kernels.dependent_launch import begin, dependent
from version3_triton.kernels.launch_sizes import ceil_div
from version3_triton.kernels.memory import in_matrix, read
from version4_ultra_fused.kernels.reference import Rope
from version4_ultra_fused.kernels.tiles import largest

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # pairs of a program


@triton.jit
def swiglu_gradient(gate, up, dy):
    """Gradients of gate and up for y = silu(gate) up."""
    sigmoid = tl.sigmoid(gate)
    return dy * up * sigmoid * (1 + gate * (1 - sigmoid)), dy * gate * sigmoid


@triton.jit
def _swiglu(gate_up_ptr, y_ptr, pairs, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False):
    begin(DEPENDENT, True)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    left = pairs - first
    both = tl.arange(0, 2 * BLOCK)
    pair = tl.arange(0, BLOCK)
    gate_up = read(gate_up_ptr + 2 * first + both, both < 2 * left)
    gate, up = tl.split(tl.reshape(gate_up, (BLOCK, 2)))
    tl.store(
        y_ptr + first + pair,
        gate * tl.sigmoid(gate) * up,
        mask=pair < left,
    )


@triton.jit
def _swiglu_backward(
    dy_ptr,  # [N, F]
    gate_up_ptr,  # [N, 2 F]: gate and up, then their gradients
    dots_ptr,  # [blocks of a row, rows], float32; or None
    rows,  # N, or 1 without DOTS
    pairs,  # in a row: F, or N F
    DOTS: tl.constexpr,  # whether to write parts of each row's sum of gate dgate + up dup
    BLOCK: tl.constexpr,  # pairs of a program
    DEPENDENT: tl.constexpr = False,  # whether the launch is dependent
):
    """Rows of so many pairs. DOTS: dots [blocks of a row, rows] are parts of each row's sum of gate
    dgate + up dup.
    """
    begin(DEPENDENT, True)
    blocks = tl.cdiv(pairs, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = (tl.program_id(0) % blocks).to(tl.int64)
    first = row * pairs + block * BLOCK
    left = pairs - block * BLOCK
    both = tl.arange(0, 2 * BLOCK)
    pair = tl.arange(0, BLOCK)
    inside = both < 2 * left
    gate_up = read(gate_up_ptr + 2 * first + both, inside)
    gate, up = tl.split(tl.reshape(gate_up, (BLOCK, 2)))
    dy = read(dy_ptr + first + pair, pair < left)
    dgate, dup = swiglu_gradient(gate, up, dy)
    if DOTS:
        tl.store(dots_ptr + block * rows + row, tl.sum(gate * dgate + up * dup))
    out = tl.reshape(tl.join(dgate, dup), (2 * BLOCK,))
    tl.store(gate_up_ptr + 2 * first + both, out, mask=inside)


@triton.jit
def _rotate(
    q,  # [B, H, S, Dh], strided
    k,  # [B, K, S, Dh], strided
    v,  # as k
    out_ptr,  # [B, S, H + 2 K, Dh]
    cos_ptr,  # [S_max, Dh]
    sin_ptr,  # [S_max, Dh]
    tokens,  # B S
    length,  # S
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
    K: tl.constexpr,  # key heads
    DIM: tl.constexpr,  # Dh
    SIGN: tl.constexpr,  # 1, or -1 to rotate back
    ROWS: tl.constexpr,  # tokens of a program
    BLOCK: tl.constexpr,  # Dh, rounded up to a power of two
    DEPENDENT: tl.constexpr = False,  # whether the launch is dependent
):
    """A program takes ROWS tokens of one head of q, k or v [B, heads, S, Dh]; out [B, S, H + 2 K,
    Dh]. SIGN -1 rotates back.
    """
    begin(DEPENDENT, True)
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
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    pair = tl.arange(0, BLOCK // 2)
    inside = in_matrix(token, tokens, column, DIM)
    start = (
        (token // length).to(tl.int64) * batch
        + number.to(tl.int64) * step
        + (token % length).to(tl.int64) * row
    )
    place = start[:, None] + column[None, :]
    first, second = tl.split(tl.reshape(read(source + place, inside), (ROWS, BLOCK // 2, 2)))
    table = (token % length)[:, None] * DIM + pair[None, :]
    # v is not rotated; a mask of a scalar stops Triton 3.9's interpreter.
    pairs = tl.where(head < H + K, DIM // 2, 0)
    rotated = in_matrix(token, tokens, pair, pairs)
    cos = tl.load(cos_ptr + table, mask=rotated, other=1.0)
    sin = tl.load(sin_ptr + table, mask=rotated, other=0.0) * SIGN
    out = tl.reshape(tl.join(first * cos - second * sin, second * cos + first * sin), (ROWS, BLOCK))
    place = (token.to(tl.int64) * (H + 2 * K) + head)[:, None] * DIM + column[None, :]
    tl.store(out_ptr + place, out, mask=inside)


@checked
def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) up [N, F] of gate_up [N, 2 F]."""
    y = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _swiglu[ceil_div(y.numel(), BLOCK),](
        gate_up.contiguous(), y, y.numel(), BLOCK=BLOCK, num_warps=4, **dependent()
    )
    return y


@checked
def swiglu_backward(
    dhidden: Tensor, gate_up: Tensor, total: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The gradient of gate_up [N, 2 F] in its place, from that of silu(gate) up [N, F].

    It also returns `dots` of `product_norm_backward`, if that will need them for the sum `total`
    [N, D]; otherwise None. Nothing reads gate and up afterwards, and a second buffer of this size
    would be the largest of the backward pass.
    """
    assert gate_up.is_contiguous()
    dy = dhidden.contiguous()
    dots = (
        total is not None
        and dy.dtype.itemsize == 2
        and total.numel() <= largest("norm", gate_up.shape[1])
    )
    rows, pairs = dy.shape if dots else (1, dy.numel())
    block = min(BLOCK, triton.next_power_of_2(pairs))
    blocks = ceil_div(pairs, block)
    parts = dy.new_empty(blocks, rows, dtype=torch.float32) if dots else None
    _swiglu_backward[rows * blocks,](
        dy, gate_up, parts, rows, pairs, DOTS=dots, BLOCK=block, num_warps=4, **dependent()
    )
    return gate_up, parts


def _launch(
    parts: tuple[Tensor, Tensor, Tensor], out: Tensor, rope: Rope, heads: int, sign: int
) -> None:
    """`parts` are q, k and v, of which the first `heads` heads are written."""
    q, k, v = parts
    batch, q_heads, length, head_dim = q.shape
    block = triton.next_power_of_2(head_dim)
    rows = max(1, 2048 // block)
    _rotate[ceil_div(batch * length, rows), heads](
        q,
        k,
        v,
        out,
        rope.cos,
        rope.sin,
        batch * length,
        length,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        H=q_heads,
        K=k.shape[1],
        DIM=head_dim,
        SIGN=sign,
        ROWS=rows,
        BLOCK=block,
        num_warps=4,
        **dependent(),
    )


@checked
def rotate(qkv: Tensor, rope: Rope, rotated: int) -> Tensor:
    """Rotates the first `rotated` columns of qkv [B S, (H + 2 K) Dh] in place."""
    assert qkv.is_contiguous()
    batch = len(qkv) // rope.length
    head_dim = rope.head_dim
    # [B, H + K, S, Dh]
    x = qkv[:, :rotated].view(batch, rope.length, rotated // head_dim, head_dim).transpose(1, 2)
    v_heads = (qkv.shape[1] - rotated) // head_dim
    heads = x.shape[1] - v_heads
    _launch((x[:, :heads], x[:, heads:], x[:, heads:]), qkv, rope, x.shape[1], 1)
    return qkv


@checked
def rotate_back(dq: Tensor, dk: Tensor, dv: Tensor, rope: Rope) -> Tensor:
    """The gradient of q, k and v before RoPE, packed [B S, (H + 2 K) Dh].

    Args:
        dq: [B, H, S, Dh], any strides with Dh contiguous.
        dk, dv: [B, K, S, Dh].
    """
    dq, dk, dv = (x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk, dv))
    batch, heads, length, head_dim = dq.shape
    kv_heads = dk.shape[1]
    out = dq.new_empty(batch * length, (heads + 2 * kv_heads) * head_dim)
    _launch((dq, dk, dv), out, rope, heads + 2 * kv_heads, -1)
    return out
