"""Exercise 3, solved: the online softmax, and causal attention that never holds a row of scores."""

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
    row = tl.program_id(0).to(tl.int64)
    highest = float("-inf")  # m: the largest number so far
    total = 0.0  # l: the sum so far of exp(x - m)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_row + column, mask=column < size, other=float("-inf")).to(tl.float32)
        new = tl.maximum(highest, tl.max(x, axis=0))
        # The first factor turns a sum for the old maximum into one for the new; in the first block it is exp(-inf) = 0.
        total = total * tl.exp(highest - new) + tl.sum(tl.exp(x - new), axis=0)
        highest = new
    tl.store(lse_ptr + row, highest + tl.log(total))


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
    tile = tl.program_id(0)
    batch, head = tl.program_id(1).to(tl.int64) // H, tl.program_id(1) % H
    kv_head = head // GROUPS  # neighbouring query heads share keys and values, which are not copied
    query = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    element = tl.arange(0, DIM)
    real = (query < length)[:, None]  # [BLOCK_M, 1]: the ragged tail of the queries

    q_ptr += batch * q_batch + head * q_head  # this head's first number
    k_ptr += batch * k_batch + kv_head * k_head
    v_ptr += batch * v_batch + kv_head * v_head
    q = tl.load(q_ptr + query[:, None] * q_row + element[None, :], mask=real, other=0.0)  # [BLOCK_M, DIM], for the whole loop

    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    o = tl.zeros((BLOCK_M, DIM), tl.float32)
    visited = 0
    end = tl.minimum((tile + 1) * BLOCK_M, length)  # keys from here on come after every query of this program
    for start in range(0, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        there = (key < length)[:, None]  # the ragged tail of the keys: 0 times whatever lies there could be NaN
        k = tl.load(k_ptr + key[:, None] * k_row + element[None, :], mask=there, other=0.0)
        v = tl.load(v_ptr + key[:, None] * v_row + element[None, :], mask=there, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
        s = tl.where(key[None, :] <= query[:, None], s, float("-inf"))  # keys behind the end come after every real query
        new = tl.maximum(highest, tl.max(s, axis=1))  # finite: the first block has key 0, which every query sees
        p = tl.exp(s - new[:, None])
        shrink = tl.exp(highest - new)
        total = total * shrink + tl.sum(p, axis=1)
        o = o * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")  # in v's type, for the matrix units
        highest = new
        visited += 1

    place = tl.program_id(1).to(tl.int64) * length + query  # of the query in [B, H, S]
    tl.store(o_ptr + place[:, None] * DIM + element[None, :], (o / total[:, None]).to(o_ptr.dtype.element_ty), mask=real)
    tl.store(lse_ptr + place, highest + tl.log(total), mask=query < length)
    tl.store(visited_ptr + tl.program_id(1) * tl.num_programs(0) + tile, visited)


def visited_blocks(length: int, block_m: int, block_n: int) -> int:
    """Blocks of keys that the programs of one head go over, all together, if each stops after its last query's own key."""
    ends = (min(first + block_m, length) for first in range(0, length, block_m))
    return sum(triton.cdiv(end, block_n) for end in ends)
