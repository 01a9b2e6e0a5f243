"""Mean cross-entropy of logits and its gradient, in one kernel that writes the gradient over the
logits.

For a token with logits z [V], target t, m = max z and s = sum_v exp(z_v - m), for N tokens that
count:

    loss = mean (log s - (z_t - m))        dz = (exp(z - m) / s - onehot(t)) / N

A program has a row of logits. A short row stays in registers. A long one is read twice, a block at
a time with a running maximum (online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867), but
the second time from the L2 cache. So 4 V bytes a token move in 16 bits.

A token with target -100 does not count, and its dz is 0. How many count is known only when all
targets have been read. So the first kernel divides by the number of all tokens. The second kernel
takes the mean, as PyTorch's would otherwise, and scales the gradient again where some tokens did
not count: that second pass, and a second rounding, are what -100 costs.
"""

from tracepage.errors import UsageError
from version3_triton.kernels.checks import checked
from version3_triton.kernels.dependent_launch import begin, dependent
from version3_triton.kernels.linear_cross_entropy import IGNORE_INDEX
from version3_triton.kernels.memory import read
from version4_ultra_fused.kernels.tiles import multiprocessors

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192  # most logits that a program holds; measured on an H200 for V = 32,000


@triton.jit
def _cross_entropy(
    z_ptr,  # [N, V]: logits, then their gradient
    targets_ptr,  # [N]
    losses_ptr,  # [N], float32
    vocabulary,  # V
    scale,  # 1 / N
    GRADIENT: tl.constexpr,  # whether to write it
    SHORT: tl.constexpr,  # whether a row fits a block
    BLOCK: tl.constexpr,  # logits at a time
    DEPENDENT: tl.constexpr = False,  # whether the launch is dependent
):
    begin(DEPENDENT, True)
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * vocabulary
    target = tl.load(targets_ptr + row)
    known = (target >= 0) & (target < vocabulary)
    # It is read before the row is overwritten.
    chosen = read(z_ptr + target, known)
    column = tl.arange(0, BLOCK)
    if SHORT:
        z = read(z_ptr + column, column < vocabulary, float("-inf"))
        maximum = tl.max(z, axis=0)
        z = tl.exp(z - maximum)
        normalizer = tl.sum(z, axis=0)
    else:
        maximum = tl.full((), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocabulary, BLOCK):
            z = read(z_ptr + start + column, start + column < vocabulary, float("-inf"))
            highest = tl.maximum(maximum, tl.max(z, axis=0))
            total = total * tl.exp(maximum - highest) + tl.exp(z - highest)
            maximum = highest
        normalizer = tl.sum(total, axis=0)
    # The loss and gradient of a token without a target.
    otherwise = tl.where(target == IGNORE_INDEX, 0.0, float("nan"))
    tl.store(losses_ptr + row, tl.where(known, tl.log(normalizer) - (chosen - maximum), otherwise))
    if GRADIENT:
        inverse = tl.where(known, 1.0 / normalizer, otherwise)
        if SHORT:
            dz = (z * inverse - tl.where(column == target, 1.0, 0.0)) * scale
            tl.store(z_ptr + column, dz, mask=column < vocabulary)
        else:
            for start in range(0, vocabulary, BLOCK):
                inside = start + column < vocabulary
                z = read(z_ptr + start + column, inside, float("-inf"))
                dz = (
                    tl.exp(z - maximum) * inverse - tl.where(start + column == target, 1.0, 0.0)
                ) * scale
                tl.store(z_ptr + start + column, dz, mask=inside)


@triton.jit
def _cross_entropy_mean(
    losses_ptr,  # [N], float32
    targets_ptr,  # [N]
    mean_ptr,  # one float32 element
    dz_ptr,  # [N, V]: the gradient over all N
    tokens,  # N
    vocabulary,  # V
    GRADIENT: tl.constexpr,  # whether there is one
    BLOCK: tl.constexpr,  # tokens, or columns, at a time
    DEPENDENT: tl.constexpr = False,  # whether the launch is dependent
):
    """Each program counts; the first writes the mean, and all scale the gradient if there is one
    and tokens do not count.
    """
    begin(DEPENDENT, True)
    program = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    counted = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        target = tl.load(targets_ptr + token, mask=token < tokens, other=IGNORE_INDEX)
        counted += (target != IGNORE_INDEX).to(tl.int32)
        total += tl.load(losses_ptr + token, mask=token < tokens, other=0.0)
    count = tl.sum(counted, axis=0)
    if program == 0:
        tl.store(mean_ptr, tl.sum(total, axis=0) / count)
    if GRADIENT:
        scale = tokens / tl.maximum(count, 1).to(tl.float32)
        rows = tl.where(count < tokens, tokens, 0)  # none where all tokens count
        for row in range(program.to(tl.int64), rows, tl.num_programs(0)):
            for start in range(0, vocabulary, BLOCK):
                column = start + tl.arange(0, BLOCK)
                place = dz_ptr + row * vocabulary + column
                dz = read(place, column < vocabulary) * scale
                tl.store(place, dz, mask=column < vocabulary)


def mean_and_losses(logits: Tensor, targets: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
    """`cross_entropy`, and the losses of all tokens [N], float32; 0 for one that does not count."""
    tokens, vocabulary = logits.shape
    targets = targets.contiguous()
    if not tokens:
        raise UsageError("the loss is a mean over tokens, and there are none")
    assert logits.is_contiguous()
    if not targets.is_cuda:
        wrong = targets[(targets != IGNORE_INDEX.value) & ((targets < 0) | (targets >= vocabulary))]
        if len(wrong):
            raise IndexError(f"Target {wrong[0].item()} is out of bounds.")
    losses = logits.new_empty(tokens, dtype=torch.float32)
    mean = logits.new_empty((), dtype=torch.float32)
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    _cross_entropy[tokens,](
        logits,
        targets,
        losses,
        vocabulary,
        1 / tokens,
        GRADIENT=gradient,
        SHORT=vocabulary <= block,
        BLOCK=block,
        num_warps=max(4, block // 1024),
        **dependent(),
    )
    _cross_entropy_mean[multiprocessors() if gradient else 1,](
        losses,
        targets,
        mean,
        logits,
        tokens,
        vocabulary,
        GRADIENT=gradient,
        BLOCK=2048,
        num_warps=8,
        **dependent(),
    )
    return mean, losses


@checked
def cross_entropy(logits: Tensor, targets: Tensor, gradient: bool) -> Tensor:
    """The mean loss of the tokens that count, in nats; with `gradient` its gradient is written over
    the logits.

    Without any token that counts the loss is nan and the gradient 0. On a GPU a target that is
    neither a token's id nor -100 makes the loss and its token's gradient nan. This adds no kernel
    to a captured step, as an assertion by PyTorch would.

    Args:
        logits: [N, V], contiguous.
        targets: [N], each in 0 .. V - 1, or -100; any stride.

    Raises:
        UsageError: there are no tokens.
        IndexError: another target, on a CPU.
    """
    return mean_and_losses(logits, targets, gradient)[0]
