"""Cross-entropy of logits and its gradient, in one pass over the logits.

For a token with logits z [V], target t, m = max z and l = log sum_v exp(z_v - m), with N tokens:

    loss = l - (z_t - m)        dz = (exp(z - m - l) - onehot(t)) / N

A program holds a whole row of logits in registers, so it reads each logit once and writes its gradient in its place: 4 V bytes a
token in 16 bits. Version 3's kernel reads the logits twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_VOCABULARY = 32768  # a row must stay in registers: 64 for each of 512 threads

WARPS = 16  # with 8 or 32 the longest rows spill


@triton.jit
def _cross_entropy(z_ptr, targets_ptr, losses_ptr, vocabulary, scale, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < vocabulary
    z_ptr += row * vocabulary + column
    target = tl.load(targets_ptr + row)
    z = tl.load(z_ptr, mask=inside, other=float("-inf")).to(tl.float32)
    z -= tl.max(z, axis=0)
    log_sum = tl.log(tl.sum(tl.exp(z), axis=0))
    tl.store(losses_ptr + row, log_sum - tl.sum(tl.where(column == target, z, 0.0), axis=0))
    if GRADIENT:
        dz = (tl.exp(z - log_sum) - tl.where(column == target, 1.0, 0.0)) * scale
        tl.store(z_ptr, dz.to(z_ptr.dtype.element_ty), mask=inside)


def cross_entropy(logits: Tensor, targets: Tensor, gradient: bool) -> Tensor:
    """The loss of each token [N], in nats; with `gradient` that of their mean is written over the logits.

    Args:
        logits: [N, V], contiguous, V at most 32,768.
        targets: [N], each in 0 .. V - 1.
    """
    tokens, vocabulary = logits.shape
    losses = logits.new_empty(tokens, dtype=torch.float32)
    block = triton.next_power_of_2(vocabulary)
    _cross_entropy[tokens,](
        logits,
        targets,
        losses,
        vocabulary,
        1 / tokens,
        GRADIENT=gradient,
        BLOCK=block,
        num_warps=min(WARPS, max(1, block // 1024)),
    )
    return losses
