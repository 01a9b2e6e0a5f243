"""Problem (rope), solved. ../starter/ describes the arguments."""

import triton
import triton.language as tl


@triton.jit
def rope_kernel(x_ptr, cos_ptr, sin_ptr, out_ptr, length, token_stride, SIGN: tl.constexpr, HALF: tl.constexpr):
    """out = (a cos - b sin, b cos + a sin) with sin times SIGN, for the halves a and b of every head; in float32 inside."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, HALF)
    table = token % length * (2 * HALF) + column  # both halves of the tables are equal, so one is enough
    cos = tl.load(cos_ptr + table).to(tl.float32)
    sin = tl.load(sin_ptr + table).to(tl.float32) * SIGN
    source = x_ptr + token * token_stride + head * (2 * HALF) + column
    a = tl.load(source).to(tl.float32)
    b = tl.load(source + HALF).to(tl.float32)
    target = out_ptr + (token * tl.num_programs(1) + head) * (2 * HALF) + column
    tl.store(target, (a * cos - b * sin).to(out_ptr.dtype.element_ty))
    tl.store(target + HALF, (b * cos + a * sin).to(out_ptr.dtype.element_ty))
