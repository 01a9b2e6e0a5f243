"""Weights of all versions: the same at the start, and Version 1's state dict loads into each and
comes back.
"""

import itertools

from common import weights
from tests import models
from version1_pytorch_baseline import tiny_llama_v1
from version2_pytorch_fused import tiny_llama_v2
from version3_triton import tiny_llama_v3
from version4_ultra_fused import tiny_llama_v4

import pytest
import torch

later_versions = pytest.mark.parametrize(
    "version", [tiny_llama_v2, tiny_llama_v3, tiny_llama_v4], ids=["v2", "v3", "v4"]
)
kv_heads = pytest.mark.parametrize("kv_heads", [4, 2, 1])


def changed(model: torch.nn.Module) -> torch.nn.Module:
    """The model with other weights, the norms' among them."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight))
    return model


def assert_same(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names in the same order, and the same bits."""
    assert list(state) == list(expected)
    for name, weight in state.items():
        assert torch.equal(weight, expected[name]), name


@later_versions
@kv_heads
def test_the_initial_weights_are_version_1s(version, kv_heads):
    first, later = (
        models.build(version, kv_heads=kv_heads) for version in (tiny_llama_v1, version)
    )
    assert_same(later.baseline_state_dict(), first.state_dict())
    assert_same(first.baseline_state_dict(), first.state_dict())


def test_initial_matrices_are_normal_and_follow_the_seed():
    model = models.build(tiny_llama_v1)
    state, std = model.state_dict(), models.config().initializer_std
    drawn = torch.cat([weight.flatten() for weight in state.values() if weight.dim() == 2])
    assert drawn.mean().abs() < 0.02 * std and drawn.std() == pytest.approx(std, rel=0.02)
    assert all((weight == 1).all() for weight in state.values() if weight.dim() == 1)
    matrices = [
        weight for name, weight in state.items() if weight.dim() == 2 and name != "lm_head.weight"
    ]
    assert not any(
        torch.equal(a, b) for a, b in itertools.combinations(matrices, 2) if a.shape == b.shape
    )
    torch.manual_seed(1)
    assert not torch.equal(
        tiny_llama_v1.TinyLlama(models.config()).embed_tokens.weight, model.embed_tokens.weight
    )


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "version",
    [tiny_llama_v1, tiny_llama_v2, tiny_llama_v3, tiny_llama_v4],
    ids=["v1", "v2", "v3", "v4"],
)
def test_a_model_can_be_made_on_its_device_and_has_the_same_weights(version, device):
    torch.manual_seed(0)
    with torch.device(device):
        model = version.TinyLlama(models.config())
    assert {parameter.device.type for parameter in model.parameters()} == {device}
    if device != "meta":
        assert_same(model.cpu().state_dict(), version.TinyLlama(models.config()).state_dict())


@pytest.mark.gpu
def test_weights_that_are_drawn_on_a_gpu_are_other_ones_of_the_same_spread():
    with torch.device("cuda"), weights.drawn_on(torch.device("cuda")):
        drawn = tiny_llama_v1.TinyLlama(models.config()).embed_tokens.weight
    usual = tiny_llama_v1.TinyLlama(models.config()).embed_tokens.weight
    assert drawn.is_cuda and not torch.equal(drawn.cpu(), usual)
    torch.testing.assert_close(drawn.std().cpu(), usual.std(), rtol=0.1, atol=0)


@later_versions
@kv_heads
def test_version_1s_state_dict_loads_and_comes_back(version, kv_heads):
    expected = changed(models.build(tiny_llama_v1, kv_heads=kv_heads)).state_dict()
    names, later = list(expected), models.build(version, kv_heads=kv_heads)
    assert later.load_state_dict(expected) == ([], [])
    assert list(expected) == names  # what was given is as it was
    assert_same(later.baseline_state_dict(), expected)
    assert later.lm_head.weight is later.embed_tokens.weight
    assert models.build(tiny_llama_v1, kv_heads=kv_heads).load_state_dict(
        later.baseline_state_dict()
    ) == ([], [])


@later_versions
def test_a_state_dict_of_its_own_loads(version):
    model, other = changed(models.build(version)), models.build(version)
    assert other.load_state_dict(model.state_dict()) == ([], [])
    assert_same(other.state_dict(), model.state_dict())
