"""The gradient of the embedding, added to that of the output head, which shares its weight.

The tokens are sorted by their ids first, which can run beside the loss. Tokens with one id then
stand together, and the program of the first of them adds their gradients in order, a few rows at a
time. So repeats give the same bits, no atomics are needed, and each gradient is read once.
"""

from version3_triton.kernels.checks import checked
from version3_triton.kernels.dependent_launch import begin, dependent
from version3_triton.kernels.launch_sizes import ceil_div
from version3_triton.kernels.memory import read

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _embedding_backward(
    ids_ptr,  # [N], sorted
    order_ptr,  # [N]: the token of each
    dx_ptr,  # [N, D]
    dweight_ptr,  # [V, D], added to
    tokens,  # N
    size,  # D
    ROWS: tl.constexpr,  # tokens at a time
    BLOCK: tl.constexpr,  # columns of a program
    DEPENDENT: tl.constexpr = False,  # whether the launch is dependent
):
    begin(DEPENDENT, True)
    first = tl.program_id(0)
    token_id = tl.load(ids_ptr + first)
    if tl.load(ids_ptr + first - 1, mask=first > 0, other=-1) == token_id:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = dweight_ptr + token_id * size + column
    total = tl.zeros((BLOCK,), tl.float32)
    start = first
    same = ROWS
    while same == ROWS:
        place = start + tl.arange(0, ROWS)
        chosen = tl.load(ids_ptr + place, mask=place < tokens, other=-1) == token_id
        row = tl.load(order_ptr + place, mask=chosen, other=0)
        inside = chosen[:, None] & (column < size)[None, :]
        total += tl.sum(
            read(dx_ptr + row[:, None] * size + column[None, :], inside),
            axis=0,
        )
        same = tl.sum(chosen.to(tl.int32), axis=0)
        start += ROWS
    tl.store(target, tl.load(target, mask=column < size, other=0.0) + total, mask=column < size)


@checked
def add_embedding_gradient(dx: Tensor, ids: Tensor, order: Tensor, dweight: Tensor) -> None:
    """dweight[ids[i]] += dx[order[i]] for all tokens i.

    Args:
        dx: [N, D].
        ids, order: [N], from a stable sort of the ids.
        dweight: [V, D], float32, contiguous.
    """
    assert dweight.is_contiguous()
    size = dweight.shape[1]
    dx = dx.contiguous()
    block = min(256, triton.next_power_of_2(size))
    _embedding_backward[ids.numel(), ceil_div(size, block)](
        ids.contiguous(),
        order.contiguous(),
        dx,
        dweight,
        ids.numel(),
        size,
        ROWS=16,
        BLOCK=block,
        num_warps=4,
        **dependent(),
    )
