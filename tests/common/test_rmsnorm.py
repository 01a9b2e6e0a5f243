"""RMSNorm as PyTorch operations, against its formula in float64."""

import math

from common.rmsnorm import rms_norm
from tests.oracle import assert_close

import torch


def test_rms_norm_equals_its_formula_and_computes_bfloat16_in_float32() -> None:
    x, weight = torch.randn(3, 5, 48), torch.randn(48)
    rows = [
        [
            weight.double() * row.double() / math.sqrt(row.double().square().mean() + 1e-5)
            for row in item
        ]
        for item in x
    ]
    assert_close(
        rms_norm(x, weight, 1e-5), torch.stack([torch.stack(row) for row in rows]).float(), 1e-6
    )

    x = (torch.randn(4, 256) * 300).bfloat16()  # squares of these lose all but 8 bits in bfloat16
    expected = rms_norm(x.double(), torch.ones(256, dtype=torch.float64), 1e-5).bfloat16()
    assert torch.equal(rms_norm(x, torch.ones(256, dtype=torch.bfloat16), 1e-5), expected)
