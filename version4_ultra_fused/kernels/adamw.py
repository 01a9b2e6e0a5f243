"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) over all parameters, as one kernel.

With gradient g (the sum that was stored, times `scale`), step t, rate lr, decay d, and the moments
m and v:

    m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
    w = w (1 - lr d) - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

It moves 28 bytes a parameter where there is a working copy in 16 bits: it reads g (2), w, m and v
(12), and writes w, m, v (12) and the copy (2). With moments in bfloat16 it moves 20: m and v take 2
bytes each time in place of 4.

Such moments are rounded stochastically (Gupta et al. 2015, arXiv:1502.02551): of the two bfloat16
numbers around x, the nearer one is the likelier, so that the mean is x. Rounded to the nearest, v
would stand still where a step changes it by less than 1/512: one with g = 0 takes 1/1000 of it.
16 random bits are added to the 16 bits that bfloat16 leaves out, and these are cut off. The update
of w uses m and v before rounding.

The bits are those of Philox 4x32-10 (Salmon et al. 2011, doi:10.1145/2063384.2063405). Its key is
t, and its counter the number of four neighbouring parameters, so a step that is repeated draws the
same bits, on any device. One call gives each of the four 32 bits: the lower half is for m, the
upper half for v.
"""

import math

from version3_triton.kernels.checks import checked
from version3_triton.kernels.dependent_launch import begin, dependent
from version3_triton.kernels.launch_sizes import ceil_div
from version3_triton.kernels.memory import read

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _random(step, start, SIZE: tl.constexpr):
    """32 random bits for each of SIZE parameters from the number `start` on, a multiple of 4."""
    a, b, c, d = tl.randint4x(step.to(tl.int32), start // 4 + tl.arange(0, SIZE // 4))
    neighbours = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(neighbours, [SIZE]).to(tl.uint32, bitcast=True)


@triton.jit
def _rounded(x, random):
    """x in bfloat16, rounded with 16 random bits; NaN stays."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = tl.where(x == x, bits + random, 0x7FC00000)
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _adamw(
    w_ptr,  # [P], float32
    m_ptr,  # [P], float32 or bfloat16
    v_ptr,  # [P], as m
    g_ptr,  # [P]: the gradient
    copy_ptr,  # [P]: the working weights; or None
    step_ptr,  # one float32 element: t
    size,  # P
    lr,  # a number, or one float32 element
    blend1,  # 1 - beta1
    blend2,  # 1 - beta2
    log_beta1,  # to base 2
    log_beta2,  # to base 2
    eps,  # added to the root
    decay,  # d
    scale,  # a factor of the gradient
    start,  # the number of the first parameter
    RATE_ON_DEVICE: tl.constexpr,  # whether lr is an element
    COPY: tl.constexpr,  # whether to write the working weights
    ROUND: tl.constexpr,  # whether the moments are bfloat16
    BLOCK: tl.constexpr,  # elements of a program
    DEPENDENT: tl.constexpr = False,  # whether the launch is dependent
):
    begin(DEPENDENT)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    step = tl.load(step_ptr)
    if RATE_ON_DEVICE:
        lr = tl.load(lr)
    correction1 = 1 - tl.exp2(step * log_beta1)
    correction2 = 1 - tl.exp2(step * log_beta2)
    g = read(g_ptr + place, inside) * scale
    w = tl.load(w_ptr + place, mask=inside, other=0.0)
    m = read(m_ptr + place, inside)
    v = read(v_ptr + place, inside)
    m += blend1 * (g - m)
    v += blend2 * (g * g - v)
    w = w * (1 - lr * decay) - lr * (m / correction1) / (tl.sqrt(v / correction2) + eps)
    if ROUND:
        random = _random(step, start + tl.program_id(0).to(tl.int64) * BLOCK, BLOCK)
        m = _rounded(m, random & 0xFFFF)
        v = _rounded(v, random >> 16)
    tl.store(m_ptr + place, m, mask=inside)
    tl.store(v_ptr + place, v, mask=inside)
    tl.store(w_ptr + place, w, mask=inside)
    if COPY:
        tl.store(copy_ptr + place, w, mask=inside)


@checked
def adamw(
    weight: Tensor,
    moments: tuple[Tensor, Tensor],
    gradient: Tensor,
    working: Tensor | None,
    steps: Tensor,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    scale: float = 1.0,
    start: int = 0,
) -> None:
    """One update in place, of flat buffers [P].

    Args:
        weight: float32.
        moments: of the gradient and of its square, float32; or bfloat16, rounded stochastically.
        gradient: in any dtype.
        working: takes the new weights in its own dtype, or None.
        steps: the number of this step, from 1, one float32 element.
        lr: a number, or one float32 element, which a captured step reads anew.
        scale: of the gradient; 1 / n where it is a sum over n processes.
        start: the number of the first parameter among all of a model, which fixes its random bits;
            a multiple of 4.
    """
    _adamw[ceil_div(weight.numel(), BLOCK),](
        weight,
        *moments,
        gradient,
        working,
        steps,
        weight.numel(),
        lr,
        *(1 - beta for beta in betas),
        *(math.log2(beta) for beta in betas),
        eps,
        weight_decay,
        scale,
        start,
        RATE_ON_DEVICE=isinstance(lr, Tensor),
        COPY=working is not None,
        ROUND=moments[0].dtype == torch.bfloat16,
        BLOCK=BLOCK,
        num_warps=4,
        **dependent(),
    )
