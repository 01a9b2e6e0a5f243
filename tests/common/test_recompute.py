"""`--checkpoint-activations` changes memory and time, and no number."""

import functools

from common import recompute
from tests import models
from tests.conftest import ROOT, TINY, run_options, runs_kernels
from version1_pytorch_baseline import tiny_llama_v1
from version2_pytorch_fused import tiny_llama_v2
from version3_triton import tiny_llama_v3

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

aten = torch.ops.aten
ONE_KERNEL = {name: name == "triton-swiglu" for name in tiny_llama_v3.SWITCHES}
CASES = [
    (tiny_llama_v1, ()),
    (tiny_llama_v2, ()),
    *(
        pytest.param(tiny_llama_v3, switches, marks=runs_kernels)
        for switches in ((), (ONE_KERNEL,))
    ),
]


def trained(model: nn.Module, amp: bool = False) -> list[Tensor]:
    """Loss and gradients."""
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        loss = model.loss(*models.batch())
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def kept(model: nn.Module) -> int:
    """Bytes that autograd keeps after a forward pass, but for what a policy keeps."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.loss(*models.batch())
    assert loss.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize("kind", ["block", "selective"])
@pytest.mark.parametrize("version, switches", CASES)
def test_loss_and_gradients_keep_their_bits(version, switches, kind):
    """Also of Version 3 with a kernel switched off, although no switch stands in the backward pass."""
    for dtype, amp in {
        (torch.float32, False),
        (torch.float64, False),
        (torch.float32, version is not tiny_llama_v3),
    }:
        expected = trained(models.build(version, *switches, dtype=dtype), amp)
        model = models.build(version, *switches, dtype=dtype)
        names = [*model.state_dict()]
        recompute.apply(model, kind)
        assert [*model.state_dict()] == names
        assert all(map(torch.equal, trained(model, amp), expected))


@pytest.mark.parametrize("version", [tiny_llama_v1, tiny_llama_v2])
def test_a_block_keeps_its_input_alone(version):
    model = models.build(version)
    assert kept(model) > 400_000
    recompute.apply(model, "block")
    assert kept(model) < 70_000


def products(model: nn.Module) -> int:
    """FLOPs of the matrix products of a step."""
    with FlopCounterMode(display=False) as counter:
        trained(model)
    return counter.get_flop_counts()["Global"][aten.mm]


def test_an_operator_without_its_overload_is_not_kept():
    def with_policy(*operators: object) -> nn.Module:
        def policy(context, operator, *_, **__):
            return (
                CheckpointPolicy.MUST_SAVE
                if operator in operators
                else CheckpointPolicy.PREFER_RECOMPUTE
            )

        model = models.build(tiny_llama_v2)
        recompute.recompute(
            model, context_fn=functools.partial(create_selective_checkpoint_contexts, policy)
        )
        return model

    plain, block = products(models.build(tiny_llama_v2)), products(with_policy())
    assert (
        products(with_policy(*recompute.KEPT))
        == plain
        < block
        == products(with_policy(aten.mm))
        < 4 / 3 * plain
    )
    # a list, unlike a function, is checked
    with pytest.raises(ValueError, match="change it to `torch.ops.aten.mm.default`"):
        create_selective_checkpoint_contexts([aten.mm])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["block", "selective"])
def test_a_compiled_step_recomputes_too(kind):
    plain, model = models.build(tiny_llama_v2), models.build(tiny_llama_v2)
    recompute.apply(model, kind)
    plain.loss, model.loss = torch.compile(plain.loss), torch.compile(model.loss)
    assert kept(model) < 0.9 * kept(plain)
    for ours, expected in zip(trained(model), trained(models.build(tiny_llama_v2)), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def test_version_4_refuses_it_and_a_run_records_it(refused, tmp_path):
    flags = [
        *TINY,
        "--data",
        "synthetic",
        "--num-steps",
        "2",
        "--device",
        "cpu",
        "--checkpoint-activations",
        "block",
    ]
    assert "have a backward pass of their own" in refused(
        ROOT / "version4_ultra_fused/tiny_llama_v4.py", *flags
    )
    run = tiny_llama_v2.train(
        run_options(tiny_llama_v2, *flags, "--metrics-out", tmp_path / "metrics.json")
    )
    assert run.record["settings"]["checkpoint_activations"] == "block"
    assert run.record["flops_per_step"]["backward"] == 2 * run.record["flops_per_step"]["forward"]
