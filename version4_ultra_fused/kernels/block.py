"""A whole transformer block, forward, in one kernel: a program computes the block for one sequence of at most 128 tokens.

For the residual stream x [S, D] of a sequence:

    q, k, v = RoPE(norm(x) Wqkv^T)            h = x + softmax(q k^T / sqrt(Dh), causal) v Wo^T
    gate, up = norm(h) Wgu^T                  y = h + (silu(gate) up) Wd^T

All of it is fused: both norms, the four products, RoPE, attention, SwiGLU and both residual additions. Products are in the dtype
of the weights, with sums in float32, and the residual stream is float32. Sums are added to it before they are rounded.

A multiprocessor cannot hold the tensors of a sequence. What does not stay in registers goes through a scratch buffer in global
memory that belongs to the program: the norm, attention's result and the second norm take turns in [S, D], and q, k, v and later
the activation take turns in [S, max((H + 2 K) Dh, F)]. With e bytes an element this is S (D + max((H + 2 K) Dh, F)) e: 256 KiB a
program at D = K Dh = 256, F = 512, S = 128 in 16 bits, and 33 MiB for 132 programs, which an H200's L2 cache (50 MB) holds.

Bytes moved for a token, beside the weights, at D = K Dh, e = 2:

    layered path    48 D + 8 F    16,384 at D = 256, F = 512    the tensors between its seven kernels
    this kernel     8 D            2,048                         x and y, as long as the scratch stays in the L2 cache

Prediction, from before any measurement. A sequence takes 2 S D (D + 2 K Dh) FLOPs for QKV, 4 S^2 D for attention (it computes
the masked scores too), 2 S D^2 for the output projection and 6 S D F for the network: 0.185 GFLOP at D = 256, F = 512, S = 128.
One program for a sequence uses 8 of 132 multiprocessors at B = 8. One multiprocessor of an H200 has 989 / 132 = 7.5 TFLOP/s in
bf16. Assume that both paths reach a quarter of that. Then a sequence takes 98 us, and so does every batch up to B = 132. The
layered path spreads each of its seven kernels over all multiprocessors. With 3.5 us for each node of a captured graph it takes
7 x 3.5 + 98 B / 132 us: 30 us at B = 8. The two are equal at B = 132 (1 - 24.5 / 98) = 99. Beyond B = 132 a second wave of
programs begins, and the single kernel loses again until that wave is nearly full. `benchmark_block_fusion.py` measures this.

The backward pass computes the block again through the layered path, so a block saves nothing but x.
"""

import math

from version3_triton.kernels import launch_sizes, missing
from version3_triton.kernels.checks import interpretable
from version3_triton.kernels.flash_attention import LOG2_E
from version3_triton.kernels.launch_sizes import dot_precision
from version4_ultra_fused.kernels.gradients import products_dtype, working
from version4_ultra_fused.kernels.matmul import turned_tile
from version4_ultra_fused.kernels.tiles import Tile

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

MAX_LENGTH, MAX_HIDDEN, MAX_HEAD_DIM = 128, 256, 64
STEP = 16  # the smallest side of a tile
LIMITS = (  # for messages
    f"takes S to {MAX_LENGTH}, D to {MAX_HIDDEN}, even Dh to {MAX_HEAD_DIM}, and D, F and 2 K Dh in steps of {STEP}"
)
NORM_ROWS = 16

# By family of GPUs and bytes of an element: the tile of the products, and the queries of a tile of attention. Only sm_90's in 16
# bits was timed.
TILES = {
    ("sm_90", 2): (Tile(128, 128, 64, 8, 3), 128),
    ("sm_90", 4): (Tile(64, 32, 32, 8, 2), 16),
    ("sm_80", 2): (Tile(128, 64, 32, 8, 3), 64),
    ("sm_80", 4): (Tile(64, 32, 32, 8, 2), 16),
    ("hip", 2): (Tile(64, 64, 64, 8, 1), 32),
    ("hip", 4): (Tile(32, 64, 32, 4, 1), 32),
}


@triton.jit
def _norm(
        x_ptr, weight_ptr, y_ptr, length, eps,
        D: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """RMSNorm of x [length, D] into y [ROWS, D], whose other rows become 0."""
    column = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + column, mask=column < D, other=0.0)
    for first in range(0, ROWS, STEP):
        row = first + tl.arange(0, STEP)
        place = row[:, None] * D + column[None, :]
        x = tl.load(x_ptr + place, mask=(row < length)[:, None] & (column < D)[None, :], other=0.0)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)
        y = (x * rstd[:, None] * weight[None, :]).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + place, y, mask=(column < D)[None, :])


