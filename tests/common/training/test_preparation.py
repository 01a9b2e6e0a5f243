"""The step that is checked is the step that trains: what the warm-up refuses, and that it leaves no
trace.
"""

from argparse import Namespace

from common.precision import Precision
from common.training import preparation
from common.training.study_step import prepare_for_study
from tests import models
from tracepage.errors import RunError
from version1_pytorch_baseline import tiny_llama_v1

import pytest
import torch
from torch import Tensor, nn

CPU = torch.device("cpu")
OPTIONS = Namespace(
    model=models.config(),
    learning_rate=1e-2,
    capture_step=None,
    checkpoint_activations="none",
    switches={},
)


def warm_up(model: nn.Module, precision: Precision, passes: int = 1):
    """Step and optimizer after a warm-up of `passes`."""
    optimizer = tiny_llama_v1.make_optimizer(model, OPTIONS)
    run = tiny_llama_v1.make_step(model, optimizer, precision)
    preparation.warm_up(
        preparation.Prepared(model, optimizer, run), precision, models.batch(), passes=passes
    )
    return run, optimizer


# The faults that the check is for. Detached: autograd does not see an operation.
FAULTS = {
    "detached": (
        lambda out: out.detach(),
        "5 of 20 parameters .*layers.1.input_layernorm.weight has no gradient",
    ),
    "overflowing": (lambda out: out * 1e38 * 10, "parameters .*has a gradient that is not finite"),
    "silent": (lambda out: out * 0, "5 of 20 parameters .*has a gradient of zeros"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_that_does_not_train_is_refused(fault):
    change, message = FAULTS[fault]
    model = models.build(tiny_llama_v1)
    model.layers[1].self_attn.register_forward_hook(lambda module, inputs, out: change(out))
    with pytest.raises(RunError, match=message):
        warm_up(model, Precision(CPU, None))


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=["fp32", "fp16"])
def test_a_warm_up_changes_nothing(dtype):
    """Weights, loss scale and optimizer are those of the beginning, so the losses that follow have
    the same bits.
    """
    untouched = models.build(tiny_llama_v1)
    expected = models.losses(tiny_llama_v1, untouched, [models.batch()] * 3, Precision(CPU, dtype))
    model, precision = models.build(tiny_llama_v1), Precision(CPU, dtype)
    scaler = precision.scaler.state_dict()
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    run, optimizer = warm_up(model, precision, passes=2)
    assert all(torch.equal(initial[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (
        optimizer.param_groups[0]["lr"] == OPTIONS.learning_rate
        and precision.scaler.state_dict() == scaler
    )
    assert [run(models.batch()).item() for _ in range(3)] == expected


def test_a_refused_warm_up_gives_the_learning_rate_back():
    model = models.build(tiny_llama_v1)
    optimizer = tiny_llama_v1.make_optimizer(model, OPTIONS)
    made = preparation.Prepared(model, optimizer, lambda batch: torch.zeros(()))
    with pytest.raises(RunError):
        preparation.warm_up(made, Precision(CPU, None), models.batch())
    assert optimizer.param_groups[0]["lr"] == OPTIONS.learning_rate


def test_gradients_are_what_the_optimizer_was_given():
    model = models.build(tiny_llama_v1)
    optimizer = tiny_llama_v1.make_optimizer(model, OPTIONS)
    tiny_llama_v1.make_step(model, optimizer, Precision(CPU, None))(models.batch())
    found = preparation.gradients(model, optimizer)
    expected = models.gradients(models.build(tiny_llama_v1), models.batch())
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=0)


def test_a_step_that_overflows_in_float16_is_tried_again():
    """The loss scale halves until a step counts; what the check reads is that step."""
    model, precision = models.build(tiny_llama_v1), Precision(CPU, torch.float16)
    precision.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    warm_up(model, precision)
    assert precision.scaler.get_scale() == 2.0**24


def version(**functions) -> Namespace:
    """Version 1 with some of its functions replaced."""
    names = ("make_model", "make_optimizer", "make_step")
    return Namespace(**{name: getattr(tiny_llama_v1, name) for name in names} | functions)


def test_what_is_checked_is_the_step_and_not_the_loss():
    """A step may leave out what the loss would train."""

    def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, precision: Precision):
        def run(batch: tuple[Tensor, Tensor]) -> Tensor:
            with torch.no_grad():
                hidden = model.hidden_states(batch[0])
            loss = tiny_llama_v1.linear_cross_entropy(hidden, model.lm_head.weight, batch[1])
            loss.backward()
            optimizer.step()
            return loss.detach()

        return run

    with pytest.raises(RunError, match="19 of 20 parameters"):
        prepare_for_study(
            version(make_step=make_step), OPTIONS, Precision(CPU, None), models.batch()
        )
    prepared = prepare_for_study(version(), OPTIONS, Precision(CPU, None), models.batch())
    assert prepared.graph_peak_bytes == 0 and prepared.step(models.batch()).item() > 0
