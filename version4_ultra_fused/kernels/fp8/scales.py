"""The scales of tensors in FP8, from their largest magnitudes in the last steps ("delayed
scaling").

Of each product x W^T three tensors are stored in FP8: x, W and the gradient of the result. The
magnitudes are state of the optimizer. They start at zero, which stands for ASSUMED. Gradients are
those of the mean loss, so they shrink as a batch grows. Their magnitude is kept for the sum of the
losses, so that it does not depend on the batch.

A magnitude that is not finite, or 0, says nothing of the steps to come, so the one of the step
before stands in its place. That of the gradient of logits stays 0: its scale has no history
(`logits.py`). A step in which a tensor outgrows its scale is counted on the device.
"""

from collections.abc import Sequence

from common import device as devices
from common.options import Options
from tracepage.errors import UsageError
from version4_ultra_fused.kernels.reference import Slot

import torch
import torch.distributed as dist
from torch import Tensor

HISTORY = 16  # steps
# The magnitudes of x, W and the gradient before the first step: far from both ends of the formats.
ASSUMED = (32.0, 1.0, 4.0)
# A tensor this much larger than its scale allows is clipped by more than rounding is off: half the
# distance of a format's two largest numbers is 1/30 to 1/14 of them.
CLIPPED = 1 + 1 / 32
# The scale of a gradient has room for one 8 times as large as all in HISTORY, at no cost: e5m2 has
# 5 bits of exponent, so nothing that counts comes near its small end. In e4m3 room costs range.
MARGIN = (1.0, 1.0, 8.0)
X = 0
WEIGHT = 1
GRADIENT = 2


def formats() -> tuple[torch.dtype, torch.dtype]:
    """e4m3 and e5m2 as this GPU has them: AMD's MI300 has no infinity and another bias."""
    if torch.version.hip and "gfx942" in torch.cuda.get_device_properties(0).gcnArchName:
        return torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
    return torch.float8_e4m3fn, torch.float8_e5m2


def multiplies(device: torch.device) -> bool:
    """Whether this GPU has products in FP8."""
    if torch.version.hip:
        architecture = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        return architecture in ("gfx942", "gfx950")
    return torch.cuda.get_device_capability(device) >= (8, 9)


def refuse_fp8(options: Options) -> None:
    """Raises UsageError, with the reason, where --enable-fp8 cannot run."""
    reason = _reason(options)
    if reason:
        raise UsageError(f"--enable-fp8: {reason}")


def _reason(options: Options) -> str | None:
    device = devices.select(options.device)
    model = options.model
    if device.type != "cuda":
        return "products in FP8 need a GPU"
    if not multiplies(device):
        return f"{torch.cuda.get_device_name(device)} has no products in FP8"
    if not options.use_amp or options.amp_dtype == "float16" or not options.switches["memory-plan"]:
        return "it needs --use-amp in bfloat16, for what is not in FP8, and the memory plan"
    widths = model.hidden_size, model.intermediate_size, model.num_key_value_heads * model.head_dim
    if any(width % 16 for width in widths) or options.batch_size * options.seq_len % 16:
        return "widths and the number of tokens in a batch must be multiples of 16"
    return None


class Scales:
    """The scales of the tensors of all products, and their largest magnitudes in the last steps.

    Args:
        weights: one for each product, [O, I].

    Attributes:
        largest: [products, 3, HISTORY], float32; 0 where none was found.
        saturated: [4], float32; in how many steps an x, a W, a gradient, any of these was clipped.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        device = weights[0].device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(len(weights), 3, *shape, device=device)

        self.largest = zeros(HISTORY)
        self.seen = zeros()
        self.saturated = torch.zeros(4, device=device)
        self.scale = zeros(4)[..., 0]  # cuBLAS reads a scale at multiples of 16 bytes.
        self.place = {weight: number for number, weight in enumerate(weights)}
        e4m3, e5m2 = formats()
        self.dtypes = (e4m3, e4m3, e5m2)
        self.assumed = torch.tensor(ASSUMED, device=device)
        self.most = torch.tensor([torch.finfo(dtype).max for dtype in self.dtypes], device=device)
        self.margin = torch.tensor(MARGIN, device=device)
        self.unit = torch.ones(3, device=device)  # of a magnitude in `largest`
        self.begin(1)

    def slot(self, weight: Tensor, which: int) -> Slot:
        number = self.place[weight]
        return Slot(self.scale[number, which], self.seen[number, which], self.dtypes[which])

    def begin(self, tokens: int) -> None:
        """To be called before the forward pass on so many tokens: sets the scales."""
        self.unit[GRADIENT].fill_(1 / tokens)
        known = self.largest.amax(2)
        expected = torch.where(known > 0, known, self.assumed) * self.margin
        torch.mul(expected, self.unit / self.most, out=self.scale)
        self.seen.zero_()

    def end(self) -> None:
        """To be called after the backward pass: keeps what was found, over all processes."""
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.seen, dist.ReduceOp.MAX)
        kinds = (self.seen > self.scale * self.most * CLIPPED).any(0)
        self.saturated += torch.cat([kinds, kinds.any()[None]])
        usable = (self.seen > 0) & (self.seen < torch.inf)
        newest = torch.where(usable, self.seen / self.unit, self.largest[..., 0])
        self.largest.copy_(torch.cat([newest[..., None], self.largest[..., :-1]], 2))
