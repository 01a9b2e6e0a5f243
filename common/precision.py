"""Number formats of a run: fp32, or mixed precision by autocast (with loss scaling where the format
needs it).
"""

import functools
from contextlib import AbstractContextManager
from typing import Any, Literal

from tracepage.errors import UsageError

import torch
from torch import Tensor

AMP_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
Name = Literal["fp32", "bf16", "fp16"]
SHORT: dict[torch.dtype, Name] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


def amp_dtype(options: Any) -> torch.dtype | None:
    """The autocast of options with `use_amp` and `amp_dtype`; None without it."""
    return AMP_DTYPES[options.amp_dtype or "bfloat16"] if options.use_amp else None


def products_dtype(x: Tensor, otherwise: torch.dtype | None = None) -> torch.dtype:
    """The dtype of matrix products on x: autocast's; without autocast `otherwise` or x's own."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return otherwise or x.dtype


class Precision:
    """Autocast and loss scaling for one run; in fp32 every call hands its argument straight
    through.

    float16 gradients underflow, so its loss is scaled (Micikevicius et al. 2017, arXiv:1710.03740);
    bfloat16 has float32's exponent and needs none.
    """

    def __init__(self, device: torch.device, amp_dtype: torch.dtype | None) -> None:
        bf16_on_gpu = amp_dtype == torch.bfloat16 and device.type == "cuda"
        if bf16_on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise UsageError("this GPU only emulates bfloat16: take --amp-dtype float16")
        self.device = device
        self.dtype = amp_dtype or torch.float32
        self.scaler = torch.amp.GradScaler(device.type, enabled=amp_dtype == torch.float16)

    @property
    def name(self) -> Name:
        return SHORT[self.dtype]

    def autocast(self) -> AbstractContextManager:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def scale(self, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """optimizer.step(); float16 leaves it out after an overflow (one host synchronization)."""
        self.scaler.step(optimizer)
        self.scaler.update()


def adds_in_float32(device: torch.device) -> bool:
    """Whether torch.mm and torch.addmm write float32 sums of 16-bit matrices (`out_dtype`)."""
    return device.type == "cuda" and (not torch.version.hip or _addmm_writes_float32(device))


@functools.cache
def _addmm_writes_float32(device: torch.device) -> bool:
    """Asks once, by a sum that a 16-bit number cannot hold: ROCm's PyTorch can since 2.10 (its pull
    request 162600).
    """
    ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    total = torch.full((16, 16), 2.0**-12, device=device)
    try:
        added = torch.addmm(total, ones, ones, out_dtype=torch.float32)
        return bool((added == 16 + 2.0**-12).all())
    except (RuntimeError, TypeError):
        return False
