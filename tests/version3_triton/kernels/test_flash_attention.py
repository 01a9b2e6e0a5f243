"""Attention's kernels against Version 1's attention in float64."""

import importlib

from tests.conftest import runs_kernels
from tests.oracle import DEVICE, DTYPES, check
from tracepage.errors import UsageError
from version1_pytorch_baseline import tiny_llama_v1

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")
from version3_triton.kernels.flash_attention import attention
from version3_triton.kernels.launch_sizes import TileConfig

pytestmark = runs_kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "batch, heads, kv_heads, length, head_dim",
    [
        (2, 2, 2, 2, 8),
        (1, 4, 2, 70, 16),
        (1, 2, 1, 129, 32),
        (2, 2, 1, 33, 80),
        (1, 2, 1, 100, 64),
        (1, 1, 1, 65, 96),
        (1, 2, 2, 40, 128),
    ],
)
def test_attention(batch, heads, kv_heads, length, head_dim, dtype):
    q, k, v = (torch.randn(batch, n, length, head_dim) for n in (heads, kv_heads, kv_heads))
    check(attention, tiny_llama_v1.attention, [q, k, v], dtype)
    out = attention(*tensors(q.shape, k.shape, v.shape))
    assert out.transpose(1, 2).is_contiguous()  # the output projection reads it without a copy


def test_hooks_on_saved_tensors_may_change_their_strides():
    """As `torch.autograd.graph.save_on_cpu(pin_memory=True)` does."""

    def hooked(*parts: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: x.clone(memory_format=torch.contiguous_format), lambda x: x
        ):
            return attention(*parts)

    inputs = [torch.randn(2, heads, 20, 16) for heads in (4, 2, 2)]
    check(hooked, tiny_llama_v1.attention, inputs, torch.float32)


@pytest.mark.parametrize("m, n", [(32, 16), (16, 32)])
def test_tiles_that_are_not_square(monkeypatch, m, n):
    module = importlib.import_module("version3_triton.kernels.flash_attention")
    monkeypatch.setattr(module, "attention_blocks", lambda *_: TileConfig(m, n, 4, 1))
    inputs = [torch.randn(1, heads, 70, 16) for heads in (2, 1, 1)]
    check(attention, tiny_llama_v1.attention, inputs, torch.float32)


def tensors(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape, device=DEVICE) for shape in shapes)


@pytest.mark.parametrize(
    "shape, row", [((3, 3, 2, 16), 16), ((2, 2, 5, 16), 80), ((2, 4, 6, 16), 16)]
)
def test_heads_and_offsets_that_a_launch_cannot_count_are_refused(monkeypatch, shape, row):
    """Each is too large in one way: heads, rows of an input, rows of the result."""
    module = importlib.import_module("version3_triton.kernels.flash_attention")
    monkeypatch.setattr(module, "MAX_HEADS", 8)
    monkeypatch.setattr(module, "MAX_OFFSET", 4 * 4 * 16 + 16)
    fits = tensors((2, 4, 5, 16))[0]
    assert attention(fits, fits, fits).shape == fits.shape
    batch, heads, length, head_dim = shape
    x = torch.randn(batch, heads, length, row, device=DEVICE)[..., :head_dim]
    with pytest.raises(UsageError, match="switch it off"):
        attention(x, x, x)
