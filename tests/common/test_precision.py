"""Number formats: loss scaling where a format needs it."""

from common import precision as precisions
from common.precision import Precision
from tracepage.errors import UsageError

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
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    with pytest.raises(UsageError, match="take --amp-dtype float16"):
        Precision(torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize(
    "answer, expected",
    [
        (16 + 2.0**-12, True),
        (16.0, False),
        (RuntimeError("no such type"), False),
        (TypeError("no out_dtype"), False),
    ],
)
def test_rocm_is_asked_once_whether_a_sum_of_16_bit_products_stays_in_float32(
    monkeypatch, answer, expected
):
    asked = []

    def addmm(total, *_, out_dtype):
        asked.append(out_dtype)
        if isinstance(answer, Exception):
            raise answer
        return torch.full_like(total, answer)

    precisions._addmm_writes_float32.cache_clear()
    monkeypatch.setattr(torch, "addmm", addmm)
    assert [precisions._addmm_writes_float32(torch.device("cpu")) for _ in range(2)] == [
        expected
    ] * 2
    assert asked == [torch.float32]


def test_cuda_adds_in_float32_and_a_cpu_does_not(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    assert precisions.adds_in_float32(torch.device("cuda")) and not precisions.adds_in_float32(
        torch.device("cpu")
    )
