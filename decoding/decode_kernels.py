"""A decode step in six kernels a layer: what stands around a matrix-vector product is computed
inside of it.

    product    y = W (x r g), r = 1 / sqrt(mean(x^2) + eps), a factor of y, and g the norm's weight;
               or y += W x; or silu(a) b, with a and b the products with the two halves of W
    attend     turns q and k, writes k and v into the cache, and attends to a chunk of it;
               `_combine` adds up the chunks

A product must read each weight once, and weights do not depend on the token. So it loads the first
ones before it waits for the kernel before it (`version3_triton/kernels/dependent_launch.py`), and
memory stays busy between two kernels. Sums are float32.
"""

from collections.abc import Callable

from tracepage.errors import UsageError
from version3_triton import kernels
from version3_triton.kernels.dependent_launch import dependent
from version3_triton.kernels.launch_sizes import ceil_div
from version3_triton.kernels.memory import read

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

CHUNK = 128  # keys of a program
# The rows and columns of a weight that a program holds at once, and its warps: of 20 the fastest
# step on an H100.
TILES = {
    "qkv": (4, 512, 4),
    "o": (8, 1024, 8),
    "gate_up": (16, 256, 4),
    "down": (4, 1024, 8),
    "head": (8, 256, 4),
}


@triton.jit
def _wait(DEPENDENT: tl.constexpr):
    """Lets the next kernel be placed, and waits for what earlier ones write in this step."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _product(
    x_ptr,  # [size]
    norm_ptr,  # [size]: g; or None
    weight_ptr,  # [rows, size], or twice as many rows
    y_ptr,  # [rows]
    rows,  # elements of y
    size,  # elements of x
    eps,  # added to the mean square
    NORM: tl.constexpr,  # whether x is normalized
    GATED: tl.constexpr,  # whether there are two halves of W
    ADD: tl.constexpr,  # whether the product is added to y
    ROWS: tl.constexpr,  # rows of a program
    BLOCK: tl.constexpr,  # columns at a time
    DEPENDENT: tl.constexpr = False,  # whether the launch is dependent
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    valid = (row < rows)[:, None]
    place = weight_ptr + row.to(tl.int64)[:, None] * size + column[None, :]
    second = place + rows.to(tl.int64) * size
    weight = tl.load(place, mask=valid & (column < size)[None, :], other=0.0)
    up = tl.load(second, mask=valid & (column < size)[None, :], other=0.0) if GATED else weight
    _wait(DEPENDENT)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    up_total = tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        after = start + BLOCK
        more = valid & (after + column < size)[None, :]
        next_weight = tl.load(place + after, mask=more, other=0.0)  # while this one is used
        next_up = tl.load(second + after, mask=more, other=0.0) if GATED else next_weight
        x = read(x_ptr + start + column, start + column < size)
        if NORM:
            squares += x * x
            x *= read(norm_ptr + start + column, start + column < size)
        total += weight.to(tl.float32) * x[None, :]
        if GATED:
            up_total += up.to(tl.float32) * x[None, :]
        weight = next_weight
        up = next_up
    scale = 1 / tl.sqrt(tl.sum(squares) / size + eps) if NORM else 1.0
    y = tl.sum(total, axis=1) * scale
    if GATED:
        y = y * tl.sigmoid(y) * (tl.sum(up_total, axis=1) * scale)
    if ADD:
        y += read(y_ptr + row, row < rows)
    tl.store(y_ptr + row, y, mask=row < rows)


@triton.jit
def _turned(x_ptr, cos_ptr, sin_ptr, position, DIM: tl.constexpr):
    """A head, [Dh], with RoPE."""
    column = tl.arange(0, DIM)
    x = tl.load(x_ptr + column).to(tl.float32)
    other = tl.load(x_ptr + (column + DIM // 2) % DIM).to(tl.float32)
    sin = tl.load(sin_ptr + position * DIM + column) * tl.where(column < DIM // 2, -1.0, 1.0)
    return x * tl.load(cos_ptr + position * DIM + column) + other * sin


@triton.jit
def _attend(
    qkv_ptr,  # [H + 2 K, Dh]
    keys_ptr,  # [K, T, Dh]: the cache
    values_ptr,  # as keys
    position_ptr,  # one element: the token's
    cos_ptr,  # [S_max, Dh]
    sin_ptr,  # [S_max, Dh]
    part_ptr,  # [H, chunks, Dh], float32
    sums_ptr,  # [H, chunks, 2], float32: score and sum
    length,  # T
    scale,  # 1 / sqrt(Dh)
    H: tl.constexpr,  # query heads
    K: tl.constexpr,  # key heads
    DIM: tl.constexpr,  # Dh
    CHUNK: tl.constexpr,  # keys of a program
    DEPENDENT: tl.constexpr = False,  # whether the launch is dependent
):
    """A query head and a chunk of the cache: the sum of its values, its largest score and its sum
    of exponentials.
    """
    head = tl.program_id(0)
    column = tl.arange(0, DIM)
    key = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    kv_head = head // (H // K)
    position = tl.load(position_ptr)
    place = (kv_head * length + key)[:, None] * DIM + column[None, :]
    before = (key < position)[:, None]  # written by earlier steps
    k = tl.load(keys_ptr + place, mask=before, other=0.0)
    v = tl.load(values_ptr + place, mask=before, other=0.0)
    _wait(DEPENDENT)
    q = _turned(qkv_ptr + head * DIM, cos_ptr, sin_ptr, position, DIM) * scale
    new_k = _turned(qkv_ptr + (H + kv_head) * DIM, cos_ptr, sin_ptr, position, DIM).to(k.dtype)
    new_v = tl.load(qkv_ptr + (H + K + kv_head) * DIM + column)
    now = (key == position)[:, None]
    k = tl.where(now, new_k[None, :], k)
    v = tl.where(now, new_v[None, :], v)
    tl.store(keys_ptr + place, k, mask=now & (head % (H // K) == 0))
    tl.store(values_ptr + place, v, mask=now & (head % (H // K) == 0))
    score = tl.where(key <= position, tl.sum(k.to(tl.float32) * q[None, :], axis=1), float("-inf"))
    # It is finite where all keys come after the position.
    highest = tl.maximum(tl.max(score, axis=0), -1e30)
    p = tl.exp(score - highest)
    part = head * tl.num_programs(1) + tl.program_id(1)
    tl.store(part_ptr + part * DIM + column, tl.sum(p[:, None] * v.to(tl.float32), axis=0))
    tl.store(sums_ptr + 2 * part, highest)
    tl.store(sums_ptr + 2 * part + 1, tl.sum(p, axis=0))


@triton.jit
def _combine(
    part_ptr,  # [H, chunks, Dh], float32
    sums_ptr,  # [H, chunks, 2], float32
    out_ptr,  # [H, Dh]
    chunks,  # how many there are
    DIM: tl.constexpr,  # Dh
    CHUNKS: tl.constexpr,  # chunks, rounded up to a power of two
    DEPENDENT: tl.constexpr = False,  # whether the launch is dependent
):
    _wait(DEPENDENT)
    column = tl.arange(0, DIM)
    part = tl.program_id(0) * chunks + tl.arange(0, CHUNKS)
    valid = tl.arange(0, CHUNKS) < chunks
    highest = tl.load(sums_ptr + 2 * part, mask=valid, other=float("-inf"))
    factor = tl.exp(highest - tl.max(highest, axis=0))
    total = tl.sum(factor * tl.load(sums_ptr + 2 * part + 1, mask=valid, other=0.0), axis=0)
    parts = tl.load(
        part_ptr + part[:, None] * DIM + column[None, :], mask=valid[:, None], other=0.0
    )
    out = tl.sum(factor[:, None] * parts, axis=0) / total
    tl.store(out_ptr + tl.program_id(0) * DIM + column, out)


def product(
    tile: str, x: Tensor, weight: Tensor, norm: nn.Module | None = None, out: Tensor | None = None
) -> Tensor:
    """weight [N, K] times x [K] or its norm, added to `out` if there is one; for "gate_up" SwiGLU
    of the halves, [N / 2].
    """
    rows = weight.shape[0] // (2 if tile == "gate_up" else 1)
    size = weight.shape[1]
    y = x.new_empty(rows) if out is None else out
    height, width, warps = TILES[tile]
    _product[ceil_div(rows, height),](
        x,
        norm.weight if norm else None,
        weight,
        y,
        rows,
        size,
        norm.eps if norm else 0.0,
        NORM=norm is not None,
        GATED=tile == "gate_up",
        ADD=out is not None,
        ROWS=height,
        BLOCK=width,
        num_warps=warps,
        **dependent(),
    )
    return y


def attend(
    qkv: Tensor, keys: Tensor, values: Tensor, position: Tensor, tables: tuple[Tensor, Tensor]
) -> Tensor:
    """Attention of the token whose q, k and v are in qkv, [(H + 2 K) Dh], to the cache, [K, T, Dh],
    which gets its k and v.
    """
    kv_heads, length, dim = keys.shape
    heads = len(qkv) // dim - 2 * kv_heads
    chunks = ceil_div(length, CHUNK)
    parts = qkv.new_empty(heads, chunks, dim, dtype=torch.float32)
    sums = qkv.new_empty(heads, chunks, 2, dtype=torch.float32)
    _attend[heads, chunks](
        qkv,
        keys,
        values,
        position,
        *tables,
        parts,
        sums,
        length,
        dim**-0.5,
        H=heads,
        K=kv_heads,
        DIM=dim,
        CHUNK=CHUNK,
        **dependent(),
    )
    out = qkv.new_empty(heads * dim)
    _combine[heads,](
        parts,
        sums,
        out,
        chunks,
        DIM=dim,
        CHUNKS=triton.next_power_of_2(chunks),
        num_warps=1,
        **dependent(),
    )
    return out


def fused(decoder) -> Callable[[Tensor, Tensor], Tensor]:
    """The logits of a decode step, as `Decoder.logits` computes them. UsageError: the kernels
    cannot run here.
    """
    reason = kernels.missing(decoder.device)
    dim = decoder.config.head_dim
    if not reason and dim & (dim - 1):
        reason = f"a head has {dim} numbers, which is no power of two"
    if reason:
        raise UsageError(f"--operations fused: {reason}")

    @torch.no_grad()
    def logits(ids: Tensor, position: Tensor) -> Tensor:  # [1], [1] -> [V]
        x = decoder.model.embed_tokens(ids)[0]  # [D]
        for layer, keys, values in zip(
            decoder.model.layers, decoder.keys, decoder.values, strict=True
        ):
            qkv = product("qkv", x, layer.self_attn.qkv_proj.weight, layer.input_layernorm)
            out = attend(qkv, keys, values, position, decoder.tables)
            product("o", out, layer.self_attn.o_proj.weight, out=x)
            hidden = product(
                "gate_up", x, layer.mlp.gate_up_proj.weight, layer.post_attention_layernorm
            )
            product("down", hidden, layer.mlp.down_proj.weight, out=x)
        return product("head", x, decoder.model.lm_head.weight, decoder.model.norm)

    return logits
