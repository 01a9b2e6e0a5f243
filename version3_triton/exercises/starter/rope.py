"""Exercise 1, problem (rope): a rotary embedding. ../exercise1_triton_basics.md describes it.

Replace the line that names the problem, and run `pytest test_exercises.py -k rope` in the folder
above.
"""

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
    """out = (a cos - b sin, b cos + a sin) for the halves a and b of a head, sin times SIGN.

    Program (t, h) computes head h of token t, whose position is t % length. Computes in float32.

    Args:
        x_ptr: [tokens, heads, 2 HALF]; x[t, h, c] lies at x_ptr + t x_token + h 2 HALF + c.
        cos_ptr, sin_ptr: [length, 2 HALF], contiguous; both halves of a row are equal.
        out_ptr: [tokens, heads, 2 HALF], contiguous, with the dtype of x.
        SIGN: 1 forward, -1 backward.
        BLOCK: a power of two, HALF or more.
    """
    tl.static_assert(False, "rope_kernel: problem rope of exercise1_triton_basics.md")
