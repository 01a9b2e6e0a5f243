"""A decode step in six kernels a layer: what stands around a matrix-vector product is computed inside of it.

    product     y = W (x r g), r = 1 / sqrt(mean(x^2) + eps) and g the norm's weight; r is a factor of y, so one pass is enough
                GATED: silu of the product with the first half of W, times that with the second; ADD: the sum is added to y
    attend      turns q and k, writes k and v into the cache, and attends to a chunk of it; `combine` adds the chunks

A product reads each weight once, N K numbers, and nothing else of that size: so it takes at least their bytes / bandwidth. The
weights do not depend on the token. So a product loads its first weights before it waits for the kernel before it
(`version3_triton/kernels/dependent_launch.py`): memory stays busy between two kernels. Sums are float32.
"""

from collections.abc import Callable

from common.errors import UsageError
from version3_triton import kernels
from version3_triton.kernels.dependent_launch import dependent
from version3_triton.kernels.launch_sizes import ceil_div

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

CHUNK = 128  # keys of a program
TILE = {"ROWS": 4, "BLOCK": 512, "num_warps": 4}  # of a product


@triton.jit
def _wait(DEPENDENT: tl.constexpr):
    """Lets the next kernel be placed, and waits for the one before."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _product(
        x_ptr, norm_ptr, weight_ptr, y_ptr, rows, size, eps,
        NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
        ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    place = weight_ptr + row.to(tl.int64)[:, None] * size + column[None, :]
    up = place + rows.to(tl.int64) * size
    weight = tl.load(place, mask=inside, other=0.0)
    up_weight = tl.load(up, mask=inside, other=0.0) if GATED else weight
    _wait(DEPENDENT)
    total, up_total = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        more = (row < rows)[:, None] & (start + BLOCK + column < size)[None, :]
        after = tl.load(place + start + BLOCK, mask=more, other=0.0)  # while the weights before are used
        up_after = tl.load(up + start + BLOCK, mask=more, other=0.0) if GATED else after
        x = tl.load(x_ptr + start + column, mask=start + column < size, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + start + column, mask=start + column < size, other=0.0).to(tl.float32)
        total += weight.to(tl.float32) * x[None, :]
        if GATED:
            up_total += up_weight.to(tl.float32) * x[None, :]
        weight, up_weight = after, up_after
    scale = 1 / tl.sqrt(tl.sum(squares) / size + eps) if NORM else 1.0
    y = tl.sum(total, axis=1) * scale
    if GATED:
        y = y * tl.sigmoid(y) * (tl.sum(up_total, axis=1) * scale)
    if ADD:
        y += tl.load(y_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty), mask=row < rows)


@triton.jit
def _turned(x_ptr, cos_ptr, sin_ptr, position, DIM: tl.constexpr):
    """A head, [Dh], with RoPE."""
    column = tl.arange(0, DIM)
    other = (column + DIM // 2) % DIM
    table = position * DIM + column
    x, turned = tl.load(x_ptr + column).to(tl.float32), tl.load(x_ptr + other).to(tl.float32)
    sin = tl.load(sin_ptr + table) * tl.where(column < DIM // 2, -1.0, 1.0)
    return x * tl.load(cos_ptr + table) + turned * sin


@triton.jit
def _attend(
        qkv_ptr, keys_ptr, values_ptr, position_ptr, cos_ptr, sin_ptr, part_ptr, sums_ptr, length, scale,
        H: tl.constexpr, K: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """A query head and a chunk of the cache: its sum of values, its largest score and its sum of exponentials."""
    _wait(DEPENDENT)
    head, chunk, column = tl.program_id(0), tl.program_id(1), tl.arange(0, DIM)
    position, kv_head = tl.load(position_ptr), head // (H // K)
    key = chunk * CHUNK + tl.arange(0, CHUNK)
    cached = (key < position)[:, None]
    place = (kv_head * length + key)[:, None] * DIM + column[None, :]
    k, v = tl.load(keys_ptr + place, mask=cached, other=0.0), tl.load(values_ptr + place, mask=cached, other=0.0)
    q = _turned(qkv_ptr + head * DIM, cos_ptr, sin_ptr, position, DIM) * scale
    new_k = _turned(qkv_ptr + (H + kv_head) * DIM, cos_ptr, sin_ptr, position, DIM).to(k.dtype)
    new_v = tl.load(qkv_ptr + (H + K + kv_head) * DIM + column)
    now = (key == position)[:, None]
    k, v = tl.where(now, new_k[None, :], k), tl.where(now, new_v[None, :], v)
    first_of_group = head % (H // K) == 0
    tl.store(keys_ptr + place, k, mask=now & first_of_group)
    tl.store(values_ptr + place, v, mask=now & first_of_group)
    score = tl.where(key <= position, tl.sum(k.to(tl.float32) * q[None, :], axis=1), float("-inf"))
    highest = tl.maximum(tl.max(score, axis=0), -1e30)  # of a chunk after the position: finite, with a sum of 0
    p = tl.exp(score - highest)
    part = head * tl.num_programs(1) + chunk
    tl.store(part_ptr + part * DIM + column, tl.sum(p[:, None] * v.to(tl.float32), axis=0))
    tl.store(sums_ptr + 2 * part, highest)
    tl.store(sums_ptr + 2 * part + 1, tl.sum(p, axis=0))


@triton.jit
def _combine(part_ptr, sums_ptr, out_ptr, chunks, DIM: tl.constexpr, CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr = False):
    _wait(DEPENDENT)
    column, part = tl.arange(0, DIM), tl.program_id(0) * chunks + tl.arange(0, CHUNKS)
    inside = tl.arange(0, CHUNKS) < chunks
    highest = tl.load(sums_ptr + 2 * part, mask=inside, other=float("-inf"))
    weight = tl.exp(highest - tl.max(highest, axis=0))
    total = tl.sum(weight * tl.load(sums_ptr + 2 * part + 1, mask=inside, other=0.0), axis=0)
    parts = tl.load(part_ptr + part[:, None] * DIM + column[None, :], mask=inside[:, None], other=0.0)
    out = tl.sum(weight[:, None] * parts, axis=0) / total
    tl.store(out_ptr + tl.program_id(0) * DIM + column, out.to(out_ptr.dtype.element_ty))


def product(x: Tensor, weight: Tensor, norm: nn.Module | None = None, out: Tensor | None = None, gated: bool = False) -> Tensor:
    """weight [N, K] times x [K], or times its norm; `gated`: SwiGLU of its halves, [N / 2]; added to `out` where there is one."""
    rows, size = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    y = x.new_empty(rows) if out is None else out
    _product[ceil_div(rows, TILE["ROWS"]),](
        x, norm.weight if norm else None, weight, y, rows, size, norm.eps if norm else 0.0,
        NORM=norm is not None, GATED=gated, ADD=out is not None, **TILE, **dependent(),
    )  # fmt: skip
    return y


def attend(qkv: Tensor, keys: Tensor, values: Tensor, position: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Attention of the token whose q, k and v are in qkv, [(H + 2 K) Dh], to the cache, [K, T, Dh], which gets its k and v."""
    kv_heads, length, head_dim = keys.shape
    heads, chunks = len(qkv) // head_dim - 2 * kv_heads, ceil_div(length, CHUNK)
    parts, sums = (torch.empty(heads, chunks, n, dtype=torch.float32, device=qkv.device) for n in (head_dim, 2))
    _attend[heads, chunks](
        qkv, keys, values, position, *tables, parts, sums, length, head_dim**-0.5,
        H=heads, K=kv_heads, DIM=head_dim, CHUNK=CHUNK, **dependent(),
    )  # fmt: skip
    out = qkv.new_empty(heads * head_dim)
    _combine[heads,](parts, sums, out, chunks, DIM=head_dim, CHUNKS=triton.next_power_of_2(chunks), num_warps=1, **dependent())
    return out


