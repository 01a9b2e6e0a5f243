"""The training step of a version, built and checked: the step that is checked is the one that trains, and the one that is timed.

`prepare` builds model, optimizer and step, and runs the step a few times with a learning rate of 0, which changes no weight.
AdamW's first moments then show the gradients that the optimizer was given: after one such step a moment is (1 - beta1) times the
gradient. With `--capture-step` the step is then captured as a graph, which must repeat the eager step's loss and gradients.
"""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple

from common.errors import RunError
from common.precision import Precision
from common.training import capture
from common.training.capture import Batch, CapturedStep, Step
from common.training.profiler import Profiler

import torch
from torch import Tensor, nn

OVERFLOWS = 20  # float16 steps that may be left out before one is not, each with half the loss scale


class Prepared(NamedTuple):
    """A version's model and optimizer, and its step: a function of a batch that returns the loss from before the update."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Step

    @property
    def graph_peak_bytes(self) -> int:
        """What a captured step allocates at once, which the allocator does not count while a graph is replayed; else 0."""
        return self.step.peak_bytes if isinstance(self.step, CapturedStep) else 0


def prepare(
    version: ModuleType, options: Namespace, precision: Precision, batch: Batch, passes: int = 1, profiler: Profiler | None = None
) -> Prepared:
    """Builds the step and checks that it trains every parameter; all weights are the initial ones afterwards.

    Args:
        options: with `capture_step`, and what the version's functions read.
        passes: steps without an update, at least one.
        profiler: profiles an eager step before the step is captured.

    Raises:
        UsageError: the step cannot be captured here.
        RunError: a parameter's gradient is missing, not finite, or zero everywhere, or the captured step is not the eager one.
    """
    captured = capture.wanted(version, options, precision.device)
    if captured:
        capture.check_supported(precision.device, getattr(options, "torch_compile_mode", None))
    model = version.make_model(options).to(precision.device)
    optimizer = version.make_optimizer(model, options)
    if captured:
        optimizer = capture.capturable(optimizer, precision)
    step = version.make_step(model, optimizer, precision)
    warm_up(model, optimizer, step, precision, batch, passes)
    if captured:
        if profiler:
            with without_update(optimizer, precision):
                profiler.record_eager(lambda: step(batch))
        step = captured_step(model, optimizer, step, precision, batch)
        torch.cuda.empty_cache()  # of what the self-check used
    return Prepared(model, optimizer, step)


def warm_up(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: Step, precision: Precision, batch: Batch, passes: int
) -> None:
    """Runs the step `passes` times without an update.

    Raises:
        RunError: a parameter gets no usable gradient.
    """
    with without_update(optimizer, precision):
        run(step, optimizer, batch, passes)
        check_gradients(model, optimizer)


def run(step: Step, optimizer: torch.optim.Optimizer, batch: Batch, passes: int) -> Tensor:
    """The loss of the last of `passes` steps; in float16 it goes on until one has not overflowed, which moves the moments."""
    for i in range(passes + OVERFLOWS):
        loss = step(batch)
        if i + 1 >= passes and any(state["exp_avg"].any() for state in optimizer.state.values()):
            break
    return loss


@contextmanager
def without_update(optimizer: torch.optim.Optimizer, precision: Precision) -> Iterator[None]:
    """Inside it a step changes no weight; afterwards the optimizer's state and the loss scale are those of the beginning."""
    rates, scaler = [group["lr"] for group in optimizer.param_groups], precision.scaler.state_dict()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        forget(optimizer, precision, scaler)


def forget(optimizer: torch.optim.Optimizer, precision: Precision, scaler: dict) -> None:
    """Sets the optimizer's state to zeros, where it is, and the loss scale back."""
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()
    precision.scaler.load_state_dict(scaler)


def gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor | None]:
    """What AdamW was given in its first step, by parameter: its first moment over 1 - beta1; None where it was given nothing."""
    scale = 1 - optimizer.param_groups[0]["betas"][0]
    moments = {name: optimizer.state.get(parameter, {}).get("exp_avg") for name, parameter in model.named_parameters()}
    return {name: None if moment is None else moment / scale for name, moment in moments.items()}


def check_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises RunError unless every parameter has a gradient that is finite and not zero everywhere."""
    broken, found = [], gradients(model, optimizer)
    for name, gradient in found.items():
        if gradient is None:
            broken.append(f"{name} has no gradient")
        elif not gradient.isfinite().all():
            broken.append(f"{name} has a gradient that is not finite")
        elif not gradient.any():
            broken.append(f"{name} has a gradient of zeros")
    if broken:
        raise RunError(
            f"this model does not train: {len(broken)} of {len(found)} parameters get no usable gradient; first, {broken[0]}"
        )


def captured_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: Step, precision: Precision, batch: Batch
) -> CapturedStep:
    """The step as a graph, after a self-check: one replay must give the eager step's loss and gradients.

    Raises:
        RunError: it does not, or the step cannot be captured.
    """
    with without_update(optimizer, precision):
        capture.on_side_stream(step, batch)
    with without_update(optimizer, precision):
        expected = [run(step, optimizer, batch, passes=1), *gradients(model, optimizer).values()]
        expected = [tensor.cpu() for tensor in expected]  # on the device they would count as the step's memory
    scaler, initial = precision.scaler.state_dict(), {name: value.cpu() for name, value in model.state_dict().items()}
    result = CapturedStep(step, batch)
    error = capture.difference(expected, [run(result, optimizer, batch, passes=1), *gradients(model, optimizer).values()])
    model.load_state_dict(initial)
    forget(optimizer, precision, scaler)
    if not error <= capture.TOLERANCE:
        raise RunError(f"the captured step differs from the eager one: relative error {error:.2g} of a loss or gradient")
    return result
