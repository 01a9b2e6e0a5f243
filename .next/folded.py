"""The fused step of several texts without a kernel for the norm: a product that adds to the stream also writes it times the
next norm's weight, and sums of squares of its rows, and the product after that divides by their root."""
import math
import torch, triton
import triton.language as tl
from decoding import decode_kernels as K
from decoding.decode_kernels import _block, _fetch, _wait, attend, family, ceil_div, dependent, read

@triton.jit
def _folded_product(x_ptr, squares_ptr, weight_ptr, y_ptr, gain_ptr, scaled_ptr, sums_ptr, texts, rows, programs, eps,
                    SIZE: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr,
                    BLOCK: tl.constexpr, PARTS: tl.constexpr, TEXTS: tl.constexpr, AHEAD: tl.constexpr, COUNT: tl.constexpr,
                    DEPENDENT: tl.constexpr = False):
    text = tl.program_id(0) * TEXTS + tl.arange(0, TEXTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    line = tl.minimum(row, rows - 1).to(tl.int64) * SIZE
    part = tl.arange(0, PARTS)[:, None, None] * BLOCK
    column = part + tl.arange(0, BLOCK)[None, None, :]
    first = weight_ptr + line[None, :, None]
    second = first + rows.to(tl.int64) * SIZE
    source = x_ptr + tl.minimum(text, texts - 1)[None, :, None] * SIZE
    if DEPENDENT and AHEAD >= 64:
        ahead = weight_ptr + line[:, None] + (tl.arange(0, AHEAD // 64) * 64)[None, :]
        _fetch(ahead)
        if GATED:
            _fetch(ahead + rows.to(tl.int64) * SIZE)
    if ADD:
        gain = read(gain_ptr + row, row < rows)
    _wait(DEPENDENT)
    place = y_ptr + text[None, :] * rows + row[:, None]
    written = (text < texts)[None, :] & (row < rows)[:, None]
    if ADD:
        old = read(place, written)
    if NORM:
        program = tl.arange(0, COUNT)
        squares = tl.load(squares_ptr + text[:, None] * programs + program[None, :],
                          mask=(text < texts)[:, None] & (program < programs)[None, :], other=0.0)
    y = tl.zeros((PARTS, ROWS, TEXTS), tl.float32)
    up = tl.zeros((PARTS, ROWS, TEXTS), tl.float32)
    for start in tl.range(0, SIZE, PARTS * BLOCK):
        x = tl.permute(_block(source, start + column, SIZE, PARTS * BLOCK), (0, 2, 1))
        y = tl.dot(_block(first, start + column, SIZE, PARTS * BLOCK), x, y)
        if GATED:
            up = tl.dot(_block(second, start + column, SIZE, PARTS * BLOCK), x, up)
    y = tl.sum(y, axis=0)
    if NORM:
        scale = 1 / tl.sqrt(tl.sum(squares, axis=1) / SIZE + eps)
        y *= scale[None, :]
    if GATED:
        up = tl.sum(up, axis=0)
        if NORM:
            up *= scale[None, :]
        y *= tl.sigmoid(y) * up
    if ADD:
        y = (y + old).to(y_ptr.dtype.element_ty).to(tl.float32)
        y = tl.where(written, y, 0.0)
        tl.store(scaled_ptr + text[None, :] * rows + row[:, None], y * gain[:, None], mask=written)
        tl.store(sums_ptr + text * tl.num_programs(1) + tl.program_id(1), tl.sum(y * y, axis=0), mask=text < texts)
    tl.store(place, y, mask=written)

@triton.jit
def _start(x_ptr, gain_ptr, scaled_ptr, sums_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False):
    column = tl.arange(0, BLOCK)
    gain = read(gain_ptr + column, column < SIZE)
    _wait(DEPENDENT)
    place = tl.program_id(0) * SIZE + column
    x = read(x_ptr + place, column < SIZE)
    tl.store(scaled_ptr + place, x * gain, mask=column < SIZE)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(x * x))

def product(tile, x, weight, squares=None, norm=None, out=None, after=None):
    batch, size = x.shape
    gated = tile == "gate_up"
    rows = weight.shape[0] // (2 if gated else 1)
    y = x.new_empty(batch, rows) if out is None else out
    height, width, parts, warps, stages, ahead = K.BATCH_TILES[tile]
    hopper = family() == "sm_90"
    texts = 8 if hopper and batch <= 8 else 16
    grid = ceil_div(batch, texts), ceil_div(rows, height)
    scaled = torch.empty_like(y) if out is not None else None
    sums = y.new_empty(batch, grid[1], dtype=torch.float32) if out is not None else None
    programs = squares.shape[1] if squares is not None else 0
    _folded_product[grid](x, squares, weight, y, after.weight if after else None, scaled, sums, batch, rows, programs,
        norm.eps if norm else 0.0, SIZE=size, NORM=norm is not None, GATED=gated, ADD=out is not None, ROWS=height, BLOCK=width,
        PARTS=parts, TEXTS=texts, AHEAD=math.gcd(ahead, size), COUNT=triton.next_power_of_2(max(programs, 1)),
        num_warps=warps, num_stages=stages if hopper else 2, **dependent())
    return (scaled, sums) if out is not None else y

def start(x, norm):
    batch, size = x.shape
    scaled, sums = torch.empty_like(x), x.new_empty(batch, 1, dtype=torch.float32)
    _start[batch,](x, norm.weight, scaled, sums, SIZE=size, BLOCK=triton.next_power_of_2(size), num_warps=8, **dependent())
    return scaled, sums

def fused(decoder):
    model = decoder.model
    norms = [layer.input_layernorm for layer in model.layers][1:] + [model.norm]
    @torch.no_grad()
    def one():
        x = K.embed(decoder.ids, decoder.positions, model.embed_tokens.weight)
        scaled, squares = start(x, model.layers[0].input_layernorm)
        for layer, after, keys, values in zip(model.layers, norms, decoder.keys, decoder.values, strict=True):
            qkv = product("qkv", scaled, layer.self_attn.qkv_proj.weight, squares, layer.input_layernorm)
            out = attend(qkv, keys, values, decoder.positions, decoder.tables)
            scaled, squares = product("o", out, layer.self_attn.o_proj.weight, out=x, after=layer.post_attention_layernorm)
            hidden = product("gate_up", scaled, layer.mlp.gate_up_proj.weight, squares, layer.post_attention_layernorm)
            scaled, squares = product("down", hidden, layer.mlp.down_proj.weight, out=x, after=after)
        return product("head", scaled, model.lm_head.weight, squares, model.norm)
    return one
