"""Mean cross-entropy of logits and its gradient in FP8, by rows and transposed as in `casts.py`.

The gradient is dz = (softmax z - onehot) / N for N tokens that count, and |softmax z - onehot| <= 1
whatever the logits z are. So its scale needs no history: 2^-15 / N puts 1 / N at 2^15, below the
largest number of e5m2, 57,344. Nothing is clamped, and no maximum is found. A probability below
2^-32 becomes 0.

The kernels of `cross_entropy.py` compute the losses, and log sum exp z = loss + z_t. So a program
of the gradient's kernel needs no whole row: it has a tile, which it also writes transposed. Bytes
moved for each logit of 16 bits:

    losses                 2          reads 2
    gradient               4          reads 2, writes 1 + 1

A gradient of 16 bits over the logits, and `quantize`, would move 4 + 4.
"""

from version3_triton.kernels.checks import checked
from version3_triton.kernels.launch_sizes import ceil_div
from version3_triton.kernels.linear_cross_entropy import IGNORE_INDEX
from version3_triton.kernels.memory import in_matrix, read
from version4_ultra_fused.kernels.cross_entropy import mean_and_losses
from version4_ultra_fused.kernels.fp8.casts import COLUMNS, TOKENS, store
from version4_ultra_fused.kernels.reference import SUM_SCALE, logits_scale

import torch
import triton
import triton.language as tl
from torch import Tensor

INVERSE_SCALE = tl.constexpr(1 / SUM_SCALE)


@triton.jit
def _logits_gradient(
    z_ptr,  # [N, V]: logits
    targets_ptr,  # [N]
    losses_ptr,  # [N], float32
    rows_ptr,  # the result by rows
    columns_ptr,  # the result transposed
    N,  # tokens
    V,  # vocabulary
    TOKENS: tl.constexpr,  # rows of a tile
    COLUMNS: tl.constexpr,  # columns of a tile
):
    n = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    v = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start = n.to(tl.int64) * V
    target = tl.load(targets_ptr + n, mask=n < N, other=IGNORE_INDEX)
    known = (target >= 0) & (target < V)
    log_sum = read(losses_ptr + n, n < N) + read(z_ptr + start + target, known)
    z = read(z_ptr + start[:, None] + v[None, :], in_matrix(n, N, v, V))
    dz = tl.exp(z - log_sum[:, None]) - tl.where(v[None, :] == target[:, None], 1.0, 0.0)
    # The gradient of a token without a target.
    otherwise = tl.where(target == IGNORE_INDEX, 0.0, float("nan"))
    dz = tl.where(known[:, None], dz * INVERSE_SCALE, otherwise[:, None])
    dz = dz.to(rows_ptr.dtype.element_ty)
    store(dz, n, v, N, V, rows_ptr)
    store(tl.trans(dz), v, n, V, N, columns_ptr)


@checked
def cross_entropy_quantized(
    logits: Tensor, targets: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The mean loss of `cross_entropy`, with its arguments and errors; the gradient's scale, one
    float32 element; and the gradient in `dtype`, e5m2, by rows [N, V] and transposed [V, N].
    """
    tokens, vocabulary = logits.shape
    targets = targets.contiguous()
    mean, losses = mean_and_losses(logits, targets, False)
    rows = torch.empty_like(logits, dtype=dtype)
    columns = rows.new_empty(vocabulary, tokens)
    _logits_gradient[ceil_div(tokens, TOKENS), ceil_div(vocabulary, COLUMNS)](
        logits,
        targets,
        losses,
        rows,
        columns,
        tokens,
        vocabulary,
        TOKENS=TOKENS,
        COLUMNS=COLUMNS,
        num_warps=4,
    )
    return mean, logits_scale(targets), rows, columns
