"""Matrix products whose epilogue does the elementwise work that follows them (CODA,
arXiv:2605.19269, has this idea for a block).

A matrix product holds a tile of its result in registers, in float32, before it writes it. An
elementwise operation on that tile costs no memory traffic there. As kernels of their own, the same
operations read and write whole tensors:

    product                   epilogue                      saved for each token, in elements
    qkv = x W^T               RoPE rotates q and k          2 Dh (H + K)
    gate, up = x W^T          SwiGLU: silu(gate) up         2 F

Both epilogues combine two columns: the two coordinates of a rotation, or gate and up. The weight's
rows are stored so that these columns are neighbours (`memory/interleaved.py`). Then one thread
holds both, and no data moves between threads.

The kernel is persistent: each program computes several tiles, in an order in which neighbours share
rows or columns, which then come from the L2 cache. Blocks of the factors are loaded through tensor
descriptors, which on Hopper is the Tensor Memory Accelerator. Factors have 16 bits, and sums are
float32, in a fixed order.

A tile of 128 x 256 fills shared memory with three stages of its factors' blocks. It is stored in
halves, because its result as a whole would not fit beside them. While one multiprocessor stores,
others multiply, which hides most of SwiGLU in a long product.
"""

from version3_triton.kernels.checks import checked
from version3_triton.kernels.dependent_launch import begin, dependent
from version3_triton.kernels.launch_sizes import ceil_div
from version3_triton.kernels.memory import in_matrix
from version4_ultra_fused import trials
from version4_ultra_fused.kernels import elementwise, tiles
from version4_ultra_fused.kernels.reference import Rope
from version4_ultra_fused.kernels.tiles import largest, multiprocessors, product_tile

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

GROUP = 8  # rows of tiles that are worked through together
NEXT = tl.constexpr("next" in trials.ON)
WHOLE = tl.constexpr(128)  # most columns that a tile stores at once


