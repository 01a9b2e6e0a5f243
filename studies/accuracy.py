"""Checks that a version computes what another one does: logits, loss and the gradient of every
weight, from the same weights.

The error of a tensor b against a is max |a - b| / max |a|. It is relative to the largest element,
because a small element next to a large one carries the rounding of the large one. The error is
hardly ever 0: floating-point sums depend on their order, and a fused operation sums in another
order. So each error stands beside a yardstick, the error that the baseline itself makes in the
number format of the optimized run, against the baseline in float64. An error of that size is
rounding. An error far above it means that the mathematics differs.

The gradients also have one error together: with all of them as one vector it is |a - b| / |a|, in
L2. It says how far a step of training is off, where the largest error tells of one element.

The weights of the norms start at 1 in training. Here they are moved away from 1, because a version
that ignores them would otherwise pass.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from common import device as devices
from common.options import Options
from common.precision import Precision, amp_dtype
from common.training import preparation
from common.training.preparation import Batch
from common.training.run import explained
from studies import version_files
from tracepage.errors import RunError
from tracepage.terminal import progress
from tracepage.views.numerical_accuracy import TensorError

import torch
from torch import Tensor

TOGETHER = "all gradients together, in L2"
GRADIENT = "gradient of "
NORM_SPREAD = 0.1  # standard deviation of the norms' weights around 1


def error(expected: Tensor, got: Tensor) -> float:
    """max |expected - got| / max |expected|; infinite where that is not a number."""
    expected = expected.double()
    got = got.double()
    if torch.equal(expected, got):
        return 0.0
    relative = ((expected - got).abs().max() / expected.abs().max()).item()
    return relative if relative == relative else float("inf")


def together(expected: dict[str, Tensor], got: dict[str, Tensor]) -> float:
    """|a - b| / |a| of all gradients as one vector; infinite where that is not a number."""
    squares = [0.0, 0.0]  # of the difference and of the expected
    for name, tensor in expected.items():
        if name.startswith(GRADIENT):
            exact = tensor.double()
            squares[0] += (exact - got[name].double()).square().sum().item()
            squares[1] += exact.square().sum().item()
    relative = (squares[0] / squares[1]) ** 0.5
    return relative if relative == relative else float("inf")


def errors(expected: dict[str, Tensor], got: dict[str, Tensor]) -> dict[str, float]:
    """The error of each tensor, and that of `together` under TOGETHER."""
    by_tensor = {name: error(tensor, got[name]) for name, tensor in expected.items()}
    return by_tensor | {TOGETHER: together(expected, got)}


def compare(
    baseline: ModuleType, optimized: ModuleType, options: Options, flags: Sequence[str]
) -> list[TensorError]:
    """Runs both versions, the baseline in fp32 by its own defaults, the other with `flags` and in
    the precision of the options.

    The largest error comes first. UsageError: the version has no such flag. RunError: weights do
    not load, do not come back, or get no gradient, or memory ran out.
    """
    version_files.switched(optimized, options, *flags)  # refuses an unknown flag at once
    with explained(options), progress("computing both versions, and the baseline in float64"):
        rounding = errors_against_float64(baseline, baseline, options, [])
        expected = run_step(baseline, baseline, options, [], None)
        got = run_step(baseline, optimized, options, flags, amp_dtype(options))
    largest = {name: tensor.abs().max().item() for name, tensor in expected.items()}
    largest[TOGETHER] = max(value for name, value in largest.items() if name.startswith(GRADIENT))
    rows = [
        TensorError(name, largest[name], value, rounding[name])
        for name, value in errors(expected, got).items()
    ]
    return sorted(rows, key=lambda tensor: -tensor.error)


def errors_against_float64(
    baseline: ModuleType, version: ModuleType, options: Options, flags: Sequence[str]
) -> dict[str, float]:
    """`errors` of a version, in the precision of the options, against the baseline in float64.

    The arguments are those of `compare`. If memory runs out, the device's own error is raised.
    """
    exact = run_step(baseline, baseline, options, [], torch.float64)
    got = run_step(baseline, version, options, flags, amp_dtype(options))
    return errors(exact, got)


def run_step(
    baseline: ModuleType,
    version: ModuleType,
    options: Options,
    flags: Sequence[str],
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    """`outputs` of a version with the baseline's weights: held in float64, in float32 (None), or
    there and cast by autocast.
    """
    device = devices.select(options.device)
    devices.configure(device, options.seed, deterministic=options.deterministic)
    state = draw_weights(baseline.make_model(version_files.switched(baseline, options)))
    settings = version_files.switched(version, options, *flags)
    exact = dtype == torch.float64
    table = {}
    if exact and hasattr(version, "kernels"):  # which compute in float32
        table["operations"] = version.kernels.REFERENCE
    model = version.make_model(settings, **table).to(device)
    exchange(model, state)
    batch = version_files.random_batch(options, device)
    if exact:
        return outputs(version, model.double(), settings, batch, Precision(device, None))
    return outputs(version, model, settings, batch, Precision(device, dtype))


def outputs(
    version: Any, model: Any, settings: Options, batch: Batch, precision: Precision
) -> dict[str, Tensor]:
    """The logits [B, S, V], and the loss and the gradients of one training step, under Version 1's
    names.

    The gradients replace the model's weights. RunError: a parameter gets none.
    """
    optimizer = version.make_optimizer(model, settings)
    # Comes before the logits, because it decides the number format of the products.
    step = version.make_step(model, optimizer, precision)
    with torch.no_grad(), precision.autocast():
        logits = model(batch[0])
    loss = preparation.repeat(step, optimizer, batch, passes=1)
    gradients = preparation.gradients(model, optimizer)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gradient = gradients[name]
            if gradient is None:
                raise RunError(f"{name} gets no gradient")
            parameter.copy_(gradient)
    tensors = {"logits": logits, "loss": loss}
    for name, gradient in model.baseline_state_dict().items():
        if name != "lm_head.weight":  # which is tied to the embedding
            tensors[GRADIENT + name] = gradient
    return tensors


def draw_weights(model: Any) -> dict[str, Tensor]:
    """Copies of the model's weights under Version 1's names, with those of the norms moved away
    from 1.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(NORM_SPREAD * torch.randn_like(parameter))
    return {name: weight.clone() for name, weight in model.baseline_state_dict().items()}


def exchange(model: Any, state: dict[str, Tensor]) -> None:
    """Loads weights under Version 1's names. RunError: the model does not take all, or does not
    give the same ones back.
    """
    missing, unexpected = model.load_state_dict(state, strict=False)
    if missing or unexpected:
        raise RunError(
            f"the baseline's weights do not load: missing {missing[:3]}, unexpected "
            f"{unexpected[:3]}"
        )
    returned = {name: weight.cpu() for name, weight in model.baseline_state_dict().items()}
    changed = [
        name
        for name, weight in state.items()
        if name not in returned or not torch.equal(returned[name], weight.cpu())
    ]
    if changed:
        raise RunError(
            "the baseline's weights do not come back from baseline_state_dict: "
            f"{', '.join(changed[:3])}"
        )
