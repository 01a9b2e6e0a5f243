"""The norm's kernels, alone and with the residual addition, against float64."""

import importlib

from common import rmsnorm
from common.errors import UsageError
from tests.conftest import runs_kernels
from tests.oracle import DEVICE, DTYPES, check

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from version3_triton.kernels.launch_sizes import Tile
from version3_triton.kernels.rms_norm import add_rms_norm, rms_norm

pytestmark = runs_kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3), (2, 3, 37), (5, 256), (3, 1000), (130, 24)])
def test_rms_norm(shape, dtype):
    x, weight = torch.randn(shape), 1 + torch.randn(shape[-1])
    check(lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: rmsnorm.rms_norm(x, w, 1e-5), [x, weight], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 37), (5, 256)])
def test_add_rms_norm(shape, dtype):
    def plain(x, residual, weight):
        return x + residual, rmsnorm.rms_norm(x + residual, weight, 1e-5)

    inputs = [torch.randn(shape), torch.randn(shape), 1 + torch.randn(shape[-1])]
    check(lambda *tensors: add_rms_norm(*tensors, 1e-5), plain, inputs, dtype)


def test_add_rms_norm_of_two_types_and_one_result_unused():
    """float16 from a product added to a float32 residual, as under autocast; the last sum of a model is not used."""
    x, residual, weight = torch.randn(4, 40).half(), torch.randn(4, 40), torch.ones(40)
    inputs = [tensor.to(DEVICE) for tensor in (x, residual, weight)]
    total, y = add_rms_norm(*(tensor.requires_grad_() for tensor in inputs), 1e-5)
    assert total.dtype == y.dtype == torch.float32
    y.sum().backward()
    assert inputs[0].grad.dtype == torch.float16
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad.half())
    sum_only = [tensor.detach().requires_grad_() for tensor in inputs]
    add_rms_norm(*sum_only, 1e-5)[0].sum().backward()
    assert torch.equal(sum_only[1].grad, torch.ones_like(residual, device=DEVICE)) and sum_only[2].grad is None


@pytest.mark.parametrize("rows, parts", [(45, 4), (571, 70)])
def test_more_tiles_than_programs_and_more_parts_than_the_sum_takes_at_once(monkeypatch, rows, parts):
    module = importlib.import_module("version3_triton.kernels.rms_norm")
    monkeypatch.setattr(module, "tile", lambda kernel, size, device: Tile(8, 32, 1, parts))
    inputs = [torch.randn(rows, 24), torch.randn(24)]
    check(lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: rmsnorm.rms_norm(x, w, 1e-5), inputs, torch.float32)


def test_outputs_that_get_no_gradient():
    """What follows may hand back None for its input."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, gradient: Tensor) -> None:
            return None

    x, weight = torch.randn(2, 8, device=DEVICE, requires_grad=True), torch.ones(8, device=DEVICE, requires_grad=True)
    for outputs in ([rms_norm(x, weight, 1e-5)], add_rms_norm(x, x.detach(), weight, 1e-5)):
        (sum(Nothing.apply(output).sum() for output in outputs) + 0 * weight.sum()).backward()
    assert x.grad is None and not weight.grad.any()


@pytest.mark.parametrize(
    "operation, shapes, message",
    [
        (rms_norm, [(1, 70000), (70000,)], "at most 65536 .*, not 70000"),
        (rms_norm, [(2, 8), (4,)], r"a weight \[D\], D at least 1, not \[\[2, 8\], \[4\]\]"),
        (add_rms_norm, [(2, 3, 8), (1, 3, 8), (8,)], "in the same shape"),
    ],
    ids=["wide", "weight", "addend"],
)
def test_wrong_shapes_are_refused(operation, shapes, message):
    with pytest.raises(UsageError, match=message):
        operation(*(torch.randn(shape, device=DEVICE) for shape in shapes), 1e-5)
