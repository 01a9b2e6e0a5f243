"""Liger-Kernel's operations with our signatures; they run on a GPU."""

from common.config import ModelConfig
from common.precision import Precision
from tests.oracle import DEVICE

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
pytest.importorskip("liger_kernel", reason="needs Liger")
from version3_triton import benchmark_kernels, kernel_cases, liger
from version3_triton.kernels import reference

pytestmark = pytest.mark.gpu
CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=64,
    num_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
)
OPERATIONS = [name for name in benchmark_kernels.OPERATIONS if hasattr(liger, name)]


def results(function, work: kernel_cases.Case) -> list[torch.Tensor]:
    """Outputs, and gradients of all inputs; what a function overwrites is its own copy."""
    inputs = [kernel_cases.separated(x).detach().clone().requires_grad_() for x in work.inputs]
    outputs = function(*inputs, *work.rest)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.manual_seed(1)
    gradients = [torch.randn(output.shape).to(output) for output in outputs]
    kept = [output.detach().clone() for output in outputs]
    return [*kept, *torch.autograd.grad(outputs, inputs, gradients)]


@pytest.mark.parametrize(
    "dtype, tolerance", [(None, 1e-4), (torch.bfloat16, 3e-2)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_liger_computes_what_the_reference_does(operation, dtype, tolerance):
    work = kernel_cases.case(operation, (CONFIG, 2, 33), Precision(DEVICE, dtype))
    expected, got = (
        results(getattr(functions, operation), work) for functions in (reference, liger)
    )
    assert len(got) == len(expected)
    for i, (theirs, right) in enumerate(zip(got, expected, strict=True)):
        assert theirs.shape == right.shape, i
        error = (theirs.double() - right.double()).abs().max()
        assert error <= tolerance * right.double().abs().max(), f"result {i}: {error:.2g}"