@triton.jit
def _product(
        a_ptr, w_ptr, out_ptr, x_ptr, cos_ptr, sin_ptr, length, turned,
        N: tl.constexpr, K: tl.constexpr, EPILOGUE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
        PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """a [ROWS, K] by w [N, K].

    EPILOGUE:
        "rope": out [ROWS, N] is q, k and v, of which the first `turned` columns are rotated.
        "swiglu": out [ROWS, N / 2] is silu(gate) up.
        "add": out [length, N] is x [length, N] + the product, in float32.
    """
    for tile in tl.range(0, (ROWS // BM) * (N // BN), flatten=True):
        m, n = tile % (ROWS // BM) * BM, tile // (ROWS // BM) * BN
        row, column = m + tl.arange(0, BM), n + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            depth = k + tl.arange(0, BK)
            a = tl.load(a_ptr + row[:, None] * K + depth[None, :])
            w = tl.load(w_ptr + column[None, :] * K + depth[:, None])
            acc = tl.dot(a, w, acc, input_precision=PRECISION)
        if EPILOGUE == "rope":
            acc = turned_tile(acc, m, n, length, length, turned, cos_ptr, sin_ptr, DIM // 2, BM, BN)
            tl.store(out_ptr + row[:, None] * N + column[None, :], acc.to(out_ptr.dtype.element_ty))
        elif EPILOGUE == "swiglu":
            gate, up = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
            half = n // 2 + tl.arange(0, BN // 2)
            y = (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + row[:, None] * (N // 2) + half[None, :], y)
        else:
            place, inside = row[:, None] * N + column[None, :], (row < length)[:, None]
            tl.store(out_ptr + place, tl.load(x_ptr + place, mask=inside, other=0.0) + acc, mask=inside)


@triton.jit
def _attend(
        qkv_ptr, out_ptr, scale,
        H: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
        PRECISION: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Causal attention: out [ROWS, H Dh] of qkv [ROWS, (H + 2 K) Dh]. A tile holds BM queries' scores of all keys."""
    WIDTH: tl.constexpr = (H + 2 * (H // GROUPS)) * DIM
    key, column = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    for number in range(H * (ROWS // BM)):
        head, row = number // (ROWS // BM), number % (ROWS // BM) * BM + tl.arange(0, BM)
        k_ptr = qkv_ptr + (H + head // GROUPS) * DIM
        v_ptr = k_ptr + H // GROUPS * DIM
        inside = (column < DIM)[None, :]
        q = tl.load(qkv_ptr + head * DIM + row[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
        k = tl.load(k_ptr + key[None, :] * WIDTH + column[:, None], mask=(column < DIM)[:, None], other=0.0)
        v = tl.load(v_ptr + key[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        scores = tl.where(key[None, :] <= row[:, None], scores, float("-inf"))
        p = tl.exp2(scores - tl.max(scores, axis=1)[:, None])
        o = tl.dot(p.to(v.dtype), v, input_precision=PRECISION) / tl.sum(p, axis=1)[:, None]
        tl.store(out_ptr + head * DIM + row[:, None] * (H * DIM) + column[None, :], o.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _block(
        x_ptr, out_ptr, scratch_ptr, norm1_ptr, qkv_weight, o_weight, norm2_ptr, gate_up_weight, down_weight, cos_ptr, sin_ptr,
        length, eps1, eps2, scale,
        D: tl.constexpr, H: tl.constexpr, KV: tl.constexpr, F: tl.constexpr, WIDEST: tl.constexpr, ROWS: tl.constexpr,
        STEP: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
        BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Between two stages a barrier makes what all threads wrote visible to all threads of the program."""
    DIM: tl.constexpr = D // H
    QKV: tl.constexpr = (H + 2 * KV) * DIM
    sequence = tl.program_id(0).to(tl.int64)
    x_ptr += sequence * length * D
    out_ptr += sequence * length * D
    narrow = scratch_ptr + sequence * ROWS * (D + WIDEST)  # [ROWS, D]: the norm, attention's result, the second norm
    wide = narrow + ROWS * D  # [ROWS, WIDEST]: q, k and v, then the activation
    turned = (H + KV) * DIM
    _norm(x_ptr, norm1_ptr, narrow, length, eps1, D, ROWS, STEP, COLUMNS)
    tl.debug_barrier()
    _product(narrow, qkv_weight, wide, x_ptr, cos_ptr, sin_ptr, length, turned, QKV, D, "rope", DIM, ROWS, PRECISION, BM, BN, BK)
    tl.debug_barrier()
    _attend(wide, narrow, scale, H, H // KV, DIM, ROWS, PRECISION, QUERIES, BLOCK)
    tl.debug_barrier()
    _product(narrow, o_weight, out_ptr, x_ptr, cos_ptr, sin_ptr, length, turned, D, D, "add", DIM, ROWS, PRECISION, BM, BN, BK)
    tl.debug_barrier()
    _norm(out_ptr, norm2_ptr, narrow, length, eps2, D, ROWS, STEP, COLUMNS)
    tl.debug_barrier()
    _product(
        narrow, gate_up_weight, wide, x_ptr, cos_ptr, sin_ptr, length, turned, 2 * F, D, "swiglu", DIM, ROWS, PRECISION, BM, BN,
        BK,
    )  # fmt: skip
    tl.debug_barrier()
    _product(wide, down_weight, out_ptr, out_ptr, cos_ptr, sin_ptr, length, turned, D, F, "add", DIM, ROWS, PRECISION, BM, BN, BK)


def takes(x: Tensor, layer: nn.Module, length: int) -> bool:
    """Whether the kernel takes this block: x is float32 on a device that runs kernels, and the sizes are as LIMITS says.

    Args:
        x: [B S, D].
        layer: a Block of `tiny_llama_v4.py`.
        length: S.
    """
    attn, hidden, ffn = layer.self_attn, x.shape[1], layer.mlp.down_proj.in_features
    if missing(x.device) or x.dtype != torch.float32 or not 1 <= length <= MAX_LENGTH or hidden > MAX_HIDDEN:
        return False
    return attn.head_dim % 2 == 0 and attn.head_dim <= MAX_HEAD_DIM and _side(hidden, ffn, attn.qkv_proj.out_features) >= STEP


def _side(*sizes: int) -> int:
    """The largest power of two that divides all sizes."""
    return math.gcd(*sizes) & -math.gcd(*sizes)


@interpretable
def block_forward(x: Tensor, layer: nn.Module, cos: Tensor, sin: Tensor, length: int) -> Tensor:
    """The residual stream [B S, D] float32 after the block, without autograd.

    Args:
        x: [B S, D], float32 and contiguous: the residual stream, with all branches added.
        layer: a Block of `tiny_llama_v4.py` that `takes` accepts.
        cos, sin: [S_max, Dh], float32.
        length: S.
    """
    attn, mlp, dtype = layer.self_attn, layer.mlp, products_dtype(x)
    heads, kv_heads, _ = attn.heads
    weights = [working(each.weight, dtype) for each in (attn.qkv_proj, attn.o_proj, mlp.gate_up_proj, mlp.down_proj)]
    hidden, ffn, qkv = x.shape[1], weights[3].shape[1], weights[0].shape[0]
    norm1, norm2 = layer.input_layernorm, layer.post_attention_layernorm
    tile, queries = TILES[launch_sizes.family(), dtype.itemsize]
    rows, widest = max(STEP, triton.next_power_of_2(length)), max(qkv, ffn)
    tile = tile._replace(m=min(rows, tile.m), n=min(tile.n, _side(qkv, hidden, 2 * ffn)), k=min(tile.k, _side(hidden, ffn)))
    scratch = x.new_empty(x.shape[0] // length, rows, hidden + widest, dtype=dtype)
    out = torch.empty_like(x)
    _block[len(scratch),](
        x, out, scratch, norm1.weight, weights[0], weights[1], norm2.weight, weights[2], weights[3], cos, sin,
        length, norm1.eps, norm2.eps, LOG2_E / math.sqrt(attn.head_dim),
        D=hidden, H=heads, KV=kv_heads, F=ffn, WIDEST=widest, ROWS=rows, STEP=NORM_ROWS, PRECISION=dot_precision(dtype),
        COLUMNS=triton.next_power_of_2(hidden), BLOCK=max(16, triton.next_power_of_2(attn.head_dim)), QUERIES=min(rows, queries),
        **tile.arguments,
    )  # fmt: skip
    return out


class FusedBlock(torch.autograd.Function):
    """`FusedBlock.apply(x, layer, model, length)`: the residual stream after a block, [B S, D] float32, from that before it.

    Its backward pass computes the block again through the layered path. Gradients of weights go where that path writes them.
    """

    @staticmethod
    def forward(ctx, x: Tensor, layer: nn.Module, model: nn.Module, length: int):
        ctx.save_for_backward(x)
        ctx.block, ctx.dtype = (layer, model, length), products_dtype(x)
        return block_forward(x, layer, model.cos, model.sin, length)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor):
        (x,), (layer, model, length) = ctx.saved_tensors, ctx.block
        x = x.detach().requires_grad_()
        with torch.enable_grad(), torch.autocast(x.device.type, ctx.dtype, enabled=ctx.dtype != x.dtype):
            total, branch = layer(x, None, model, length)
        (dx,) = torch.autograd.grad((total, branch), x, (dout, dout.to(branch.dtype)))
        return dx, None, None, None
