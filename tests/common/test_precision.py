"""Number formats: loss scaling where a format needs it."""

from common.precision import Precision

import torch

CPU = torch.device("cpu")


def test_an_overflow_in_float16_leaves_the_weights_and_halves_the_scale():
    precision, weight = Precision(CPU, torch.float16), torch.nn.Parameter(torch.ones(1))
    optimizer, before = torch.optim.SGD([weight], lr=1.0), precision.scaler.get_scale()
    precision.scale((weight * float("inf")).sum()).backward()
    precision.step(optimizer)
    assert weight.item() == 1 and precision.scaler.get_scale() == before / 2
    assert not Precision(CPU, torch.bfloat16).scaler.is_enabled()
