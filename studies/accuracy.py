"""Checks that a version computes what another one does: logits, loss and the gradient of every
weight, from the same weights.

The error of a tensor b against a is max |a - b| / max |a|. It is relative to the largest element,
because a small element next to a large one carries the rounding of the large one. The error is
hardly ever 0: floating-point sums depend on their order, and a fused operation sums in another
order. So each error stands beside a yardstick, the error that the baseline itself makes in the
number format of the optimized run, against the baseline in float64. An error of that size is
rounding. An error far above it means that the mathematics differs.

The weights of the norms start at 1 in training. Here they are moved away from 1, because a version
that ignores them would otherwise pass.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

from common import device as devices
from common.options import Options
from common.precision import SHORT, Precision, amp_dtype
from common.training import preparation
from common.training.preparation import Batch
from common.training.run import explained
from studies import version_files
from tracepage.errors import RunError
from tracepage.show.report import Report
from tracepage.terminal import progress

import torch
from torch import Tensor

NORM_SPREAD = 0.1  # standard deviation of the norms' weights around 1


class TensorError(NamedTuple):
    """The largest element of a tensor in the baseline, the error of the optimized version, and the
    yardstick.
    """

    name: str
    largest: float
    error: float
    rounding: float


def error(expected: Tensor, got: Tensor) -> float:
    """max |expected - got| / max |expected|; infinite where that is not a number."""
    expected = expected.double()
    got = got.double()
    if torch.equal(expected, got):
        return 0.0
    relative = ((expected - got).abs().max() / expected.abs().max()).item()
    return relative if relative == relative else float("inf")


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
        expected = run(baseline, baseline, options, [], None)
        got = run(baseline, optimized, options, flags, amp_dtype(options))
    errors = [
        TensorError(name, tensor.abs().max().item(), error(tensor, got[name]), rounding[name])
        for name, tensor in expected.items()
    ]
    return sorted(errors, key=lambda tensor: -tensor.error)


def errors_against_float64(
    baseline: ModuleType, version: ModuleType, options: Options, flags: Sequence[str]
) -> dict[str, float]:
    """The error of each tensor of a version, in the precision of the options, against the baseline
    in float64.

    The arguments are those of `compare`. If memory runs out, the device's own error is raised.
    """
    exact = run(baseline, baseline, options, [], torch.float64)
    got = run(baseline, version, options, flags, amp_dtype(options))
    return {name: error(tensor, got[name]) for name, tensor in exact.items()}


def run(
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
    devices.configure(device, options.seed)
    state = weights(baseline.make_model(version_files.switched(baseline, options)))
    settings = version_files.switched(version, options, *flags)
    model = version.make_model(settings).to(device)
    exchange(model, state)
    batch = version_files.random_batch(options, device)
    exact = dtype == torch.float64
    return outputs(
        version,
        model.double() if exact else model,
        settings,
        batch,
        Precision(device, None if exact else dtype),
    )


def outputs(
    version: Any, model: Any, settings: Options, batch: Batch, precision: Precision
) -> dict[str, Tensor]:
    """The logits [B, S, V], and the loss and the gradients of one training step, under Version 1's
    names.

    The gradients replace the model's weights. RunError: a parameter gets none.
    """
    optimizer = version.make_optimizer(model, settings)
    # before the logits: it decides the number format of the products
    step = version.make_step(model, optimizer, precision)
    with torch.no_grad(), precision.autocast():
        logits = model(batch[0])
    loss = preparation.repeat(step, optimizer, batch, passes=1)
    with torch.no_grad():
        for (name, gradient), parameter in zip(
            preparation.gradients(model, optimizer).items(), model.parameters(), strict=True
        ):
            if gradient is None:
                raise RunError(f"{name} gets no gradient")
            parameter.copy_(gradient)
    gradients = model.baseline_state_dict()
    del gradients["lm_head.weight"]  # tied to the embedding
    return {"logits": logits, "loss": loss} | {
        f"gradient of {name}": gradient for name, gradient in gradients.items()
    }


def weights(model: Any) -> dict[str, Tensor]:
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
            f"the baseline's weights do not load: missing {missing[:3]}, unexpected {unexpected[:3]}"
        )
    returned = model.baseline_state_dict()
    changed = [
        name
        for name, weight in state.items()
        if name not in returned or not torch.equal(returned[name], weight)
    ]
    if changed:
        raise RunError(
            f"the baseline's weights do not come back from baseline_state_dict: {', '.join(changed[:3])}"
        )


def report(errors: list[TensorError], options: Options, tolerance: float) -> tuple[Report, bool]:
    """The table and the verdict, and whether every error is within the tolerance."""
    precision = SHORT[amp_dtype(options) or torch.float32]
    worst = errors[0]
    past = sum(not tensor.error <= tolerance for tensor in errors)
    result = Report("Numerical accuracy")
    result.table(
        ["tensor", "max |baseline|", "relative error", f"baseline in {precision} against float64"],
        errors,
    )
    found = (
        f"{past} of {len(errors)} tensors exceed"
        if past
        else f"all {len(errors)} tensors are within"
    )
    result.text(
        f"{'FAIL' if past else 'PASS'}: the worst tensor is {worst.name}, relative error {worst.error:.2g} "
        f"(rounding alone: {worst.rounding:.2g}); {found} the tolerance {tolerance:g}"
    )
    return result, not past
