"""Tests of your repairs, or with KERNEL_EXERCISES=solution of solution/; they need no compiler."""

from pathlib import Path

import exercise_tools as exercises
from common.config import ModelConfig
from studies import version_files
from version2_pytorch_fused import tiny_llama_v2 as v2

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

additions = exercises.load(Path(__file__).parent, "additions")
OPTIONS = version_files.switched(
    v2, version_files.resolve(version_files.parser(None).parse_args([]))
)
CONFIG = ModelConfig(
    hidden_size=32, num_layers=2, num_attention_heads=2, intermediate_size=64, max_sequence_length=8
)
IDS = torch.arange(16).view(2, 8)


@pytest.fixture
def model() -> v2.TinyLlama:
    torch.manual_seed(0)
    torch.compiler.reset()
    return additions.TinyLlama(CONFIG, v2.SWITCHES)


class Counted(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_the_loss_is_one_graph(model, monkeypatch):
    monkeypatch.setattr(v2, "swiglu", additions.swiglu)
    # `fullgraph` raises an error where a graph would break.
    loss = torch.compile(model.loss, backend="eager", fullgraph=True)
    assert loss(IDS, IDS).isfinite()


def test_steps_after_the_first_compile_nothing(model):
    counter = torch._dynamo.testing.CompileCounter()
    loss = torch.compile(model.loss, backend=counter)
    loss(IDS, IDS)
    compiled = counter.frame_count
    for _ in range(3):
        loss(IDS, IDS)
    assert counter.frame_count == compiled


def test_the_optimizer_takes_all_parameters_at_once(model):
    optimizer = additions.make_optimizer(model, OPTIONS)
    model.loss(IDS, IDS).backward()
    optimizer.step()  # makes its state
    with Counted() as counted:
        optimizer.step()
    assert counted.count < 5 * len(list(model.parameters())), (
        "AdamW loops over parameters: name its option, a CPU has no default"
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_activations_are_clipped(compiled):
    swiglu = torch.compile(additions.swiglu, backend="eager") if compiled else additions.swiglu
    gate = torch.tensor([20.0, 20.0, 1.0, 1e-3])
    up = torch.tensor([1e4, -1e4, 2.0, 3e4])
    torch.testing.assert_close(swiglu(gate, up), (F.silu(gate) * up).clamp(-1e4, 1e4))


@pytest.mark.parametrize("compiled", [False, True])
def test_passes_are_counted(model, compiled):
    loss = torch.compile(model.loss, backend="eager") if compiled else model.loss
    for _ in range(3):
        loss(IDS, IDS)
    model(IDS)
    assert int(model.passes) == 4


def test_a_step_changes_the_weights_as_that_of_version_2(model):
    plain = v2.TinyLlama(CONFIG, v2.SWITCHES)
    plain.load_state_dict(model.state_dict())
    for each, make_optimizer in ((model, additions.make_optimizer), (plain, v2.make_optimizer)):
        optimizer = make_optimizer(each, OPTIONS)
        each.loss(IDS, IDS).backward()
        optimizer.step()
    torch.testing.assert_close(dict(model.named_parameters()), dict(plain.named_parameters()))


def test_the_model_computes_what_version_2_does(model):
    plain = v2.TinyLlama(CONFIG, v2.SWITCHES)
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        each.loss(IDS, IDS).backward()
    torch.testing.assert_close(model.embed_tokens.weight.grad, plain.embed_tokens.weight.grad)
