"""Attention's kernels against Version 1's attention in float64."""

import importlib

from common.errors import UsageError
from tests.conftest import runs_kernels
from tests.oracle import DEVICE, DTYPES, check, refuses_second_gradients
from version1_pytorch_baseline import tiny_llama_v1

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from version3_triton.kernels.blocks import TileConfig
from version3_triton.kernels.flash_attention import attention

pytestmark = runs_kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "batch, heads, kv_heads, length, head_dim",
    [
        (2, 2, 2, 2, 8), (1, 4, 2, 70, 16), (1, 2, 1, 129, 32), (2, 2, 1, 33, 80), (1, 2, 1, 100, 64), (1, 1, 1, 65, 96),
        (1, 2, 2, 40, 128),
    ],
)  # fmt: skip
def test_attention(batch, heads, kv_heads, length, head_dim, dtype):
    q, k, v = (torch.randn(batch, n, length, head_dim) for n in (heads, kv_heads, kv_heads))
    check(attention, tiny_llama_v1.attention, [q, k, v], dtype)


def test_strided_views_and_a_strided_gradient():
    qkv = torch.randn(2, 20, 8 * 16, device=DEVICE)
    parts = qkv.unflatten(-1, (-1, 16)).transpose(1, 2).split([4, 2, 2], dim=1)
    out = attention(*parts)
    torch.testing.assert_close(out, tiny_llama_v1.attention(*parts), rtol=1e-5, atol=1e-5)
    assert out.transpose(1, 2).is_contiguous()  # the output projection reads it without a copy
    leaves = [part.detach().clone().requires_grad_() for part in parts]
    attention(*leaves).backward(torch.ones_like(out).expand_as(out))
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("m, n", [(32, 16), (16, 32)])
def test_tiles_that_are_not_square(monkeypatch, m, n):
    module = importlib.import_module("version3_triton.kernels.flash_attention")
    monkeypatch.setattr(module, "attention_blocks", lambda *_: TileConfig(m, n, 4, 1))
    inputs = [torch.randn(1, heads, 70, 16) for heads in (2, 1, 1)]
    check(attention, tiny_llama_v1.attention, inputs, torch.float32)


def test_gradients_of_gradients_are_refused():
    refuses_second_gradients(lambda x: attention(x, x, x), torch.randn(1, 1, 4, 16))


def tensors(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape, device=DEVICE) for shape in shapes)


def test_wrong_shapes_and_types_are_refused():
    with pytest.raises(UsageError, match="head dimensions to 128, not 160"):
        attention(*tensors((1, 1, 4, 160), (1, 1, 4, 160), (1, 1, 4, 160)))
    for k in ((1, 3, 8, 16), (1, 2, 7, 16), (1, 2, 8, 32), (2, 2, 8, 16)):
        with pytest.raises(UsageError, match=r"q \[1, 4, 8, 16\] takes k and v alike but for fewer heads"):
            attention(*tensors((1, 4, 8, 16), k, k))
    q, k, v = tensors((1, 2, 4, 16), (1, 2, 4, 16), (1, 2, 4, 16))
    for wrong in ((q.half(), k, v), (q.double(), k.double(), v.double())):
        with pytest.raises(UsageError, match="in one type of 16 or 32 bits"):
            attention(*wrong)
