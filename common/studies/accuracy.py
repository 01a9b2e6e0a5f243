"""Checks that a version computes what another one does: logits, loss and the gradient of every weight, from the same weights.

The error of a tensor b against a is max |a - b| / max |a|. It is relative to the largest element, because a small element next to
a large one carries the rounding of the large one. The error is hardly ever 0: floating-point sums depend on their order, and a
fused operation sums in another order. So each error stands beside a yardstick, the error that the baseline itself makes in the
number format of the optimized run, against the baseline in float64. An error of that size is rounding. An error far above it
means that the mathematics differs.

The weights of the norms start at 1 in training. Here they are moved away from 1, because a version that ignores them would
otherwise pass.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

from common import device as devices
from common.analysis.output.report import Report
from common.errors import RunError
from common.options import Options
from common.precision import SHORT, Precision, amp_dtype
from common.terminal import progress
from common.training import step as steps
from common.training import version_files
from common.training.capture import Batch
from common.training.run import explained

import torch
from torch import Tensor

NORM_SPREAD = 0.1  # standard deviation of the norms' weights around 1


class TensorError(NamedTuple):
    """The largest element of a tensor in the baseline, the error of the optimized version, and the yardstick."""

    name: str
    largest: float
    error: float
    rounding: float


class Inputs(NamedTuple):
    """The batch, and weights under Version 1's names."""

    batch: Batch
    state: dict[str, Tensor]


class Comparison(NamedTuple):
    """The errors, largest first, and the number formats of the logits: of the baseline and of the optimized version."""

    errors: list[TensorError]
    formats: tuple[str, str]


def error(expected: Tensor, got: Tensor) -> float:
    """max |expected - got| / max |expected|; infinite where that is not a number."""
    expected, got = expected.double(), got.double()
    if torch.equal(expected, got):
        return 0.0
    relative = ((expected - got).abs().max() / expected.abs().max()).item()
    return relative if relative == relative else float("inf")


def compare(baseline: ModuleType, optimized: ModuleType, options: Options, flags: Sequence[str]) -> Comparison:
    """Runs both versions, the baseline in fp32 by its own defaults, the other with `flags` and in the precision of the options.

    UsageError: it has no such flag. RunError: weights do not load, do not come back, or get no gradient, or memory ran out.
    """
    chosen, plain = version_files.switched(optimized, options, *flags), version_files.switched(baseline, options)
    with explained(options), progress("computing both versions, and the baseline in float64"):
        rounding = errors_against_float64(baseline, baseline, options, [])
        given = inputs(baseline, options)
        expected = run(baseline, plain, given, None)
        got = run(optimized, chosen, given, amp_dtype(options))
    errors = [
        TensorError(name, tensor.abs().max().item(), error(tensor, got[name]), rounding[name])
        for name, tensor in expected.items()
    ]
    formats = [SHORT.get(result["logits"].dtype, str(result["logits"].dtype)) for result in (expected, got)]
    return Comparison(sorted(errors, key=lambda tensor: -tensor.error), (formats[0], formats[1]))


def errors_against_float64(baseline: ModuleType, version: ModuleType, options: Options, flags: Sequence[str]) -> dict[str, float]:
    """The error of each tensor of a version, in the precision of the options, against the baseline in float64.

    The arguments are those of `compare`. If memory runs out, the device's own error is raised.
    """
    plain, chosen = version_files.switched(baseline, options), version_files.switched(version, options, *flags)
    given = inputs(baseline, options)
    exact = run(baseline, plain, given, None, torch.float64)
    got = run(version, chosen, given, amp_dtype(options))
    return {name: error(tensor, got[name]) for name, tensor in exact.items()}


def inputs(baseline: ModuleType, options: Options) -> Inputs:
    """Those that the options ask for."""
    device = devices.select(options.device)
    devices.prepare(device, options.seed)
    batch = version_files.random_batch(options, device)
    return Inputs(batch, weights(baseline.make_model(version_files.switched(baseline, options))))


def run(
    version: ModuleType, settings: Options, given: Inputs, half: torch.dtype | None, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """`outputs` of a version's model with the weights held in `dtype`, by autocast to `half` if that is given."""
    model, precision = version.make_model(settings), Precision(given.batch[0].device, half)
    exchange(model, given.state)
    return outputs(version, model.to(precision.device, dtype), settings, given.batch, precision)


def outputs(version: Any, model: Any, settings: Options, batch: Batch, precision: Precision) -> dict[str, Tensor]:
    """The logits [B, S, V], and the loss and the gradients of one training step, under Version 1's names.

    The gradients replace the model's weights. RunError: a parameter gets none.
    """
    optimizer = version.make_optimizer(model, settings)
    step = version.make_step(model, optimizer, precision)  # before the logits: it decides the number format of the products
    with torch.no_grad(), precision.autocast():
        logits = model(batch[0])
    loss = steps.run(step, optimizer, batch, passes=1)
    with torch.no_grad():
        for (name, gradient), parameter in zip(steps.gradients(model, optimizer).items(), model.parameters(), strict=True):
            if gradient is None:
                raise RunError(f"{name} gets no gradient")
            parameter.copy_(gradient)
    gradients = model.baseline_state_dict()
    del gradients["lm_head.weight"]  # tied to the embedding
    return {"logits": logits, "loss": loss} | {f"gradient of {name}": gradient for name, gradient in gradients.items()}


def weights(model: Any) -> dict[str, Tensor]:
    """Copies of the model's weights under Version 1's names, with those of the norms moved away from 1."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(NORM_SPREAD * torch.randn_like(parameter))
    return {name: weight.clone() for name, weight in model.baseline_state_dict().items()}


def exchange(model: Any, state: dict[str, Tensor]) -> None:
    """Loads weights under Version 1's names. RunError: the model does not take all, or does not give the same ones back."""
    missing, unexpected = model.load_state_dict(state, strict=False)
    if missing or unexpected:
        raise RunError(f"the baseline's weights do not load: missing {missing[:3]}, unexpected {unexpected[:3]}")
    returned = model.baseline_state_dict()
    changed = [name for name, weight in state.items() if name not in returned or not torch.equal(returned[name], weight)]
    if changed:
        raise RunError(f"the baseline's weights do not come back from baseline_state_dict: {', '.join(changed[:3])}")


def report(comparison: Comparison, tolerance: float) -> tuple[Report, bool]:
    """The table and the verdict, and whether every error is within the tolerance."""
    errors, (expected, got) = comparison
    worst, past = errors[0], sum(not tensor.error <= tolerance for tensor in errors)
    result = Report("Numerical accuracy")
    result.table(["tensor", "max |baseline|", "error", f"baseline in {got} against float64"], errors)
    if expected != got:
        result.text(f"The precision differs: baseline {expected}, optimized {got}. The last column is what {got} alone rounds.")
    found = f"{past} of {len(errors)} tensors exceed" if past else f"all {len(errors)} tensors are within"
    result.text(
        f"{'FAIL' if past else 'PASS'}: the worst tensor is {worst.name}, error {worst.error:.2g} "
        f"(rounding alone: {worst.rounding:.2g}); {found} the tolerance {tolerance:g}"
    )
    return result, not past
