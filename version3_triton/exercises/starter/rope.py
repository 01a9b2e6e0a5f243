"""Problem (rope) of MORE_PROBLEMS.md: a rotary embedding, forward and backward.

Replace the line that names the problem, and run `pytest test_exercises.py -k rope` in the folder above.
"""

import triton
import triton.language as tl


@triton.jit
def rope_kernel(x_ptr, cos_ptr, sin_ptr, out_ptr, length, token_stride, SIGN: tl.constexpr, HALF: tl.constexpr):
    """out = (a cos - b sin, b cos + a sin) with sin times SIGN, for the halves a and b of every head; in float32 inside.

    Program (t, h) computes head h of token t. Token t has position t % length.

    Args:
        x_ptr: [tokens, heads, 2 HALF]; x[t, h, c] lies at x_ptr + t token_stride + h 2 HALF + c.
        cos_ptr, sin_ptr: [length, 2 HALF], contiguous; both halves of a row are equal.
        out_ptr: [tokens, heads, 2 HALF], contiguous, with the dtype of x.
        SIGN: 1 turns forward, -1 turns back.
        HALF: a power of two.
    """
    tl.static_assert(False, "rope_kernel: problem rope of MORE_PROBLEMS.md")
