"""Exercise 3, solved: online softmax, and causal attention without scores in memory. ../starter/
describes the arguments.
"""

import triton
import triton.language as tl


@triton.jit
def log_sum_exp_kernel(x_ptr, lse_ptr, size, x_row, BLOCK: tl.constexpr):
    """lse[r] = log of the sum of exp(x[r, :]); reads each number once, and holds BLOCK of them at a
    time.
    """
    row = tl.program_id(0).to(tl.int64)
    highest = float("-inf")  # m: the maximum so far
    total = 0.0  # l: the sum of exp(x - m) so far
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_row + column, mask=column < size, other=float("-inf")).to(
            tl.float32
        )
        new = tl.maximum(highest, tl.max(x, axis=0))
        # The exponential rescales the sum from the old maximum to the new one; in the first block
        # it is exp(-inf) = 0.
        total = total * tl.exp(highest - new) + tl.sum(tl.exp(x - new), axis=0)
        highest = new
    tl.store(lse_ptr + row, highest + tl.log(total))


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
    """
    tile = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64) // H
    head = tl.program_id(1) % H
    kv_head = head // GROUPS  # neighbouring query heads share keys and values without a copy
    query = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    element = tl.arange(0, DIM)
    real = (query < length)[:, None]  # [BLOCK_M, 1]: False after the last query

    q_ptr += batch * q_batch + head * q_head  # first element of this head
    k_ptr += batch * k_batch + kv_head * k_head
    v_ptr += batch * v_batch + kv_head * v_head
    # [BLOCK_M, DIM], for all key blocks
    q = tl.load(q_ptr + query[:, None] * q_row + element[None, :], mask=real, other=0.0)

    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    o = tl.zeros((BLOCK_M, DIM), tl.float32)
    visited = 0
    # Later keys come after every query of this program.
    end = tl.minimum((tile + 1) * BLOCK_M, length)
    for start in range(0, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        # False after the last key: 0 times the memory there could be NaN
        there = (key < length)[:, None]
        k = tl.load(k_ptr + key[:, None] * k_row + element[None, :], mask=there, other=0.0)
        v = tl.load(v_ptr + key[:, None] * v_row + element[None, :], mask=there, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
        # Keys after the last one are masked too.
        s = tl.where(key[None, :] <= query[:, None], s, float("-inf"))
        # It is finite: every query sees key 0, in the first block.
        new = tl.maximum(highest, tl.max(s, axis=1))
        p = tl.exp(s - new[:, None])
        shrink = tl.exp(highest - new)
        total = total * shrink + tl.sum(p, axis=1)
        # p takes the dtype of v, for the matrix units.
        o = o * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        highest = new
        visited += 1

    place = tl.program_id(1).to(tl.int64) * length + query  # of the query in [B, H, S]
    tl.store(
        o_ptr + place[:, None] * DIM + element[None, :],
        (o / total[:, None]).to(o_ptr.dtype.element_ty),
        mask=real,
    )
    tl.store(lse_ptr + place, highest + tl.log(total), mask=query < length)
    tl.store(visited_ptr + tl.program_id(1) * tl.num_programs(0) + tile, visited)


def visited_blocks(length: int, block_m: int, block_n: int) -> int:
    """The number of key blocks that all programs of one head read, if each stops after the key of
    its last query.
    """
    ends = (min(first + block_m, length) for first in range(0, length, block_m))
    return sum(triton.cdiv(end, block_n) for end in ends)
