"""The kernels of the norm, alone and with the residual addition, of RoPE and of SwiGLU, against
float64.
"""

import importlib
from collections.abc import Callable

from common import rmsnorm, rope
from tests.conftest import runs_kernels
from tests.oracle import DEVICE, DTYPES, check
from version1_pytorch_baseline import tiny_llama_v1

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")
from version3_triton.kernels.launch_sizes import Tile
from version3_triton.kernels.rms_norm import add_rms_norm, rms_norm
from version3_triton.kernels.rope import apply_rope
from version3_triton.kernels.swiglu import swiglu

pytestmark = runs_kernels


def with_eps(operation: Callable) -> Callable:
    return lambda *tensors: operation(*tensors, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3), (2, 3, 37), (5, 256), (3, 1000), (130, 24)])
def test_rms_norm(shape, dtype):
    check(
        with_eps(rms_norm),
        with_eps(rmsnorm.rms_norm),
        [torch.randn(shape), 1 + torch.randn(shape[-1])],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 37), (5, 256)])
def test_add_rms_norm(shape, dtype):
    def plain(x, residual, weight):
        return x + residual, rmsnorm.rms_norm(x + residual, weight, 1e-5)

    inputs = [torch.randn(shape), torch.randn(shape), 1 + torch.randn(shape[-1])]
    check(with_eps(add_rms_norm), plain, inputs, dtype)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.itemsize == 2])
def test_add_rms_norm_is_the_norm_of_the_sum_that_it_gives(dtype):
    """Of the rounded one, as the backward pass has no other: that of the exact sum differs in its
    last bit in many places.
    """
    x, residual = (torch.randn(8, 200).to(DEVICE, dtype) for _ in range(2))
    weight = torch.ones(200, device=DEVICE, dtype=dtype)
    total, y = add_rms_norm(x, residual, weight, 1e-5)
    exact = rmsnorm.rms_norm(total.double(), weight.double(), 1e-5).to(dtype)
    assert (y != exact).sum() < 0.01 * y.numel()


def test_add_rms_norm_of_two_types_and_one_result_unused():
    """float16 from a product added to a float32 residual, as under autocast; the last sum of a
    model is not used.
    """
    x, residual, weight = torch.randn(4, 40).half(), torch.randn(4, 40), torch.ones(40)
    inputs = [tensor.to(DEVICE) for tensor in (x, residual, weight)]
    total, y = add_rms_norm(*(tensor.requires_grad_() for tensor in inputs), 1e-5)
    assert total.dtype == y.dtype == torch.float32
    y.sum().backward()
    assert inputs[0].grad.dtype == torch.float16
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad.half())
    sum_only = [tensor.detach().requires_grad_() for tensor in inputs]
    add_rms_norm(*sum_only, 1e-5)[0].sum().backward()
    assert (
        torch.equal(sum_only[1].grad, torch.ones_like(residual, device=DEVICE))
        and sum_only[2].grad is None
    )


@pytest.mark.parametrize("rows, parts", [(45, 4), (571, 70)])
def test_more_tiles_than_programs_and_more_parts_than_the_sum_takes_at_once(
    monkeypatch, rows, parts
):
    module = importlib.import_module("version3_triton.kernels.rms_norm")
    monkeypatch.setattr(module, "tile", lambda kernel, size, device: Tile(8, 32, 1, parts))
    inputs = [torch.randn(rows, 24), torch.randn(24)]
    check(with_eps(rms_norm), with_eps(rmsnorm.rms_norm), inputs, torch.float32)


def test_outputs_that_get_no_gradient():
    """What follows may hand back None for its input."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, gradient: Tensor) -> None:
            return None

    x, weight = (
        torch.randn(2, 8, device=DEVICE, requires_grad=True),
        torch.ones(8, device=DEVICE, requires_grad=True),
    )
    for outputs in ([rms_norm(x, weight, 1e-5)], add_rms_norm(x, x.detach(), weight, 1e-5)):
        (sum(Nothing.apply(output).sum() for output in outputs) + 0 * weight.sum()).backward()
    assert x.grad is None and not weight.grad.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads, kv_heads, length, head_dim",
    [(4, 4, 1, 2), (4, 2, 33, 24), (3, 1, 64, 16), (2, 2, 7, 80)],
)
def test_rope(heads, kv_heads, length, head_dim, dtype):
    """q and k as they come from one fused product: strided views."""
    cos, sin = (table.to(DEVICE) for table in rope.rope_tables(head_dim, length + 3, 1e4))

    def split(operation: Callable) -> Callable:
        def run(qkv):
            q, k = qkv.unflatten(-1, (-1, head_dim)).transpose(1, 2).split([heads, kv_heads], dim=1)
            wide = (
                (cos.to(qkv.dtype), sin.to(qkv.dtype)) if qkv.dtype == torch.float64 else (cos, sin)
            )
            return operation(q, k, *wide)

        return run

    check(
        split(apply_rope),
        split(rope.apply_rope),
        [torch.randn(2, length, (heads + kv_heads) * head_dim)],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7,), (1, 1), (2, 9, 77), (3, 2048), (40, 130)])
def test_swiglu(shape, dtype):
    """Gate and up are the halves of one fused product."""

    def halves(operation: Callable) -> Callable:
        return lambda both: operation(*both.chunk(2, dim=-1))

    check(
        halves(swiglu),
        halves(tiny_llama_v1.swiglu),
        [2 * torch.randn(*shape[:-1], 2 * shape[-1])],
        dtype,
    )
