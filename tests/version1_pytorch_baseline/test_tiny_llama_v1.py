"""Version 1 is right: it equals transformers' LLaMA, its gradients equal finite differences, and it
repeats bit for bit.
"""

import math
from argparse import Namespace

from common import data
from common import device as devices
from common.config import ModelConfig
from common.precision import Precision
from common.rmsnorm import rms_norm
from common.rope import apply_rope, rope_tables
from tests.oracle import assert_close
from version1_pytorch_baseline import tiny_llama_v1 as v1

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SMALL = dict(
    vocab_size=97,
    hidden_size=48,
    num_layers=2,
    num_attention_heads=4,
    intermediate_size=80,
    max_sequence_length=64,
)
CPU = torch.device("cpu")
kv_heads = pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=["MHA", "GQA", "MQA"])


def small_model(kv_heads: int = 4, seed: int = 0) -> tuple[ModelConfig, nn.Module]:
    """A model none of whose weights has a special value: the norms' are not 1, and the matrices are
    large enough to matter.
    """
    torch.manual_seed(seed)
    config = ModelConfig(**SMALL, num_key_value_heads=kv_heads)
    model = v1.TinyLlama(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (parameter.dim() == 1))
    return config, model


def batch_of(
    shape: tuple[int, int], vocab_size: int = SMALL["vocab_size"]
) -> tuple[Tensor, Tensor]:
    return torch.randint(vocab_size, shape), torch.randint(vocab_size, shape)


# ---------------------------------------------------------------------------------------------- against transformers


def as_transformers(config: ModelConfig, model: nn.Module) -> nn.Module:
    """LlamaForCausalLM with the same weights."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    reference = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**config.for_transformers(), attn_implementation="eager")
    )
    inner = {
        name: value
        for name, value in model.baseline_state_dict().items()
        if name != "lm_head.weight"
    }
    keys = reference.model.load_state_dict(inner, strict=False)
    assert not keys.missing_keys and not keys.unexpected_keys
    assert reference.lm_head.weight is reference.model.embed_tokens.weight
    return reference


@kv_heads
@pytest.mark.parametrize("shape", [(2, 1), (2, 7), (1, 33), (3, 64)], ids=str)
def test_logits_loss_and_gradients_equal_transformers(
    kv_heads: int, shape: tuple[int, int]
) -> None:
    config, model = small_model(kv_heads)
    reference = as_transformers(config, model)
    input_ids, targets = batch_of(shape)
    theirs = reference(input_ids).logits
    assert_close(model(input_ids), theirs)

    loss, their_loss = (
        model.loss(input_ids, targets),
        F.cross_entropy(theirs.flatten(0, 1), targets.flatten()),
    )
    assert_close(loss, their_loss)
    loss.backward()
    their_loss.backward()
    gradients = {
        name.removeprefix("model."): parameter.grad
        for name, parameter in reference.named_parameters()
    }
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, gradients[name])


# -------------------------------------------------------------------------------------------------- against formulas


def test_attention_by_loops() -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    expected = torch.empty_like(q)
    for b in range(2):
        for h in range(4):
            for s in range(5):
                seen_k, seen_v = k[b, h // 2, : s + 1], v[b, h // 2, : s + 1]
                weights = torch.exp(seen_k @ q[b, h, s] / math.sqrt(8))
                expected[b, h, s] = weights @ seen_v / weights.sum()
    assert_close(v1.attention(q, k, v), expected)


# Shapes are small: gradcheck disturbs every input element in turn. Each is (function, float64
# inputs).
def gradcheck_cases() -> dict[str, tuple]:
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    cos, sin = rope_tables(4, 8, 100.0)
    targets = torch.tensor([[1, 0, 4], [2, 2, 3]])
    return {
        "rms_norm": (lambda x, w: rms_norm(x, w, 1e-3), (leaf(2, 3, 4), leaf(4))),
        "apply_rope": (
            lambda q, k: apply_rope(q, k, cos.double(), sin.double()),
            (leaf(2, 2, 3, 4), leaf(2, 1, 3, 4)),
        ),
        "attention, MHA": (v1.attention, (leaf(2, 2, 5, 4), leaf(2, 2, 5, 4), leaf(2, 2, 5, 4))),
        "attention, GQA": (v1.attention, (leaf(2, 4, 3, 2), leaf(2, 2, 3, 2), leaf(2, 2, 3, 2))),
        "swiglu": (v1.swiglu, (leaf(2, 3, 5), leaf(2, 3, 5))),
        "linear_cross_entropy": (
            lambda x, w: v1.linear_cross_entropy(x, w, targets),
            (leaf(2, 3, 4), leaf(6, 4)),
        ),
    }


@pytest.mark.parametrize("name", gradcheck_cases())
def test_gradients_equal_finite_differences(name: str) -> None:
    """In float64: Version 1's functions are the oracle for the kernels of later versions."""
    function, inputs = gradcheck_cases()[name]
    assert torch.autograd.gradcheck(function, inputs)


# -------------------------------------------------------------------------------------------------- the whole model


def test_initial_loss_is_that_of_a_guess() -> None:
    """The head's inputs have unit mean square, so at first a logit is a normal deviate of variance
    D std^2, independent of the target: the loss is ln V for the guess, and half that variance for
    guessing unevenly (mean of a log-normal).
    """
    torch.manual_seed(0)
    config = ModelConfig()
    model = v1.TinyLlama(config)
    loss = model.loss(*batch_of((8, 128), config.vocab_size)).item()
    variance = config.hidden_size * model.embed_tokens.weight.std().item() ** 2
    assert variance < 1  # so that "about ln V" holds
    assert abs(loss - (math.log(config.vocab_size) + variance / 2)) < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_stays_close_to_float32(dtype: torch.dtype) -> None:
    _, model = small_model()
    batch = batch_of((2, 33))
    expected = model.loss(*batch).item()
    with Precision(CPU, dtype).autocast():
        loss = model.loss(*batch)
    assert loss.dtype == torch.float32
    assert loss.item() != expected  # else autocast did nothing
    assert abs(loss.item() - expected) < 0.02 * expected  # bfloat16 has 8 bits: 0.4 % an operation


def step_of(model: nn.Module, learning_rate: float = 3e-3):
    return v1.make_step(
        model,
        v1.make_optimizer(model, Namespace(learning_rate=learning_rate)),
        Precision(CPU, None),
    )


def test_training_reaches_the_entropy_of_its_source() -> None:
    """A source of 13 states, where the best possible loss is known: from ln 13 to just above the
    floor, not below.
    """
    devices.configure(CPU, 0)
    source = data.markov(13, seed=0)
    batches = data.Batches(source, (8, 32, 150), 0, CPU)
    step = step_of(v1.TinyLlama(ModelConfig(**SMALL | {"vocab_size": 13})))
    losses = [step(batches[i]).item() for i in range(150)]
    assert losses[0] > math.log(13) - 0.2
    assert source.entropy_floor - 0.05 < sum(losses[-20:]) / 20 < source.entropy_floor + 0.1


def test_a_step_returns_a_detached_loss_and_clears_gradients() -> None:
    _, model = small_model()
    loss = step_of(model)(batch_of((2, 9)))
    assert not loss.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
