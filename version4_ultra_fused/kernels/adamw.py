"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) over all parameters, as one kernel.

With gradient g (the sum that was stored, times `scale`), step t, rate lr, decay d, and the moments
m and v:

    m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
    w = w (1 - lr d) - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

It moves 28 bytes a parameter where there is a working copy in 16 bits: it reads g (2), w, m and v
(12), and writes w, m, v (12) and the copy (2).
"""

import math

from version3_triton.kernels.checks import interpretable
from version3_triton.kernels.dependent_launch import begin, dependent
from version3_triton.kernels.launch_sizes import ceil_div

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _adamw(
    w_ptr,
    m_ptr,
    v_ptr,
    g_ptr,
    copy_ptr,
    step_ptr,
    size,
    lr,
    blend1,
    blend2,
    log_beta1,
    log_beta2,
    eps,
    decay,
    scale,
    RATE_ON_DEVICE: tl.constexpr,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    begin(DEPENDENT)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    step = tl.load(step_ptr)
    if RATE_ON_DEVICE:
        lr = tl.load(lr)
    correction1 = 1 - tl.exp2(step * log_beta1)
    correction2 = 1 - tl.exp2(step * log_beta2)
    g = tl.load(g_ptr + place, mask=inside, other=0.0).to(tl.float32) * scale
    w = tl.load(w_ptr + place, mask=inside, other=0.0)
    m = tl.load(m_ptr + place, mask=inside, other=0.0)
    v = tl.load(v_ptr + place, mask=inside, other=0.0)
    m += blend1 * (g - m)
    v += blend2 * (g * g - v)
    w = w * (1 - lr * decay) - lr * (m / correction1) / (tl.sqrt(v / correction2) + eps)
    tl.store(m_ptr + place, m, mask=inside)
    tl.store(v_ptr + place, v, mask=inside)
    tl.store(w_ptr + place, w, mask=inside)
    if COPY:
        tl.store(copy_ptr + place, w.to(copy_ptr.dtype.element_ty), mask=inside)


@interpretable
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
) -> None:
    """One update in place, of flat buffers [P].

    Args:
        weight: float32.
        moments: of the gradient and of its square, float32.
        gradient: in any dtype.
        working: takes the new weights in its own dtype, or None.
        steps: the number of this step, from 1, one float32 element.
        lr: a number, or one float32 element, which a captured step reads anew.
        scale: of the gradient; 1 / n where it is a sum over n processes.
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
        RATE_ON_DEVICE=isinstance(lr, Tensor),
        COPY=working is not None,
        BLOCK=BLOCK,
        num_warps=4,
        **dependent(),
    )
