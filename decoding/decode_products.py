"""Products of a decode step with what stands around them (`decode_kernels.py`).

    product    y = W (x r g), r = 1 / sqrt(mean(x^2) + eps), a factor of y, and g the norm's weight;
               for "gate_up" silu(a) b, with a and b the products with the two halves of W
    add        y += W x

Of several texts a product reads its weights once for up to 16: tensor cores multiply them with a
token of each. There the norm must not stand between a load and its multiplication. So a kernel that
adds to x also writes x g, and sums of squares of x, from which the product then takes r. In
float32, which tensor cores round, each text has its own product.

A product must read each weight once, and weights do not depend on the token. So before it waits for
the kernel before it (`version3_triton/kernels/dependent_launch.py`), that of one text loads the
first ones, and that of several asks the L2 for them. Memory then waits less between two kernels.
Sums are float32.
"""

from typing import NamedTuple

from version3_triton.kernels.dependent_launch import dependent
from version3_triton.kernels.launch_sizes import ceil_div, family
from version3_triton.kernels.memory import read

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

# The rows and columns of a weight that a program holds at once, and its warps: of 70 to 83 for each
# product the fastest step on an H200, or within 0.4% of it
# (results/h200/decoding/tiles_sweep.log.gz).
TILES = {
    "qkv": (4, 1024, 2),
    "o": (2, 2048, 2),
    "gate_up": (2, 1024, 2),
    "down": (8, 2048, 8),
    "head": (8, 1024, 2),
}
# The rows, columns of a part, parts, warps, stages of the pipeline and columns that the L2 fetches
# ahead for several texts: the best of 25 for each product, compared in a step, and of those the
# fastest on an H200 or within 0.2% of it (results/h200/decoding/parts.json). Two stages take at
# most 48 KiB of shared memory.
BATCH_TILES = {
    "qkv": (32, 128, 4, 4, 4, 512),
    "o": (16, 128, 4, 4, 6, 512),
    "gate_up": (16, 64, 4, 4, 4, 512),
    "down": (16, 128, 4, 4, 6, 512),
    "head": (16, 128, 2, 2, 6, 0),
}


