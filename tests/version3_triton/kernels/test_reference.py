"""PyTorch's operations in place of the kernels: those of Versions 1 and 2, in the precision that
they promise.
"""

from tests.oracle import assert_close
from version1_pytorch_baseline import tiny_llama_v1
from version2_pytorch_fused import tiny_llama_v2
from version3_triton.kernels import reference

import pytest
import torch


@pytest.mark.parametrize(
    "module",
    [tiny_llama_v1, tiny_llama_v2, reference],
    ids=lambda module: module.__name__.split(".")[-1],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_activation_and_loss_equal_their_formulas(module, dtype) -> None:
    gate, up = torch.randn(3, 7) * 5, torch.randn(3, 7)
    wide = gate.double()
    assert_close(module.swiglu(gate, up), (wide / (1 + torch.exp(-wide)) * up.double()).float())

    x, weight, targets = (
        torch.randn(2, 3, 8, dtype=dtype),
        torch.randn(11, 8, dtype=dtype),
        torch.randint(11, (2, 3)),
    )
    loss = module.linear_cross_entropy(x, weight, targets)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    log_p = (x @ weight.T).double().log_softmax(dim=-1)
    assert_close(loss.double(), -log_p.gather(-1, targets[..., None]).mean(), 1e-6)


def test_grouped_attention_is_version_1s() -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    assert_close(reference.attention(q, k, v), tiny_llama_v1.attention(q, k, v))
