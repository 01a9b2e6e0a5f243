"""The optional problems that have code of their own. ../if_you_have_time.md describes them.

Replace each line that names its problem, and run `pytest test_exercises.py -k rope` (or tiles) in the folder above.
"""

import triton
import triton.language as tl

# ------------------------------------------------------------------------------------------------------------------- rope


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
    tl.static_assert(False, "rope_kernel: problem rope of if_you_have_time.md")


# ------------------------------------------------------------------------------------------------------------------ tiles


def numbers_read(length: int, block_m: int, block_n: int, head_dim: int) -> int:
    """How many numbers of K and V all programs of one head read, if no cache helps.

    A program has `block_m` queries. It reads keys and values in blocks of `block_n`, up to the block that holds the key of its
    last query. Rows after `length` are masked and not read.
    """
    raise NotImplementedError("numbers_read: problem tiles of if_you_have_time.md")


def fastest(rows: list[dict], kernel: str, head_dim: int) -> list[dict]:
    """The rows of this kernel and head dimension, the fastest first; without those that have no time.

    Args:
        rows: of tiles.json, {"kernel": name, "size": head dimension, "candidate": [m, n, warps, stages], "us": time or None}.
    """
    raise NotImplementedError("fastest: problem tiles of if_you_have_time.md")
