"""Builds and checks the training step of a version. The step that is checked is the one that trains
and that is timed.

`warm_up` runs the step a few times with a learning rate of 0, which changes no weight. AdamW's
first moments then show the gradients that the optimizer was given: after one such step a moment is
(1 - beta1) times the gradient. With `--capture-step` the step is then captured as a graph, which
must repeat the eager step's loss and gradients.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from common import device as devices
from common.options import Options
from common.precision import Precision
from common.training import agreement, capture
from common.training.capture import Batch, CapturedStep, Model, Optimizer, Step
from tracepage.errors import RunError

import torch
from torch import Tensor, nn

NUDGE = 1e-4  # relative
# float16 steps that may be left out before one is not, each with half the loss scale
OVERFLOWS = 20


class Prepared(NamedTuple):
    """A version's model and optimizer, and its step: a function of a batch that returns the loss
    from before the update.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Step

    @property
    def graph_peak_bytes(self) -> int:
        """Bytes that a captured step allocates at once; the allocator does not count them while a
        graph is replayed. Else 0.
        """
        return self.step.peak_bytes if isinstance(self.step, CapturedStep) else 0


def prepare_for_study(
    version: Any,
    options: Options,
    precision: Precision,
    batch: Batch,
    model: nn.Module | None = None,
) -> Prepared:
    """A version's training step for a study, made and checked as in a run, of a `model` that it has
    made or makes now.

    `version` is a module as in `version_files`, or an object with the same functions.

    UsageError: the step can't be captured. RunError: as `warm_up` and `captured_step`.
    """
    captured = capture.wanted(
        options.capture_step, getattr(version, "CAPTURED", False), precision.device
    )
    if captured:
        capture.check_supported(precision.device, options.switches.get("torch-compile"))
    placed = place(
        model or version.make_model(options),
        precision.device,
        None,
        captured,
        options.checkpoint_activations,
    )
    optimizer = adapt(version.make_optimizer(placed, options), precision, None, captured)
    made = Prepared(placed, optimizer, version.make_step(placed, optimizer, precision))
    warm_up(made, precision, batch)
    return captured_step(made, precision, batch) if captured else made


def place(
    model: Model, device: torch.device, form: str | None, captured: bool, checkpointed: str
) -> Model:
    """The model on the device, in the form that a training step calls: `checkpointed`, and in that
    of several processes.
    """
    model.to(device)
    if checkpointed != "none":
        from common import recompute

        recompute.apply(model, checkpointed)
    if not form:
        return model
    from common.training import distributed

    # where gradients are added up in every later step
    with devices.stream_before_capture() if captured else nullcontext():
        return distributed.parallel_model(model, form)


def adapt(
    optimizer: Optimizer, precision: Precision, form: str | None, captured: bool
) -> Optimizer:
    """The optimizer, not stepped yet, as one that a graph can hold, and that shares out its state
    where the form asks for it.
    """
    if captured:
        optimizer = capture.capturable(optimizer, precision)
    if not form:
        return optimizer
    from common.training import distributed

    return distributed.parallel_optimizer(optimizer, form)


def warm_up(
    made: Prepared,
    precision: Precision,
    batch: Batch,
    *,
    passes: int = 1,
    form: str | None = None,
    check: bool = True,
) -> None:
    """Runs the step `passes` times, at least once, without an update, and checks its gradients if
    asked to.

    RunError: a gradient is missing, not finite, or zero everywhere.
    """
    with without_update(made.optimizer, precision):
        # checked before DistributedDataParallel stops at a gradient that the first pass lacked
        for count in (1, passes - 1):
            if count:
                repeat(made.step, made.optimizer, batch, count)
                if check:
                    check_gradients(made.model, made.optimizer, form)


def repeat(step: Step, optimizer: torch.optim.Optimizer, batch: Batch, passes: int) -> Tensor:
    """The loss of the last of `passes` steps; in float16 it goes on until one has not overflowed,
    which moves the moments.
    """
    for i in range(passes + OVERFLOWS):
        loss = step(batch)
        if i + 1 >= passes:
            moments = [
                agreement.local(state["exp_avg"]) for state in agreement.states(optimizer).values()
            ]
            if agreement.anywhere(any(moment.any() for moment in moments), loss.device):
                break
    return loss


