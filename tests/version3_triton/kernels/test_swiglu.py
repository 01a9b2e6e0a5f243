"""SwiGLU's kernels against float64."""

from collections.abc import Callable

from common.errors import UsageError
from tests.conftest import runs_kernels
from tests.oracle import DEVICE, DTYPES, check
from version1_pytorch_baseline import tiny_llama_v1

import pytest
import torch

pytest.importorskip("triton")
from version3_triton.kernels.swiglu import swiglu

pytestmark = runs_kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7,), (1, 1), (2, 9, 77), (3, 2048), (40, 130)])
def test_swiglu(shape, dtype):
    """Gate and up are the halves of one fused product."""

    def halves(operation: Callable) -> Callable:
        return lambda both: operation(*both.chunk(2, dim=-1))

    check(halves(swiglu), halves(tiny_llama_v1.swiglu), [2 * torch.randn(*shape[:-1], 2 * shape[-1])], dtype)


def test_different_shapes_or_types_are_refused():
    gate = torch.randn(4, 8, device=DEVICE)
    with pytest.raises(UsageError, match=r"one shape and type, not \[4, 8\] torch.float32 and \[1, 8\]"):
        swiglu(gate, gate[:1])
    with pytest.raises(UsageError, match=r"not \[4, 8\] torch.float16 and \[4, 8\] torch.float32"):
        swiglu(gate.half(), gate)