def fused(decoder) -> Callable[[Tensor, Tensor], Tensor]:
    """The logits of a decode step, as `Decoder.logits` computes them. UsageError: the kernels cannot run here."""
    if reason := kernels.missing(decoder.device):
        raise UsageError(f"--operations fused: {reason}")
    if decoder.keys.shape[-1] & (decoder.keys.shape[-1] - 1):
        raise UsageError(f"--operations fused takes heads of 2, 4, 8, ... numbers, not {decoder.keys.shape[-1]}")

    @torch.no_grad()
    def logits(ids: Tensor, position: Tensor) -> Tensor:  # [1], [1] -> [V]
        model = decoder.model
        x = model.embed_tokens(ids)[0]  # [D]
        for layer, keys, values in zip(model.layers, decoder.keys, decoder.values, strict=True):
            qkv = product(x, layer.self_attn.qkv_proj.weight, layer.input_layernorm)
            out = attend(qkv, keys, values, position, decoder.tables)
            product(out, layer.self_attn.o_proj.weight, out=x)
            hidden = product(x, layer.mlp.gate_up_proj.weight, layer.post_attention_layernorm, gated=True)
            product(hidden, layer.mlp.down_proj.weight, out=x)
        return product(x, model.lm_head.weight, model.norm)

    return logits
