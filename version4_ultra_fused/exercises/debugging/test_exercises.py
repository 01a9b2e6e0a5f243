"""Problem (adding): four checks of a step, on a CPU. `pytest test_exercises.py --tb=line`"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import exercise_tools as exercises
from common.config import ModelConfig
from common.precision import Precision
from common.training import preparation
from common.training.preparation import Batch
from version4_ultra_fused import tiny_llama_v4 as v4

import torch

SIZES = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
CONFIG = ModelConfig(vocab_size=61, num_layers=2, **SIZES)
FP32 = Precision(torch.device("cpu"), None)
A, B = torch.randint(61, (2, 2, 2, 16), generator=torch.Generator().manual_seed(1))  # two batches
PYTORCH = v4.kernels.REFERENCE  # on a CPU
adding = exercises.load(Path(__file__).parent, "adding_step")


def prepared(make_step: Callable, learning_rate: float):
    """Model, optimizer and step, with the weights of seed 0."""
    torch.manual_seed(0)
    model = v4.TinyLlama(CONFIG, operations=PYTORCH)
    options: Any = SimpleNamespace(learning_rate=learning_rate)
    optimizer = v4.make_optimizer(model, options)
    return model, optimizer, make_step(model, optimizer, FP32)


def losses(make_step: Callable) -> list[float]:
    """The losses of six training steps, rounded for a message."""
    _, _, step = prepared(make_step, learning_rate=1e-2)
    return [round(step(batch).item(), 3) for batch in (A, B, A, B, A, B)]


def gradients(*batches: Batch) -> list[dict[str, Any]]:
    """The gradients that AdamW is given in each step; a learning rate of 0 changes no weight."""
    model, optimizer, step = prepared(adding.make_step, learning_rate=0.0)
    steps = []
    for batch in batches:
        preparation.forget(optimizer, FP32, {})
        step(batch)
        steps.append(preparation.gradients(model, optimizer))
    return steps


def test_losses_are_those_of_version_4():
    mine = losses(adding.make_step)
    theirs = losses(v4.make_step)
    largest = max(abs(a - b) for a, b in zip(mine, theirs, strict=True))
    assert largest <= 0.002, f"problem (adding): losses {mine}, Version 4's {theirs}"


def test_gradients_are_those_of_float64():
    for i, step in enumerate(gradients(A, B)):
        torch.manual_seed(0)
        model = v4.TinyLlama(CONFIG, operations=PYTORCH).double()
        model.loss(*(A, B)[i]).backward()  # autograd's, without a memory plan
        exact: dict[str, Any] = {
            name: parameter.grad for name, parameter in model.named_parameters()
        }
        error = {name: (step[name] - exact[name]).norm() / exact[name].norm() for name in exact}
        wrong = [name for name in error if error[name] > 1e-3]
        assert not wrong, f"problem (adding): step {i + 1}: wrong gradients of {', '.join(wrong)}"


def test_the_same_seed_gives_the_same_losses():
    assert losses(adding.make_step) == losses(adding.make_step)


def test_a_fixed_batch_gives_the_same_gradient_in_every_step():
    sizes = [step["layers.0.mlp.down_proj.weight"].norm().item() for step in gradients(A, A, A)]
    ratios = [round(size / sizes[0], 3) for size in sizes]
    assert ratios == [1, 1, 1], f"problem (adding): sizes of one gradient, beside step 1: {ratios}"
