"""The activation and the loss as PyTorch operations, against their formulas in float64."""

from common.operations import linear_cross_entropy, swiglu
from tests.oracle import assert_close

import pytest
import torch


def test_swiglu_equals_its_formula() -> None:
    gate, up = torch.randn(3, 7) * 5, torch.randn(3, 7)
    wide = gate.double()
    assert_close(swiglu(gate, up), (wide / (1 + torch.exp(-wide)) * up.double()).float())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_loss_is_in_at_least_float32(dtype) -> None:
    x, weight, targets = torch.randn(2, 3, 8, dtype=dtype), torch.randn(11, 8, dtype=dtype), torch.randint(11, (2, 3))
    loss = linear_cross_entropy(x, weight, targets)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    log_p = (x @ weight.T).double().log_softmax(dim=-1)
    assert_close(loss.double(), -log_p.gather(-1, targets[..., None]).mean(), 1e-6)
