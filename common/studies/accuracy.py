"""Whether a version computes what another one does: logits, loss and the gradient of every weight, on the same weights and batch.

The error of a tensor b against a is max |a - b| / max |a|: relative to the largest element, since a small element next to a
large one carries the large one's rounding. Errors of this kind have no natural zero. Floating-point sums depend on
their order, and a fused operation sums in another order, so beside each error stands a yardstick: the error that the baseline
itself makes in the number format of the optimized run, against the baseline in float64. An error of that size is rounding; one
far above it is another mathematics.

Norms' weights start at 1 in training. Here they are moved away from it, or a version that forgets them would pass.
"""

from argparse import Namespace
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

from common import cli
from common import device as devices
from common.analysis.output import tables
from common.errors import RunError
from common.precision import SHORT, Precision
from common.training import version_files
from common.training.run import out_of_memory_explained

import torch
from torch import Tensor, nn

NORM_SPREAD = 0.1  # standard deviation of the norms' weights around 1
Batch = tuple[Tensor, Tensor]


class Row(NamedTuple):
    """One compared tensor: its largest element in the baseline, the error of the optimized version, and the yardstick."""

    name: str
    largest: float
    error: float
    rounding: float


class Comparison(NamedTuple):
    """The rows, largest error first, and the number formats of the logits: baseline's and optimized version's."""

    rows: list[Row]
    formats: tuple[str, str]


def error(expected: Tensor, got: Tensor) -> float:
    """max |expected - got| / max |expected|; infinite where that is no number."""
    expected, got = expected.double(), got.double()
    if torch.equal(expected, got):
        return 0.0
    relative = ((expected - got).abs().max() / expected.abs().max()).item()
    return relative if relative == relative else float("inf")


def outputs(model: nn.Module, batch: Batch, precision: Precision) -> dict[str, Tensor]:
    """Logits [B, S, V], the loss, and the gradients under Version 1's names. The model's weights are lost: they become gradients.

    Raises:
        RunError: a parameter gets no gradient.
    """
    with torch.no_grad(), precision.autocast():
        logits = model(batch[0])
    with precision.autocast():
        loss = model.loss(*batch)
    precision.scale(loss).backward()
    scale = precision.scaler.get_scale()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                raise RunError(f"{name} gets no gradient")
            parameter.copy_(parameter.grad / scale)
    gradients = {
        f"gradient of {name}": gradient
        for name, gradient in model.baseline_state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    return {"logits": logits, "loss": loss.detach()} | gradients


def compare(baseline: ModuleType, optimized: ModuleType, options: Namespace, flags: Sequence[str]) -> Comparison:
    """Runs both versions. The baseline runs in fp32 with its own defaults, the optimized one in the precision of the options.

    Args:
        options: from `version_files.resolve`.
        flags: of the optimized version's own, such as `--disable-flash-attention`.

    Raises:
        UsageError: the optimized version has no such flag.
        RunError: weights do not load, do not come back, or get no gradient, or memory ran out.
    """
    chosen, plain = version_files.switched(optimized, options, *flags), version_files.switched(baseline, options)
    precision, batch, state = common_ground(baseline, options)
    fp32 = Precision(precision.device, None)
    with out_of_memory_explained(options):
        expected = run(baseline, plain, state, batch, fp32)
        exact = run(baseline, plain, state, batch, fp32, torch.float64)
        rounded = run(baseline, plain, state, batch, precision) if options.use_amp else expected
        got = run(optimized, chosen, state, batch, precision)
    rows = [
        Row(name, tensor.abs().max().item(), error(tensor, got[name]), error(exact[name], rounded[name]))
        for name, tensor in expected.items()
    ]
    formats = tuple(SHORT.get(result["logits"].dtype, str(result["logits"].dtype)) for result in (expected, got))
    return Comparison(sorted(rows, key=lambda row: -row.error), formats)


def errors_against_float64(
    baseline: ModuleType, version: ModuleType, options: Namespace, flags: Sequence[str]
) -> dict[str, float]:
    """The error of each tensor of a version, in the precision of the options, against the baseline in float64.

    Arguments are those of `compare`. Memory that runs out is the device's own error.
    """
    precision, batch, state = common_ground(baseline, options)
    plain = version_files.switched(baseline, options)
    exact = run(baseline, plain, state, batch, Precision(precision.device, None), torch.float64)
    got = run(version, version_files.switched(version, options, *flags), state, batch, precision)
    return {name: error(tensor, got[name]) for name, tensor in exact.items()}


def common_ground(baseline: ModuleType, options: Namespace) -> tuple[Precision, Batch, dict[str, Tensor]]:
    """Precision, batch and weights of a comparison; the device is the precision's."""
    device = devices.select(options.device)
    precision = Precision(device, cli.amp_dtype(options))
    devices.prepare(device, options.seed)
    batch = version_files.random_batch(options, device)
    return precision, batch, weights(baseline.make_model(version_files.switched(baseline, options)))


def run(
    version: ModuleType, settings: Namespace, state: dict[str, Tensor], batch: Batch, precision: Precision,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:  # fmt: skip
    """`outputs` of a version's model with these weights, held in `dtype`."""
    model = version.make_model(settings)
    exchange(model, state)
    return outputs(model.to(precision.device, dtype), batch, precision)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's weights under Version 1's names, as copies, with those of the norms moved away from 1."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += NORM_SPREAD * torch.randn_like(parameter)
    return {name: weight.clone() for name, weight in model.baseline_state_dict().items()}


def exchange(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Loads weights under Version 1's names and asks for them back.

    Raises:
        RunError: some are not taken, or come back changed.
    """
    missing, unexpected = model.load_state_dict(state, strict=False)
    if missing or unexpected:
        raise RunError(f"the baseline's weights do not load: missing {missing[:3]}, unexpected {unexpected[:3]}")
    returned = model.baseline_state_dict()
    changed = [name for name, weight in state.items() if name not in returned or not torch.equal(returned[name], weight)]
    if changed:
        raise RunError(f"the baseline's weights do not come back from baseline_state_dict: {', '.join(changed[:3])}")


def report(comparison: Comparison, tolerance: float) -> tuple[str, bool]:
    """The table and the verdict as text, and whether every error is within the tolerance."""
    rows, (expected, got) = comparison
    worst = rows[0]
    passed = worst.error <= tolerance
    yardstick = f"baseline in {got} against float64"
    lines = [tables.text(["tensor", "max |baseline|", "error", yardstick], rows), ""]
    if expected != got:
        lines.append(f"different precision: baseline {expected}, optimized {got}; the last column is what {got} alone makes")
    past = sum(not row.error <= tolerance for row in rows)
    found = f"all {len(rows)} tensors are within" if passed else f"{past} of {len(rows)} tensors are past"
    lines.append(
        f"{'PASS' if passed else 'FAIL'}: the worst is {worst.name}, error {worst.error:.2g} "
        f"(rounding alone: {worst.rounding:.2g}); {found} the tolerance {tolerance:g}"
    )
    return "\n".join(lines), passed
