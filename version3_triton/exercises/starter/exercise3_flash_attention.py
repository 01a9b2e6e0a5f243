"""Exercise 3: online softmax, and attention without scores in memory.
../exercise3_flash_attention.md describes the problems.

Replace each line that names its problem, and run `pytest test_exercises.py -k exercise3` in the
folder above.
"""

import triton
import triton.language as tl


@triton.jit
def log_sum_exp_kernel(x_ptr, lse_ptr, size, x_row, BLOCK: tl.constexpr):
    """lse[r] = log of the sum of exp(x[r, :]); reads each number once, and holds BLOCK of them at a
    time.

    Program r computes row r, in float32.

    Args:
        x_ptr: [rows, size]; x[r, c] lies at x_ptr + r x_row + c. `size` may be larger or smaller
            than BLOCK.
        lse_ptr: [rows], float32.
        BLOCK: a power of two.
    """
    tl.static_assert(False, "log_sum_exp_kernel: problem 3a of exercise3_flash_attention.md")


@triton.jit
def attention_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    visited_ptr,
    length,
    scale,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """o[i] = sum over j <= i of p_ij v[j], with p_ij = exp(s_ij - lse[i]) and s_ij = scale q[i]
    k[j], for each batch and head.

    Program (t, b H + h) computes queries t BLOCK_M to (t + 1) BLOCK_M - 1 of head h in batch b; the
    last one may have fewer. It reads the keys in blocks of BLOCK_N. Scores, maximum, sum and o are
    float32.

    Args:
        q_ptr: [B, H, S, DIM]; q[b, h, i, e] lies at q_ptr + b q_batch + h q_head + i q_row + e. S
            is `length`.
        k_ptr, v_ptr: [B, H / GROUPS, S, DIM], with their own strides. Step 2: head h reads
            key/value head h // GROUPS.
        o_ptr: [B, H, S, DIM], contiguous, with the dtype of q.
        lse_ptr: [B, H, S], contiguous, float32: natural log of the sum over j <= i of exp(s_ij).
        visited_ptr: [B, H, number of programs in t], contiguous, int32. Step 3: the number of key
            blocks that the program read.
        DIM, BLOCK_M, BLOCK_N: powers of two, 16 or more.
    """
    tl.static_assert(False, "attention_forward_kernel: problem 3b of exercise3_flash_attention.md")


def visited_blocks(length: int, block_m: int, block_n: int) -> int:
    """The number of key blocks that all programs of one head read, if each stops after the key of
    its last query.
    """
    raise NotImplementedError("visited_blocks: problem 3b of exercise3_flash_attention.md")
