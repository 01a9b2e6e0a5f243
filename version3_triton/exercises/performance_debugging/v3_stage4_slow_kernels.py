"""Stage 4: "Everything is a kernel now."

"Both matrix products and SwiGLU in one kernel: gate and up never exist in memory, so by the bytes
it must be faster. The clock is right this time, and the numbers are. But a step takes many times as
long. Is Triton's compiler so bad?"

    python v3_stage4_slow_kernels.py --num-steps 20 --profile-operators

On a CPU add --batch-size 1.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the root of this clone

from functools import partial

from common.spans import span
from stages import Parts, Stage, kernels, v3

import torch
import torch.nn.functional as F
from torch import Tensor


def change(model: v3.TinyLlama) -> None:
    for layer in model.layers:
        layer.mlp.forward = partial(feed_forward, layer.mlp)


@span("mlp")
def feed_forward(mlp: v3.FeedForward, x: Tensor) -> Tensor:  # [B, S, D] -> [B, S, D]
    return mlp.down_proj(FusedSwiGLU.apply(x, mlp.gate_up_proj.weight.to(x.dtype)))


class FusedSwiGLU(torch.autograd.Function):
    """silu(x Wg^T) * (x Wu^T) [B, S, F] of x [B, S, D] and the weight [2 F, D] of gate and up."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if kernels.missing(x.device):
            gate, up = (x.unsqueeze(-2) * weight).sum(-1).chunk(2, dim=-1)
            return F.silu(gate) * up
        from swiglu_kernel import swiglu

        return swiglu(x, weight)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            gate, up = F.linear(x, weight).chunk(2, dim=-1)
            y = F.silu(gate) * up
        return torch.autograd.grad(y, (x, weight), dy)


STAGE = Stage(__doc__, __file__, Parts(change))

# A handout ends here.


def caveat(device: torch.device) -> str | None:
    if kernels.missing(device):
        return (
            "no Triton: in place of the kernel PyTorch multiplies and adds, "
            "which does the same products as slowly"
        )
    return None


STAGE.fix = Parts()
STAGE.caveat = caveat

if __name__ == "__main__":
    STAGE.main()
