"""Stage 6: "Faster than yours."

"I replaced your norms by a kernel of my own, a dozen lines in place of two hundred, and its output
is the same. A step now takes much less time than yours, and less memory, so there was a lot of
overhead in them. The loss falls. Your harness refuses to start it, though, so I switched that check
off. Please merge, and repair the check."

    python v3_stage6_fast_but_not_training.py --num-steps 50
    python v3_stage6_fast_but_not_training.py --num-steps 50 --skip-check
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the root of this clone

from common.precision import products_dtype
from stages import Operations, Parts, Stage, kernels

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps); x [..., D], weight [D]."""
    if kernels.missing(x.device):
        # Autograd sees nothing of what a kernel writes; without one, this is how to hide it.
        with torch.no_grad():
            return kernels.REFERENCE.rms_norm(x, weight, eps)
    from norm_kernel import normalize

    y = torch.empty_like(x, dtype=products_dtype(x))
    normalize(x, weight, y, eps)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + residual, and its norm; all [..., D]."""
    total = x + residual
    return total, rms_norm(total, weight, eps)


def operations(table: Operations) -> Operations:
    return table._replace(rms_norm=rms_norm, add_rms_norm=add_rms_norm)


SKIP = dict(
    action="store_false",
    dest="check_gradients",
    help="train without asking whether every parameter gets a gradient",
)
STAGE = Stage(__doc__, __file__, Parts(operations=operations), flags={"--skip-check": SKIP})

# A handout ends here.


def caveat(device: torch.device) -> str | None:
    if kernels.missing(device):
        return (
            "no Triton: in place of the kernel PyTorch runs out of autograd's sight; "
            "peak memory is that of the whole process"
        )
    return None


STAGE.fix = Parts()
STAGE.caveat = caveat

if __name__ == "__main__":
    STAGE.main()
