"""Exercise 1, problem (rope), solved. ../starter/rope.py describes the arguments."""

import triton
import triton.language as tl


@triton.jit
def rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    length,
    x_token,
    HALF: tl.constexpr,
    SIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = (a cos - b sin, b cos + a sin) for the halves a and b of a head, sin times SIGN."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    table = token % length * (2 * HALF) + column  # both halves of a row are equal, so one is enough
    cos = tl.load(cos_ptr + table, mask=inside).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=inside).to(tl.float32) * SIGN
    source = x_ptr + token * x_token + head * (2 * HALF) + column
    a = tl.load(source, mask=inside).to(tl.float32)
    b = tl.load(source + HALF, mask=inside).to(tl.float32)
    target = out_ptr + (token * tl.num_programs(1) + head) * (2 * HALF) + column
    tl.store(target, (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask=inside)