@triton.jit
def wait(DEPENDENT: tl.constexpr):
    """Lets the next kernel be placed, and waits for what earlier ones write in this step."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _columns(pointer, valid, column, START: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    """The columns from START on; those past SIZE are 0."""
    if START + BLOCK > SIZE:
        valid = valid & (START + column < SIZE)
    return tl.load(pointer + START + column, mask=valid, other=0.0)


@triton.jit
def _added(products, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The sums of eight neighbours, which one thread holds."""
    return tl.sum(tl.reshape(products, [ROWS, BLOCK // 8, 8]), axis=2)


@triton.jit
def _product(
    x_ptr,  # [SIZE]
    norm_ptr,  # [SIZE]: g; or None
    weight_ptr,  # [rows, SIZE], or twice as many rows
    y_ptr,  # [rows]
    rows,  # elements of y
    eps,  # added to the mean square
    SIZE: tl.constexpr,  # elements of x
    NORM: tl.constexpr,  # whether x is normalized
    GATED: tl.constexpr,  # whether there are two halves of W
    ADD: tl.constexpr,  # whether the product is added to y
    ROWS: tl.constexpr,  # rows of a program
    BLOCK: tl.constexpr,  # columns at a time
    DEPENDENT: tl.constexpr = False,  # whether the launch is dependent
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    line = column[None, :]
    valid = (row < rows)[:, None]
    first = weight_ptr + row.to(tl.int64)[:, None] * SIZE
    second = first + rows.to(tl.int64) * SIZE
    weight = _columns(first, valid, line, 0, BLOCK, SIZE)
    up = _columns(second, valid, line, 0, BLOCK, SIZE) if GATED else weight
    gain = _columns(norm_ptr, True, column, 0, BLOCK, SIZE) if NORM else column
    wait(DEPENDENT)
    x = _columns(x_ptr, True, column, 0, BLOCK, SIZE)
    old = read(y_ptr + row, row < rows) if ADD else 0.0
    total = tl.zeros((ROWS, BLOCK // 8), tl.float32)
    up_total = tl.zeros((ROWS, BLOCK // 8), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    # The loop is unrolled, so the compiler can move loads; those past the last block are unused.
    for start in tl.static_range(0, SIZE, BLOCK):
        next_weight = _columns(first, valid, line, start + BLOCK, BLOCK, SIZE)
        next_up = _columns(second, valid, line, start + BLOCK, BLOCK, SIZE) if GATED else weight
        next_gain = _columns(norm_ptr, True, column, start + BLOCK, BLOCK, SIZE) if NORM else column
        next_x = _columns(x_ptr, True, column, start + BLOCK, BLOCK, SIZE)
        x = x.to(tl.float32)
        if NORM:
            squares += x * x
            x *= gain.to(tl.float32)
        total += _added(weight.to(tl.float32) * x[None, :], ROWS, BLOCK)
        if GATED:
            up_total += _added(up.to(tl.float32) * x[None, :], ROWS, BLOCK)
        weight = next_weight
        up = next_up
        gain = next_gain
        x = next_x
    scale = 1 / tl.sqrt(tl.sum(squares) / SIZE + eps) if NORM else 1.0
    y = tl.sum(total, axis=1) * scale
    if GATED:
        y = y * tl.sigmoid(y) * (tl.sum(up_total, axis=1) * scale)
    tl.store(y_ptr + row, y + old, mask=row < rows)


@triton.jit
def _fetch(pointers):
    """Asks the L2 for lines of 128 bytes."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _block(pointer, column, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The columns of a block; those past SIZE are 0."""
    if SIZE % BLOCK == 0:
        return tl.load(pointer + column)
    return tl.load(pointer + column, mask=column < SIZE, other=0.0)


@triton.jit
def hand_on(x, gain, scaled_ptr, place, valid):
    """Stores x g for the next norm, and returns the squares of x, each as x is stored."""
    x = tl.where(valid, x.to(scaled_ptr.dtype.element_ty).to(tl.float32), 0.0)
    tl.store(scaled_ptr + place, x * gain, mask=valid)
    return x * x


@triton.jit
def _batch_product(
    x_ptr,  # [texts, SIZE]
    squares_ptr,  # [texts, programs]: of x before g; or None
    weight_ptr,  # [rows, SIZE], or twice as many rows
    y_ptr,  # [texts, rows]
    next_norm_ptr,  # [rows]: g of the norm after this product; or None
    scaled_ptr,  # [texts, rows]: y g
    next_squares_ptr,  # [texts, programs of this launch]
    texts,  # B
    rows,  # elements of y for each text
    programs,  # sums of squares of a text
    eps,  # added to the mean square
    SIZE: tl.constexpr,  # elements of x for each text
    NORM: tl.constexpr,  # whether x is normalized
    GATED: tl.constexpr,  # whether there are two halves of W
    ADD: tl.constexpr,  # whether the product is added to y
    ROWS: tl.constexpr,  # rows of a program
    BLOCK: tl.constexpr,  # columns of a part, at a time
    PARTS: tl.constexpr,  # sums that a program adds up beside each other
    TEXTS: tl.constexpr,  # texts of a program
    AHEAD: tl.constexpr,  # columns that the L2 fetches before the wait
    PROGRAMS: tl.constexpr,  # programs, rounded up to a power of two
    DEPENDENT: tl.constexpr = False,  # whether the launch is dependent
):
    """`_product` of several texts. Later blocks are loaded during a product.

    A tensor core adds to one sum after another, and each waits for the one before. So each warp
    has columns, and sums, of its own.
    """
    text = tl.program_id(0) * TEXTS + tl.arange(0, TEXTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    line = tl.minimum(row, rows - 1).to(tl.int64) * SIZE
    part = tl.arange(0, PARTS)[:, None, None] * BLOCK
    column = part + tl.arange(0, BLOCK)[None, None, :]
    first = weight_ptr + line[None, :, None]
    second = first + rows.to(tl.int64) * SIZE
    source = x_ptr + tl.minimum(text, texts - 1)[None, :, None] * SIZE
    if DEPENDENT and AHEAD > 0:
        ahead = weight_ptr + line[:, None] + (tl.arange(0, AHEAD // 64) * 64)[None, :]
        _fetch(ahead)
        if GATED:
            _fetch(ahead + rows.to(tl.int64) * SIZE)
    if ADD:
        gain = read(next_norm_ptr + row, row < rows)[:, None]
    wait(DEPENDENT)
    place = text[None, :] * rows + row[:, None]
    written = (text < texts)[None, :] & (row < rows)[:, None]
    if ADD:
        old = read(y_ptr + place, written)
    if NORM:
        program = tl.arange(0, PROGRAMS)[None, :]
        summed = (text < texts)[:, None] & (program < programs)
        squares = read(squares_ptr + text[:, None] * programs + program, summed)
    y = tl.zeros((PARTS, ROWS, TEXTS), tl.float32)
    up = tl.zeros((PARTS, ROWS, TEXTS), tl.float32)
    for start in tl.range(0, SIZE, PARTS * BLOCK):
        x = tl.permute(_block(source, start + column, SIZE, PARTS * BLOCK), (0, 2, 1))
        y = tl.dot(_block(first, start + column, SIZE, PARTS * BLOCK), x, y)
        if GATED:
            up = tl.dot(_block(second, start + column, SIZE, PARTS * BLOCK), x, up)
    y = tl.sum(y, axis=0)
    up = tl.sum(up, axis=0)
    if NORM:
        scale = 1 / tl.sqrt(tl.sum(squares, axis=1) / SIZE + eps)[None, :]
        y *= scale
        up *= scale
    if GATED:
        y *= tl.sigmoid(y) * up
    if ADD:
        y += old
        squares = hand_on(y, gain, scaled_ptr, place, written)
        next_place = text * tl.num_programs(1) + tl.program_id(1)
        tl.store(next_squares_ptr + next_place, tl.sum(squares, axis=0), mask=text < texts)
    tl.store(y_ptr + place, y, mask=written)


class Stream(NamedTuple):
    """The residual stream of a token of each text, and, of several, what the next norm needs."""

    x: Tensor  # [B, D]
    scaled: Tensor | None  # [B, D]: x g
    squares: Tensor | None  # [B, programs]: sums of squares of x, float32


def product(tile: str, stream: Stream, weight: Tensor, norm: nn.Module) -> Tensor:
    """weight [N, D] times the norm of the stream: [B, N]; for "gate_up" SwiGLU of the halves,
    [B, N / 2].
    """
    rows = weight.shape[0] // (2 if tile == "gate_up" else 1)
    y = stream.x.new_empty(len(stream.x), rows)
    if stream.scaled is None:
        _multiply_each(tile, stream.x, weight, y, norm)
    else:
        _multiply_together(tile, stream.scaled, weight, y, stream.squares, norm)
    return y


def add(tile: str, x: Tensor, weight: Tensor, stream: Stream, next_norm: nn.Module) -> Stream:
    """Adds weight [D, K] times x [B, K] to the stream, which `next_norm` then reads."""
    if stream.scaled is None:
        _multiply_each(tile, x, weight, stream.x)
        return stream
    programs = ceil_div(weight.shape[0], BATCH_TILES[tile][0])
    squares = x.new_empty(len(x), programs, dtype=torch.float32)
    following = stream._replace(scaled=torch.empty_like(stream.x), squares=squares)
    _multiply_together(tile, x, weight, stream.x, following=following, next_norm=next_norm)
    return following


def _multiply_each(
    tile: str, x: Tensor, weight: Tensor, y: Tensor, norm: nn.Module | None = None
) -> None:
    """Each text alone: y = W norm(x), or without a norm y += W x."""
    height, width, warps = TILES[tile]
    rows = y.shape[1]
    for text in range(len(x)):
        _product[ceil_div(rows, height),](
            x[text],
            norm.weight if norm else None,
            weight,
            y[text],
            rows,
            norm.eps if norm else 0.0,
            SIZE=x.shape[1],
            NORM=norm is not None,
            GATED=tile == "gate_up",
            ADD=norm is None,
            ROWS=height,
            BLOCK=width,
            num_warps=warps,
            **dependent(),
        )


def _multiply_together(
    tile: str,
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    squares: Tensor | None = None,
    norm: nn.Module | None = None,
    following: Stream | None = None,
    next_norm: nn.Module | None = None,
) -> None:
    """All texts: y = W x r, with r from the squares, or y += W x, from which `following` is."""
    height, width, parts, warps, stages, ahead = BATCH_TILES[tile]
    batch, size = x.shape
    rows = y.shape[1]
    programs = 1 if squares is None else squares.shape[1]
    hopper = family() == "sm_90"
    texts = 8 if hopper and batch <= 8 else 16
    _batch_product[ceil_div(batch, texts), ceil_div(rows, height)](
        x,
        squares,
        weight,
        y,
        next_norm.weight if next_norm else None,
        following.scaled if following else None,
        following.squares if following else None,
        batch,
        rows,
        programs,
        norm.eps if norm else 0.0,
        SIZE=size,
        NORM=norm is not None,
        GATED=tile == "gate_up",
        ADD=norm is None,
        ROWS=height,
        BLOCK=width,
        PARTS=parts,
        TEXTS=texts,
        AHEAD=ahead if ahead <= size else 0,
        PROGRAMS=triton.next_power_of_2(programs),
        num_warps=warps,
        num_stages=stages if hopper else 2,
        **dependent(),
    )
