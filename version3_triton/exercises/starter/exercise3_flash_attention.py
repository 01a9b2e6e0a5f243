"""Exercise 3: the online softmax, and attention without a row of scores in memory. ../exercise3_flash_attention.md has the parts.

Replace each line that says which part it is, and run `pytest test_exercises.py -k exercise3` in the folder above.
"""

import triton
import triton.language as tl

# ----------------------------------------------------------------------------------------------------------------- part a


@triton.jit
def log_sum_exp_kernel(x_ptr, lse_ptr, size, x_row, BLOCK: tl.constexpr):
    """lse[r] = log of the sum of exp(x[r, :]), reading each number once and holding BLOCK of them at a time.

    Program r has row r. Computed in float32.

    Args:
        x_ptr: [rows, size]; x[r, c] lies at x_ptr + r x_row + c. Size may be larger or smaller than BLOCK.
        lse_ptr: [rows], float32.
        BLOCK: a power of two.
    """
    tl.static_assert(False, "log_sum_exp_kernel: part a of exercise3_flash_attention.md")


# ---------------------------------------------------------------------------------------------------------- parts b, c, d


@triton.jit
def attention_forward_kernel(
        q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, visited_ptr, length, scale,
        q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
        H: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """o[i] = sum over j <= i of p_ij v[j], with p_ij = exp(s_ij - lse[i]) and s_ij = scale q[i] k[j], for each batch and head.

    Program (t, b H + h) has the queries t BLOCK_M to (t + 1) BLOCK_M - 1 of head h in batch b; the last may have fewer. It goes
    over the keys in blocks of BLOCK_N. Scores, maximum, sum and o are float32.

    Args:
        q_ptr: [B, H, S, DIM]; q[b, h, i, e] lies at q_ptr + b q_batch + h q_head + i q_row + e. S is `length`.
        k_ptr, v_ptr: [B, H / GROUPS, S, DIM], with strides of their own. Part c: head h reads key/value head h // GROUPS.
        o_ptr: [B, H, S, DIM], contiguous, in q's type.
        lse_ptr: [B, H, S], contiguous, float32: natural log of the sum over j <= i of exp(s_ij).
        visited_ptr: [B, H, number of programs in t], contiguous, int32. Part d: how many blocks of keys the program went over.
        DIM, BLOCK_M, BLOCK_N: powers of two, 16 or more.
    """
    tl.static_assert(False, "attention_forward_kernel: part b of exercise3_flash_attention.md")


def visited_blocks(length: int, block_m: int, block_n: int) -> int:
    """Blocks of keys that the programs of one head go over, all together, if each stops after its last query's own key."""
    raise NotImplementedError("visited_blocks: part d of exercise3_flash_attention.md")
