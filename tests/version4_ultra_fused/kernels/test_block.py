"""The kernel of a whole block, and its gradients, against Version 1's block in float64."""

from common import weights
from common.config import ModelConfig
from tests.conftest import runs_kernels
from tests.oracle import DEVICE, assert_close
from version1_pytorch_baseline import tiny_llama_v1

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")
from version4_ultra_fused import tiny_llama_v4
from version4_ultra_fused.kernels import block
from version4_ultra_fused.kernels.block import FusedBlock, block_forward, takes
from version4_ultra_fused.kernels.tiles import Tile

SHAPES = [  # B, S, D, H, K, F
    (2, 16, 32, 2, 2, 48),
    (2, 33, 64, 4, 2, 96),  # S odd, grouped queries
    (1, 50, 96, 2, 1, 64),  # D and Dh = 48 no powers of two
    (2, 1, 32, 4, 4, 32),  # one token, Dh = 8
]
FP32, FP16 = 2e-5, 6e-3  # of the largest element; the sums have at most 96 terms


def models(hidden: int, heads: int, kv_heads: int, ffn: int) -> tuple[nn.Module, nn.Module]:
    """Version 1 in float64 and Version 4 in float32 with the same weights, those of the norms included."""
    config = ModelConfig(
        vocab_size=40, hidden_size=hidden, num_layers=1, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=ffn,
    )  # fmt: skip
    baseline, fused = tiny_llama_v1.TinyLlama(config), tiny_llama_v4.TinyLlama(config)
    for name, weight in baseline.named_parameters():
        if "norm" in name:
            nn.init.uniform_(weight, 0.5, 1.5)
    fused.load_state_dict(baseline.state_dict())
    return baseline.double().to(DEVICE), fused.to(DEVICE)


def exact(baseline: nn.Module, x: Tensor) -> Tensor:
    """Version 1's first block; x [B, S, D] -> [B, S, D]."""
    return baseline.layers[0](x.double(), baseline.cos, baseline.sin)


@runs_kernels
@pytest.mark.parametrize("batch, length, hidden, heads, kv_heads, ffn", SHAPES)
def test_the_kernel_computes_version_1s_block(batch, length, hidden, heads, kv_heads, ffn):
    baseline, model = models(hidden, heads, kv_heads, ffn)
    x = torch.randn(batch, length, hidden, device=DEVICE)
    rows = x.flatten(0, 1)
    assert takes(rows, model.layers[0], length)
    with torch.no_grad():
        out = block_forward(rows, model.layers[0], model.cos, model.sin, length)
        assert out.dtype == torch.float32
        assert_close(out.view_as(x), exact(baseline, x), FP32)
        with torch.autocast(DEVICE.type, torch.float16):
            assert_close(block_forward(rows, model.layers[0], model.cos, model.sin, length).view_as(x), exact(baseline, x), FP16)
    torch.testing.assert_close(x.flatten(0, 1), rows, rtol=0, atol=0)


@runs_kernels
@pytest.mark.parametrize("tile, queries", [(Tile(16, 32, 32, 4, 1), 32), (Tile(64, 16, 16, 4, 2), 64)])
def test_any_tile_gives_the_same_block(tile, queries, monkeypatch):
    monkeypatch.setattr(block, "TILES", dict.fromkeys(block.TILES, (tile, queries)))
    baseline, model = models(64, 4, 2, 96)
    x = torch.randn(1, 45, 64, device=DEVICE)
    with torch.no_grad():
        out = block_forward(x[0], model.layers[0], model.cos, model.sin, 45)
    assert_close(out, exact(baseline, x)[0].detach(), FP32)


@runs_kernels
@pytest.mark.parametrize("buffers", [False, True], ids=["grad", "gradient"])
@pytest.mark.parametrize("batch, length, hidden, heads, kv_heads, ffn", [(2, 16, 32, 2, 2, 48), (1, 21, 64, 4, 2, 32)])
def test_gradients_go_where_version_4_writes_them(batch, length, hidden, heads, kv_heads, ffn, buffers):
    baseline, model = models(hidden, heads, kv_heads, ffn)
    layer = model.layers[0]
    for parameter in layer.parameters() if buffers else ():  # as the optimizer's are; what they hold is of the step before
        parameter.gradient = torch.full_like(parameter, float("nan"), requires_grad=False)
    x, dout = torch.randn(2, batch, length, hidden, device=DEVICE)
    right, leaf = x.double().requires_grad_(), x.flatten(0, 1).clone().requires_grad_()
    exact(baseline, right).backward(dout.double())
    FusedBlock.apply(leaf, layer, model, length).backward(dout.flatten(0, 1))
    assert_close(leaf.grad.view_as(x), right.grad, FP32)
    for name, parameter in layer.named_parameters():
        ours = parameter.gradient if buffers else parameter.grad
        parent, _, own = name.removesuffix(".weight").rpartition(".")
        parts = weights.FUSED.get(own, (own,))
        pieces = layer.get_submodule(f"{parent}.{own}").parts(ours) if own in weights.FUSED else (ours,)
        for part, piece in zip(parts, pieces, strict=True):
            assert_close(piece, baseline.layers[0].get_submodule(parent).get_submodule(part).weight.grad, FP32)


@runs_kernels
def test_under_autocast_the_block_is_computed_again_in_the_products_dtype():
    baseline, model = models(32, 2, 1, 48)
    x, dout = torch.randn(2, 2, 20, 32, device=DEVICE)
    right, leaf = x.double().requires_grad_(), x.flatten(0, 1).clone().requires_grad_()
    exact(baseline, right).backward(dout.double())
    with torch.autocast(DEVICE.type, torch.float16):
        out = FusedBlock.apply(leaf, model.layers[0], model, 20)
    out.backward(dout.flatten(0, 1))  # outside of autocast, as in a training step
    assert leaf.grad.dtype == torch.float32
    assert_close(leaf.grad.view_as(x), right.grad, FP16)
    gradient, expected = model.layers[0].mlp.down_proj.weight.grad, baseline.layers[0].mlp.down_proj.weight.grad
    assert_close(gradient, expected, FP16)
    assert (gradient - expected).abs().max() > FP32 * expected.abs().max()  # the products were in 16 bits


@pytest.mark.parametrize(
    "hidden, heads, ffn, length",
    [(64, 4, 96, 129), (272, 17, 96, 16), (72, 4, 96, 16), (64, 4, 72, 16), (256, 2, 96, 16)],
    ids=["S", "D", "D in steps of 16", "F in steps of 16", "Dh"],
)
def test_what_does_not_fit_is_not_taken(hidden, heads, ffn, length):
    config = ModelConfig(
        vocab_size=40, hidden_size=hidden, num_layers=1, num_attention_heads=heads, intermediate_size=ffn,
        num_key_value_heads=heads,
    )  # fmt: skip
    layer = tiny_llama_v4.TinyLlama(config).layers[0]
    assert not takes(torch.zeros(length, hidden, device=DEVICE), layer, length)


def test_only_a_float32_residual_stream_is_taken_and_only_where_kernels_run(monkeypatch):
    layer = models(64, 4, 2, 96)[1].layers[0]
    x = torch.zeros(8, 64, device=DEVICE)
    assert takes(x, layer, 8) and not takes(x.double(), layer, 8) and not takes(x.half(), layer, 8)
    monkeypatch.setattr(block, "missing", lambda device: "no GPU")
    assert not takes(x, layer, 8)
