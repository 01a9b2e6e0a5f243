"""A decode step in six kernels a layer: what stands around a matrix-vector product is computed
inside of it.

    embed      x = the newest token's row of the embedding
    product    and `add`, four a layer and the head: `decode_products.py`
    attend     turns q and k, writes k and v into the cache, and attends to a chunk of it, for all
               query heads of a key head; `_combine` adds up the chunks
    write      the likeliest token, behind the newest
"""

from collections.abc import Callable

from decoding.decode_products import Stream, add, hand_on, product, wait
from tracepage.errors import UsageError
from version3_triton import kernels
from version3_triton.kernels.dependent_launch import dependent
from version3_triton.kernels.launch_sizes import ceil_div
from version3_triton.kernels.memory import read

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

CHUNK = 128, 16 << 10  # keys of a program, and their bytes, at most


@triton.jit
def _turned(x_ptr, valid, cos, sin, DIM: tl.constexpr):
    """Heads, [.., Dh] from x_ptr [.., 1], with RoPE; cos and sin: [1, Dh]."""
    column = tl.arange(0, DIM)[None, :]
    x = read(x_ptr + column, valid)
    return x * cos + read(x_ptr + (column + DIM // 2) % DIM, valid) * sin


@triton.jit
def _attend(
    qkv_ptr,  # [B, H + 2 K, Dh]
    keys_ptr,  # [B, K, T, Dh]: the cache
    values_ptr,  # as keys
    position_ptr,  # [B]: the tokens'
    cos_ptr,  # [S_max, Dh]
    sin_ptr,  # [S_max, Dh]
    part_ptr,  # [B, chunks, H, Dh], float32
    sums_ptr,  # [B, 2, chunks, H], float32: score and sum
    length,  # T
    scale,  # 1 / sqrt(Dh)
    K: tl.constexpr,  # key heads
    GROUP: tl.constexpr,  # query heads of a key head
    ROWS: tl.constexpr,  # GROUP, rounded up to what tl.dot takes
    DIM: tl.constexpr,  # Dh
    CHUNK: tl.constexpr,  # keys of a program
    DEPENDENT: tl.constexpr = False,  # whether the launch is dependent
):
    """The query heads of a key head and a chunk of a text's cache: the sum of its values, its
    largest score and its sum of exponentials.
    """
    kv_head = tl.program_id(0)
    text = tl.program_id(2)
    chunks = tl.num_programs(1)
    qkv_ptr += text * (K * GROUP + 2 * K) * DIM
    keys_ptr += text.to(tl.int64) * K * length * DIM
    values_ptr += text.to(tl.int64) * K * length * DIM
    part_ptr += text * chunks * K * GROUP * DIM
    sums_ptr += text * 2 * chunks * K * GROUP
    column = tl.arange(0, DIM)[None, :]
    key = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    position = tl.load(position_ptr + text)
    place = (kv_head * length + key)[:, None] * DIM + column
    before = (key < position)[:, None]  # written by earlier steps
    k = tl.load(keys_ptr + place, mask=before, other=0.0)
    v = tl.load(values_ptr + place, mask=before, other=0.0)
    cos = tl.load(cos_ptr + position * DIM + column)
    sin = tl.load(sin_ptr + position * DIM + column) * tl.where(column < DIM // 2, -1.0, 1.0)
    wait(DEPENDENT)
    member = tl.arange(0, ROWS)
    head = kv_head * GROUP + member
    q = _turned(qkv_ptr + head[:, None] * DIM, (member < GROUP)[:, None], cos, sin, DIM) * scale
    new_ptr = qkv_ptr + (K * GROUP + kv_head) * DIM
    new_k = _turned(new_ptr, True, cos, sin, DIM).to(k.dtype)
    new_v = tl.load(new_ptr + K * DIM + column)
    now = (key == position)[:, None]
    k = tl.where(now, new_k, k)
    v = tl.where(now, new_v, v)
    tl.store(keys_ptr + place, k, mask=now)
    tl.store(values_ptr + place, v, mask=now)
    score = tl.dot(q.to(k.dtype), tl.trans(k), input_precision="ieee")
    score = tl.where((key <= position)[None, :], score, float("-inf"))
    # It is finite where all keys come after the position.
    highest = tl.maximum(tl.max(score, axis=1), -1e30)
    p = tl.exp(score - highest[:, None])
    out = tl.dot(p.to(v.dtype), v, input_precision="ieee")
    part = tl.program_id(1) * K * GROUP + head
    tl.store(part_ptr + part[:, None] * DIM + column, out, mask=(member < GROUP)[:, None])
    tl.store(sums_ptr + part, highest, mask=member < GROUP)
    tl.store(sums_ptr + chunks * K * GROUP + part, tl.sum(p, axis=1), mask=member < GROUP)


@triton.jit
def _combine(
    part_ptr,  # [B, chunks, H, Dh], float32
    sums_ptr,  # [B, 2, chunks, H], float32
    out_ptr,  # [B, H, Dh]
    chunks,  # how many there are
    DIM: tl.constexpr,  # Dh
    CHUNKS: tl.constexpr,  # chunks, rounded up to a power of two
    DEPENDENT: tl.constexpr = False,  # whether the launch is dependent
):
    wait(DEPENDENT)
    column = tl.arange(0, DIM)
    heads = tl.num_programs(0)
    text = tl.program_id(1)
    part_ptr += text * chunks * heads * DIM
    sums_ptr += text * 2 * chunks * heads
    out_ptr += text * heads * DIM
    part = tl.arange(0, CHUNKS) * heads + tl.program_id(0)
    valid = tl.arange(0, CHUNKS) < chunks
    highest = tl.load(sums_ptr + part, mask=valid, other=float("-inf"))
    factor = tl.exp(highest - tl.max(highest, axis=0))
    sums = tl.load(sums_ptr + chunks * heads + part, mask=valid, other=0.0)
    parts = tl.load(
        part_ptr + part[:, None] * DIM + column[None, :], mask=valid[:, None], other=0.0
    )
    out = tl.sum(factor[:, None] * parts, axis=0) / tl.sum(factor * sums, axis=0)
    tl.store(out_ptr + tl.program_id(0) * DIM + column, out)


@triton.jit
def _embed(
    ids_ptr,  # [B, T]
    position_ptr,  # [B]: the tokens'
    table_ptr,  # [V, size]
    x_ptr,  # [B, size]
    norm_ptr,  # [size]: g of the first norm; or None
    scaled_ptr,  # [B, size]: x g
    squares_ptr,  # [B, programs of a text]
    length,  # T
    size,  # D
    BLOCK: tl.constexpr,  # elements of a program
    SCALED: tl.constexpr,  # whether x g and squares are written
    DEPENDENT: tl.constexpr = False,  # whether the launch is dependent
):
    wait(DEPENDENT)
    text = tl.program_id(1)
    token = tl.load(ids_ptr + text * length + tl.load(position_ptr + text))
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = column < size
    x = tl.load(table_ptr + token * size + column, mask=valid)
    place = text * size + column
    tl.store(x_ptr + place, x, mask=valid)
    if SCALED:
        squares = hand_on(x, read(norm_ptr + column, valid), scaled_ptr, place, valid)
        tl.store(squares_ptr + text * tl.num_programs(0) + tl.program_id(0), tl.sum(squares))


@triton.jit
def _write(
    logits_ptr,  # [B, size]
    ids_ptr,  # [B, T]
    position_ptr,  # [B]: move on by one
    length,  # T
    size,  # V
    BLOCK: tl.constexpr,  # V, rounded up to a power of two
    DEPENDENT: tl.constexpr = False,  # whether the launch is dependent
):
    """A program for each text. It lets no kernel begin before its end, since `_attend` reads the
    position before it waits.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    column = tl.arange(0, BLOCK)
    text = tl.program_id(0)
    logits = read(logits_ptr + text * size + column, column < size, float("-inf"))
    position = tl.load(position_ptr + text) + 1
    tl.store(ids_ptr + text * length + position, tl.argmax(logits, axis=0))
    tl.store(position_ptr + text, position)


def attend(
    qkv: Tensor, keys: Tensor, values: Tensor, positions: Tensor, tables: tuple[Tensor, Tensor]
) -> Tensor:
    """Attention of the tokens whose q, k and v are in qkv, [B, (H + 2 K) Dh], to the cache,
    [B, K, T, Dh], which gets their k and v: [B, H Dh].
    """
    batch, kv_heads, length, dim = keys.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    chunk = min(CHUNK[0], CHUNK[1] // (dim * keys.element_size()))
    chunks = ceil_div(length, chunk)
    parts = qkv.new_empty(batch, chunks, heads, dim, dtype=torch.float32)
    sums = qkv.new_empty(batch, 2, chunks, heads, dtype=torch.float32)
    group = heads // kv_heads
    _attend[kv_heads, chunks, batch](
        qkv,
        keys,
        values,
        positions,
        *tables,
        parts,
        sums,
        length,
        dim**-0.5,
        K=kv_heads,
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(group)),
        DIM=dim,
        CHUNK=chunk,
        num_warps=8,
        **dependent(),
    )
    out = qkv.new_empty(batch, heads * dim)
    _combine[heads, batch](
        parts,
        sums,
        out,
        chunks,
        DIM=dim,
        CHUNKS=triton.next_power_of_2(chunks),
        num_warps=max(1, dim // 64),
        **dependent(),
    )
    return out


def embed(ids: Tensor, positions: Tensor, table: Tensor, norm: nn.Module) -> Stream:
    """The rows of table, [V, D], of the tokens of ids, [B, T], at their positions, [B], which
    `norm` reads first.
    """
    batch, length = ids.shape
    size = table.shape[1]
    block = 512
    x = table.new_empty(batch, size)
    stream = Stream(x, None, None)
    if batch > 1 and x.dtype != torch.float32:
        squares = x.new_empty(batch, ceil_div(size, block), dtype=torch.float32)
        stream = Stream(x, torch.empty_like(x), squares)
    _embed[ceil_div(size, block), batch](
        ids,
        positions,
        table,
        x,
        norm.weight,
        stream.scaled,
        stream.squares,
        length,
        size,
        BLOCK=block,
        SCALED=stream.scaled is not None,
        num_warps=2,
        **dependent(),
    )
    return stream


def write(logits: Tensor, ids: Tensor, positions: Tensor) -> None:
    """Writes the likeliest tokens into ids, [B, T], behind their positions, [B], which move on."""
    batch, size = logits.shape
    _write[batch,](
        logits,
        ids,
        positions,
        ids.shape[1],
        size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=16,
        **dependent(),
    )


def fused(decoder) -> tuple[Callable[[], Tensor], Callable[[Tensor], None]]:
    """What `Decoder.one` and `Decoder.write` compute. UsageError: the kernels cannot run here."""
    reason = kernels.missing(decoder.device)
    dim = decoder.config.head_dim
    if not reason and dim not in (16, 32, 64, 128, 256):
        reason = f"a head has {dim} numbers, which is no power of two from 16 to 256"
    if reason:
        raise UsageError(f"--operations fused: {reason}")

    model = decoder.model
    # what reads the stream after each layer
    next_norms = [layer.input_layernorm for layer in model.layers[1:]] + [model.norm]

    @torch.no_grad()
    def one() -> Tensor:  # [B, V]
        first_norm = model.layers[0].input_layernorm
        stream = embed(decoder.ids, decoder.positions, model.embed_tokens.weight, first_norm)
        for layer, next_norm, keys, values in zip(
            model.layers, next_norms, decoder.keys, decoder.values, strict=True
        ):
            attention, feed_forward = layer.self_attn, layer.mlp
            middle_norm = layer.post_attention_layernorm
            qkv = product("qkv", stream, attention.qkv_proj.weight, layer.input_layernorm)
            out = attend(qkv, keys, values, decoder.positions, decoder.tables)
            stream = add("o", out, attention.o_proj.weight, stream, middle_norm)
            hidden = product("gate_up", stream, feed_forward.gate_up_proj.weight, middle_norm)
            stream = add("down", hidden, feed_forward.down_proj.weight, stream, next_norm)
        return product("head", stream, model.lm_head.weight, model.norm)

    return one, lambda logits: write(logits, decoder.ids, decoder.positions)
