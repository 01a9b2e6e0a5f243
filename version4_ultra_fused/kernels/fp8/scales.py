"""The scales of tensors in FP8, from their largest magnitudes in the last steps ("delayed
scaling").

Of each product x W^T three tensors are stored in FP8: x, W and the gradient of the result. The
magnitudes are state of the optimizer. They start at zero, which stands for ASSUMED. Gradients are
those of the mean loss, so they shrink as a batch grows. Their magnitude is kept for the sum of the
losses, so that it does not depend on the batch.
"""

from collections.abc import Sequence

from version4_ultra_fused.kernels.reference import Slot

import torch
import torch.distributed as dist
from torch import Tensor

HISTORY = 16  # steps
# before the first step, of x, W and the gradient: far from both ends of the formats
ASSUMED = (32.0, 1.0, 4.0)
X = 0
WEIGHT = 1
GRADIENT = 2


def formats() -> tuple[torch.dtype, torch.dtype]:
    """e4m3 and e5m2 as this GPU has them: AMD's MI300 has no infinity and another bias."""
    if torch.version.hip and "gfx942" in torch.cuda.get_device_properties(0).gcnArchName:
        return torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
    return torch.float8_e4m3fn, torch.float8_e5m2


class Scales:
    """The scales of the tensors of all products, and their largest magnitudes in the last steps.

    Args:
        weights: one for each product, [O, I].

    Attributes:
        largest: [products, 3, HISTORY], float32; 0 where a step was not there yet.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        def made(*shape: int) -> Tensor:
            return torch.zeros(len(weights), 3, *shape, device=weights[0].device)

        self.largest = made(HISTORY)
        self.seen = made()
        self.scale = made(4)[..., 0]  # cuBLAS reads a scale at multiples of 16 bytes
        self.place = {weight: number for number, weight in enumerate(weights)}
        e4m3, e5m2 = formats()
        self.dtypes = (e4m3, e4m3, e5m2)
        self.assumed = torch.tensor(ASSUMED, device=weights[0].device)
        self.most = torch.tensor(
            [torch.finfo(dtype).max for dtype in self.dtypes], device=weights[0].device
        )
        self.unit = torch.ones(3, device=weights[0].device)  # of a magnitude in `largest`
        self.begin(1)

    def slot(self, weight: Tensor, which: int) -> Slot:
        number = self.place[weight]
        return Slot(self.scale[number, which], self.seen[number, which], self.dtypes[which])

    def begin(self, tokens: int) -> None:
        """To be called before the forward pass on so many tokens: sets the scales."""
        self.unit[GRADIENT].fill_(1 / tokens)
        known = self.largest.amax(2)
        torch.mul(
            torch.where(known > 0, known, self.assumed), self.unit / self.most, out=self.scale
        )
        self.seen.zero_()

    def end(self) -> None:
        """To be called after the backward pass: keeps what was found, over all processes."""
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.seen, dist.ReduceOp.MAX)
        self.largest.copy_(
            torch.cat([(self.seen / self.unit)[..., None], self.largest[..., :-1]], 2)
        )
