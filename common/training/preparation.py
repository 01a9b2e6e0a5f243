"""Builds and checks the training step of a version. The step that is checked is the one that trains
and that is timed.

`warm_up` runs the step a few times with a learning rate of 0, which changes no weight. AdamW's
first moments then show the gradients that the optimizer was given: after one such step a moment is
(1 - beta1) times the gradient.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from common import ranks
from common.precision import Precision
from tracepage.errors import RunError

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
Batch = tuple[Tensor, Tensor]
Step = Callable[[Batch], Tensor]
States = dict[Tensor, dict[str, Tensor]]  # of an optimizer, by parameter
# Float16 steps that may be left out before one is not, each with half the loss scale.
OVERFLOWS = 20


class Prepared(NamedTuple):
    """A version's model, optimizer and step, which returns the loss from before the update."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Step
    # Bytes that a captured step allocates at once; the allocator does not count them while a graph
    # is replayed. Else 0.
    graph_peak_bytes: int = 0


@runtime_checkable
class CommunicatingOptimizer(Protocol):
    """An optimizer that averages gradients over all processes itself, and may share out single
    tensors. Its model has `optimizer_communicates`.
    """

    def communicate(self, form: str) -> None:
        """From now on it communicates, in a form of --parallel; before its first step."""

    def whole_states(self) -> States:
        """The state of each parameter, with tensors that are whole; all processes must call it."""

    def take_states(self, states: States) -> None:
        """Copies what this process updates out of `whole_states`, after these have changed."""

    def gather_weights(self) -> None:
        """Makes every weight the newest; all processes must call it."""


def states(optimizer: torch.optim.Optimizer) -> States:
    """The state of each parameter that this process updates: of some parameters only, or of a part
    of each tensor.
    """
    if ranks.joined():
        from torch.distributed.optim import ZeroRedundancyOptimizer

        if isinstance(optimizer, ZeroRedundancyOptimizer):
            return optimizer.optim.state
    return optimizer.state


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, which shares its memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def move_model(model: Model, device: torch.device, recomputed: str) -> Model:
    """The model on the device; `recomputed` are the activations of --checkpoint-activations."""
    if recomputed != "none":
        from common import recompute

        recompute.apply(model, recomputed)
    return model.to(device)


def capturable(optimizer: Optimizer, precision: Precision) -> Optimizer:
    """The same AdamW, not stepped yet, as one that a graph can hold."""
    if optimizer.defaults.get("capturable"):
        return optimizer
    changed: dict[str, Any] = {"capturable": True}
    if precision.scaler.is_enabled():
        changed["fused"] = True
    groups = [dict(group) for group in optimizer.param_groups]
    for group in groups:
        for key in changed:
            group.pop(key, None)
    return type(optimizer)(groups, **changed)


def warm_up(
    prepared: Prepared,
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
    with without_update(prepared.optimizer, precision):
        # The first check is before DistributedDataParallel stops at a gradient that was lacking.
        for count in (1, passes - 1):
            if count:
                repeat(prepared.step, prepared.optimizer, batch, count)
                if check:
                    check_gradients(prepared.model, prepared.optimizer, form)


def repeat(step: Step, optimizer: torch.optim.Optimizer, batch: Batch, passes: int) -> Tensor:
    """The loss of the last of `passes` steps; in float16 it goes on until one has not overflowed,
    which moves the moments.
    """
    for i in range(passes + OVERFLOWS):
        loss = step(batch)
        if i + 1 >= passes:
            moments = [local(state["exp_avg"]) for state in states(optimizer).values()]
            if ranks.anywhere(any(moment.any() for moment in moments), loss.device):
                break
    return loss


@contextmanager
def without_update(optimizer: torch.optim.Optimizer, precision: Precision) -> Iterator[None]:
    """Inside it a step changes no weight; optimizer and loss scale are reset afterwards."""
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
    for state in states(optimizer).values():
        for value in state.values():
            value.zero_()
    precision.scaler.load_state_dict(scaler)


def gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor | None]:
    """What AdamW was given in its first step, by parameter: its first moment over 1 - beta1; None
    where it was given nothing.

    In a group of processes, the part that this process updates.
    """
    scale = 1 - optimizer.param_groups[0]["betas"][0]
    held = states(optimizer)
    result: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters():
        moment = held.get(parameter, {}).get("exp_avg")
        result[name] = None if moment is None else local(moment) / scale
    return result


def check_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, form: str | None = None
) -> None:
    """Raises RunError if a gradient is missing, not finite or zero everywhere, or differs between
    processes of --parallel ddp.
    """
    grads = gradients(model, optimizer)
    device = next(model.parameters()).device
    # Of each parameter: has a gradient, one that is not finite, one that is not zero.
    facts = torch.zeros(len(grads), 3, device=device)
    for row, grad in zip(facts, grads.values(), strict=True):
        if grad is not None:
            row += torch.stack([torch.ones_like(grad.any()), ~grad.isfinite().all(), grad.any()])
    broken = []
    for name, (has_one, infinite, usable) in zip(grads, ranks.total(facts).tolist(), strict=True):
        if not has_one:
            broken.append(f"{name} has no gradient")
        elif infinite:
            broken.append(f"{name} has a gradient that is not finite")
        elif not usable:
            broken.append(f"{name} has a gradient of zeros")
    if broken:
        raise RunError(
            f"this model does not train: {len(broken)} of {len(grads)} parameters get no usable "
            f"gradient; first, {broken[0]}",
            shared=True,
        )
    if form == "ddp" and not ranks.equal([grad for grad in grads.values() if grad is not None]):
        raise RunError(
            "each process has gradients of its own: a step must call model.loss "
            "to have them averaged",
            shared=True,
        )