@contextmanager
def without_update(optimizer: torch.optim.Optimizer, precision: Precision) -> Iterator[None]:
    """Inside it a step changes no weight; afterwards the optimizer's state and the loss scale are
    those of the beginning.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    scaler = precision.scaler.state_dict()
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
    for state in agreement.states(optimizer).values():
        for value in state.values():
            value.zero_()
    precision.scaler.load_state_dict(scaler)


def gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor | None]:
    """What AdamW was given in its first step, by parameter: its first moment over 1 - beta1; None
    where it was given nothing.

    In a group of processes, the part that this process updates.
    """
    scale = 1 - optimizer.param_groups[0]["betas"][0]
    held = agreement.states(optimizer)
    moments = {
        name: held.get(parameter, {}).get("exp_avg") for name, parameter in model.named_parameters()
    }
    return {
        name: None if moment is None else agreement.local(moment) / scale
        for name, moment in moments.items()
    }


def check_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, form: str | None = None
) -> None:
    """Raises RunError if a gradient is missing, not finite or zero everywhere, or differs between
    processes of --parallel ddp.
    """
    found = gradients(model, optimizer)
    device = next(model.parameters()).device
    # of each parameter: has a gradient, one that is not finite, not zero
    facts = torch.zeros(len(found), 3, device=device)
    for row, gradient in zip(facts, found.values(), strict=True):
        if gradient is not None:
            row += torch.stack(
                [torch.ones_like(gradient.any()), ~gradient.isfinite().all(), gradient.any()]
            )
    broken = []
    for name, (given, infinite, usable) in zip(found, agreement.total(facts).tolist(), strict=True):
        if not given:
            broken.append(f"{name} has no gradient")
        elif infinite:
            broken.append(f"{name} has a gradient that is not finite")
        elif not usable:
            broken.append(f"{name} has a gradient of zeros")
    if broken:
        raise RunError(
            f"this model does not train: {len(broken)} of {len(found)} parameters get no usable gradient; first, {broken[0]}",
            shared=True,
        )
    if form == "ddp":
        from common.training import distributed

        if not distributed.equal([gradient for gradient in found.values() if gradient is not None]):
            own = "each process has gradients of its own"
            raise RunError(f"{own}: a step must call model.loss to have them averaged", shared=True)


def captured_step(made: Prepared, precision: Precision, batch: Batch) -> Prepared:
    """The same with its step as a graph, after `warm_up`; all weights are the initial ones
    afterwards.

    RunError: the step cannot be captured, or a replay gives another loss or gradients than the
    eager step.
    """
    model, optimizer, step = made

    def results(step: Step) -> list[Tensor]:
        loss = repeat(step, optimizer, batch, passes=1)
        return [
            loss,
            *(
                gradient
                for gradient in gradients(model, optimizer).values()
                if gradient is not None
            ),
        ]

    parallel = agreement.active()
    # On a stream of its own: a step's autograd graph that outlives it must not wait for the default
    # stream in the capture.
    with devices.stream_before_capture():
        with without_update(optimizer, precision):
            for _ in range(capture.PARALLEL_WARMUP if parallel else capture.WARMUP):
                step(batch)
        initial = {name: value.to("cpu", copy=True) for name, value in model.state_dict().items()}
        with without_update(optimizer, precision):
            # on the device they would count as the step's memory
            expected = [tensor.cpu() for tensor in results(step)]
        model.load_state_dict(nudged(model.state_dict()))
        with without_update(optimizer, precision):
            spread = capture.difference(expected, results(step))
        model.load_state_dict(initial)
    scaler = precision.scaler.state_dict()
    result = CapturedStep(step, batch, parallel)
    # it changes weights: the graph holds the rate of its capture
    error = capture.difference(expected, results(result))
    model.load_state_dict(initial)
    forget(optimizer, precision, scaler)
    if not (math.isfinite(error) and error <= max(capture.TOLERANCE, 2 * spread)):
        raise RunError(
            f"the captured step differs from the eager one: relative error {error:.2g} of a loss or gradient"
        )
    torch.cuda.empty_cache()  # of what the check used
    return Prepared(model, optimizer, result)


def nudged(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights, changed by less than bf16 rounds them by: a step on them rounds some of its
    numbers the other way.

    FP8 has few numbers: such a difference moves others in the layers that follow, and gradients by
    10 to 25%; in bf16 by 2%.
    """
    return {name: value * (1 + NUDGE * torch.sin(1e6 * value)) for name, value in state.items()}