@triton.jit
def corner(number, M, N, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Where a tile of a result [M, N] begins: GROUP rows of tiles are worked through together,
    column by column.
    """
    across = tl.cdiv(N, BN)
    down = tl.cdiv(M, BM)
    top = number // (GROUP * across) * GROUP
    height = tl.minimum(down - top, GROUP)
    return (top + number % (GROUP * across) % height) * BM, number % (GROUP * across) // height * BN


@triton.jit
def rotated_tile(
    acc,  # [BM, BN], float32
    m,  # the tile's first row
    n,  # its first column
    rows,  # M
    length,  # S
    rotated,  # columns of q and k
    cos_ptr,  # [S_max, Dh]
    sin_ptr,  # [S_max, Dh]
    HALF: tl.constexpr,  # Dh / 2
    BM: tl.constexpr,  # rows of a tile
    BN: tl.constexpr,  # columns of a tile
):
    """RoPE on a tile of q, k and v at row m and column n; columns from `rotated` on are v's, which
    stay.
    """
    row = m + tl.arange(0, BM)
    pair = n // 2 + tl.arange(0, BN // 2)
    table = (row % length)[:, None] * (2 * HALF) + (pair % HALF)[None, :]
    inside = in_matrix(row, rows, 2 * pair, rotated)
    cos = tl.load(cos_ptr + table, mask=inside, other=1.0)
    sin = tl.load(sin_ptr + table, mask=inside, other=0.0)
    first, second = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
    return tl.reshape(tl.join(first * cos - second * sin, second * cos + first * sin), (BM, BN))


@triton.jit
def store_swiglu(
    acc,  # [BM, BN], float32
    m,  # the tile's first row
    n,  # its first column
    gate_up,  # descriptor of [M, N]
    out,  # descriptor of [M, N / 2]
    BM: tl.constexpr,  # rows of a tile
    BN: tl.constexpr,  # columns of a tile
):
    """A tile of gate and up, which take turns, and of silu(gate) up."""
    gate_up.store([m, n], acc.to(gate_up.dtype))
    gate, up = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
    out.store([m, n // 2], (gate * tl.sigmoid(gate) * up).to(out.dtype))


@triton.jit
def _matmul(
    x,  # descriptor of [M, K]
    w,  # descriptor of [N, K]
    out,  # descriptor of [M, N], or of [M, N / 2]
    gate_up,  # descriptor of [M, N]
    M,  # rows of the result
    N,  # columns of the result
    K,  # the summed dimension
    length,  # S, for "rope" as the next three
    rotated,  # columns of q and k
    cos_ptr,  # [S_max, Dh]
    sin_ptr,  # [S_max, Dh]
    EPILOGUE: tl.constexpr,  # "rope" or "swiglu"
    HALF: tl.constexpr,  # Dh / 2
    PROGRAMS: tl.constexpr,  # how many there are
    GROUP: tl.constexpr,  # rows of tiles, as in `corner`
    BM: tl.constexpr,  # rows of a tile
    BN: tl.constexpr,  # columns of a tile
    BK: tl.constexpr,  # depth of a step
    DEPENDENT: tl.constexpr = False,  # whether the launch is dependent
):
    """x [M, K] by the transpose of w [N, K].

    EPILOGUE:
        "rope": out [M, N] is q, k and v.
        "swiglu": gate_up [M, N] is written, and out [M, N / 2] is silu(gate) up.
    """
    begin(DEPENDENT, NEXT)
    for number in tl.range(
        tl.program_id(0), tl.cdiv(M, BM) * tl.cdiv(N, BN), PROGRAMS, flatten=True
    ):
        m, n = corner(number, M, N, GROUP, BM, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            acc = tl.dot(x.load([m, k]), w.load([n, k]).T, acc)
        if EPILOGUE == "rope":
            acc = rotated_tile(acc, m, n, M, length, rotated, cos_ptr, sin_ptr, HALF, BM, BN)
            out.store([m, n], acc.to(out.dtype))
        elif BN > WHOLE:
            left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
            store_swiglu(left, m, n, gate_up, out, BM, BN // 2)
            store_swiglu(right, m, n + BN // 2, gate_up, out, BM, BN // 2)
        else:
            store_swiglu(acc, m, n, gate_up, out, BM, BN)


def in_epilogue(epilogue: str, rows: int, columns: int, *matrices: Tensor, depth: int = 1) -> bool:
    """Whether a product is computed with its epilogue: it is small enough, and tensor descriptors
    can describe its matrices.

    Args:
        rows, columns: of the product.
        matrices: that the kernel is given; in 16 bits its results have rows of `columns`, for
            "swiglu" also of half of them.
        depth: of a product with "norm".
    """
    small = rows * columns <= largest(epilogue, depth)
    narrowest = columns // 2 if epilogue == "swiglu" else columns
    aligned = all(
        x.stride(-1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
        for x in matrices
    )
    return aligned and narrowest % 8 == 0 and matrices[0].dtype.itemsize == 2 and small


def _launch(
    epilogue: str,
    x: Tensor,
    w: Tensor,
    results: tuple[Tensor, Tensor],
    *rope,
    HALF: int = 1,
) -> None:
    """`results` are `out` and `gate_up` of the kernel; `rope` its length, rotated, cos and sin."""
    M, K = x.shape
    N = w.shape[0]
    out, gate_up = results
    blocks = product_tile(epilogue, M, N)
    m, n, k = blocks[:3]
    stored = min(n, WHOLE.value) if epilogue == "swiglu" else n
    described = (
        (x, [m, k]),
        (w, [n, k]),
        (out, [m, stored // 2 if epilogue == "swiglu" else n]),
        (gate_up, [m, stored]),
    )
    programs = min(tiles.PROGRAMS * multiprocessors(), ceil_div(M, m) * ceil_div(N, n))
    _matmul[programs,](
        *(TensorDescriptor.from_tensor(matrix, block) for matrix, block in described),
        M,
        N,
        K,
        *(rope or (1, 0, None, None)),
        EPILOGUE=epilogue,
        HALF=HALF,
        PROGRAMS=programs,
        GROUP=GROUP,
        **blocks.arguments,
        **dependent(),
    )


@checked
def qkv_rope(x: Tensor, weight: Tensor, rope: Rope, rotated: int) -> Tensor:
    """x W^T with RoPE on its first `rotated` columns.

    Args:
        x: [B S, D].
        weight: [(H + 2 K) Dh, D], the rows of q and k interleaved.
        rotated: (H + K) Dh.

    Returns:
        [B S, (H + 2 K) Dh].
    """
    rows = x.shape[0]
    columns = weight.shape[0]
    if not in_epilogue("rope", rows, columns, x, weight):
        return elementwise.rotate(x @ weight.T, rope, rotated)
    out = x.new_empty(rows, columns)
    tables = (rope.cos, rope.sin)
    half = rope.head_dim // 2
    _launch("rope", x, weight, (out, out), rope.length, rotated, *tables, HALF=half)
    return out


@checked
def gate_up_swiglu(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up, which take turns, [B S, 2 F], and silu(gate) up [B S, F].

    Args:
        x: [B S, D].
        weight: [2 F, D], the rows of gate and up interleaved.
    """
    rows = x.shape[0]
    columns = weight.shape[0]
    if not in_epilogue("swiglu", rows, columns, x, weight):
        gate_up = x @ weight.T
        return gate_up, elementwise.swiglu(gate_up)
    gate_up = x.new_empty(rows, columns)
    y = x.new_empty(rows, columns // 2)
    _launch("swiglu", x, weight, (y, gate_up))
    return gate_up, y
