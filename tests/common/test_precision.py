"""Number formats: loss scaling where a format needs it."""

from common.errors import UsageError
from common.precision import Precision

import pytest
import torch

CPU = torch.device("cpu")


def test_an_overflow_in_float16_leaves_the_weights_and_halves_the_scale():
    precision, weight = Precision(CPU, torch.float16), torch.nn.Parameter(torch.ones(1))
    optimizer, before = torch.optim.SGD([weight], lr=1.0), precision.scaler.get_scale()
    precision.scale((weight * float("inf")).sum()).backward()
    precision.step(optimizer)
    assert weight.item() == 1 and precision.scaler.get_scale() == before / 2
    assert not Precision(CPU, torch.bfloat16).scaler.is_enabled()


def test_a_gpu_that_emulates_bfloat16_is_told_to_take_float16(monkeypatch):
    """NVIDIA's GPUs before Ampere; PyTorch calls their emulation supported unless asked otherwise."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    with pytest.raises(UsageError, match="take --amp-dtype float16"):
        Precision(torch.device("cuda"), torch.bfloat16)
