"""A matrix product whose epilogue is the gradient of SwiGLU before it, so the product's result is
never written.

With hidden = silu(gate) up and out = hidden W^T of the forward pass, W [D, F], the backward pass
has dhidden = dout W [N, F], and from it the gradients of gate and up, which take turns in [N, 2 F].

    alone       dhidden is written and read, gate and up are read and their gradients written: 6 N F
    epilogue    gate and up are read and their gradients written: 4 N F, and a launch less

A program loads its tile of gate and up before it multiplies, so that they are there at its end.
"""

from version3_triton.kernels.checks import checked
from version3_triton.kernels.dependent_launch import begin, dependent
from version3_triton.kernels.launch_sizes import ceil_div
from version3_triton.kernels.memory import in_matrix
from version4_ultra_fused.kernels import tiles
from version4_ultra_fused.kernels.elementwise import swiglu_gradient
from version4_ultra_fused.kernels.matmul import GROUP, NEXT, TensorDescriptor, corner, in_epilogue
from version4_ultra_fused.kernels.tiles import largest, multiprocessors, product_tile

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _matmul_swiglu_backward(
    dout,  # descriptor of [M, K]
    matrix,  # descriptor of [K, N]
    out,  # descriptor of gate_up [M, 2 N]
    gate_up_ptr,  # [M, 2 N]: gate and up, then their gradients
    dots_ptr,  # [tiles of N, M], float32; or None
    M,  # rows of the product
    N,  # columns of the product
    K,  # the summed dimension
    DOTS: tl.constexpr,  # whether to write parts of each row's sum of gate dgate + up dup
    PROGRAMS: tl.constexpr,  # how many there are
    GROUP: tl.constexpr,  # rows of tiles, as in `corner`
    BM: tl.constexpr,  # rows of a tile
    BN: tl.constexpr,  # columns of a tile of the product
    BK: tl.constexpr,  # depth of a step
    DEPENDENT: tl.constexpr = False,  # whether the launch is dependent
):
    """dout [M, K], matrix [K, N]; gate_up [M, 2 N] in place."""
    begin(DEPENDENT, NEXT)
    for number in range(tl.program_id(0), tl.cdiv(M, BM) * tl.cdiv(N, BN), PROGRAMS):
        m, n = corner(number, M, N, GROUP, BM, BN)
        row = m + tl.arange(0, BM)
        both = 2 * n + tl.arange(0, 2 * BN)
        inside = in_matrix(row, M, both, 2 * N)
        place = row[:, None].to(tl.int64) * (2 * N) + both[None, :]
        gate_up = tl.load(gate_up_ptr + place, mask=inside, other=0.0)
        dy = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            dy = tl.dot(dout.load([m, k]), matrix.load([k, n]), dy)
        gate, up = tl.split(tl.reshape(gate_up.to(tl.float32), (BM, BN, 2)))
        dgate, dup = swiglu_gradient(gate, up, dy)
        if DOTS:
            dots = tl.sum(gate * dgate + up * dup, axis=1)
            tl.store(dots_ptr + (n // BN) * M + row, dots, mask=row < M)
        dgate_up = tl.reshape(tl.join(dgate, dup), (BM, 2 * BN))
        out.store([m, 2 * n], dgate_up.to(out.dtype))


def swiglu_in_epilogue(dout: Tensor, matrix: Tensor, gate_up: Tensor) -> bool:
    """Whether `product_swiglu_backward` takes these."""
    return in_epilogue("swiglu_backward", len(dout), matrix.shape[1], dout, matrix, gate_up)


@checked
def product_swiglu_backward(
    dout: Tensor, matrix: Tensor, gate_up: Tensor, total: Tensor
) -> tuple[Tensor, Tensor | None]:
    """`swiglu_backward` of dhidden = dout W.

    Args:
        dout: [N, D].
        matrix: W [D, F].
        gate_up: [N, 2 F], contiguous.
        total: [N, D], as of `swiglu_backward`.
    """
    rows, depth = dout.shape
    columns = matrix.shape[1]
    blocks = product_tile("swiglu_backward", rows, columns)
    m, n, k = blocks[:3]
    needed = total.numel() <= largest("norm", 2 * columns)
    dots = dout.new_empty(ceil_div(columns, n), rows, dtype=torch.float32) if needed else None
    described = (dout, [m, k]), (matrix, [k, n]), (gate_up, [m, 2 * n])
    programs = min(tiles.PROGRAMS * multiprocessors(), ceil_div(rows, m) * ceil_div(columns, n))
    _matmul_swiglu_backward[programs,](
        *(TensorDescriptor.from_tensor(x, block) for x, block in described),
        gate_up,
        dots,
        rows,
        columns,
        depth,
        DOTS=needed,
        PROGRAMS=programs,
        GROUP=GROUP,
        **blocks.arguments,
        **dependent(),
    )
    return gate_up, dots
