"""The kernel of stage 4: two matmuls of the feed-forward part and SwiGLU in one launch, one program
per output element.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _swiglu(x_ptr, weight_ptr, y_ptr, hidden, size, BLOCK: tl.constexpr):
    """y[t, f] = silu(x[t] . Wg[f]) * (x[t] . Wu[f])."""
    program = tl.program_id(0).to(tl.int64)
    token = program // size
    f = program % size
    x_ptr += token * hidden
    gate_ptr = weight_ptr + f * hidden
    up_ptr = weight_ptr + (size + f) * hidden
    gate = tl.zeros((BLOCK,), tl.float32)
    up = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, hidden, BLOCK):
        d = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + d, mask=d < hidden, other=0.0).to(tl.float32)
        gate += x * tl.load(gate_ptr + d, mask=d < hidden, other=0.0).to(tl.float32)
        up += x * tl.load(up_ptr + d, mask=d < hidden, other=0.0).to(tl.float32)
    gate = tl.sum(gate, axis=0)
    up = tl.sum(up, axis=0)
    tl.store(y_ptr + program, (gate * tl.sigmoid(gate) * up).to(y_ptr.dtype.element_ty))


def swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, S, D], weight [2 F, D] (gate above up) -> [B, S, F], all of one dtype; without a
    gradient.
    """
    x = x.contiguous()
    weight = weight.contiguous()
    hidden = x.shape[-1]
    size = weight.shape[0] // 2
    y = torch.empty(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    _swiglu[(y.numel(),)](x, weight, y, hidden, size, BLOCK=128)
    return y
