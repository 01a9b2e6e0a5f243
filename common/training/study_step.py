"""A version's training step for a study, made and checked as in a run."""

from typing import Any

from common import device as devices
from common.options import Options
from common.precision import Precision
from common.training import capture, preparation
from common.training.preparation import Batch, Prepared

from torch import nn


def prepare_for_study(
    version: Any,
    options: Options,
    precision: Precision,
    batch: Batch,
    model: nn.Module | None = None,
) -> Prepared:
    """The step of a `model` that the study has made, or of one that is made now.

    `version` is a module as in `version_files`, or an object with the same functions.

    UsageError: the step can't be captured. RunError: as `preparation.warm_up` and
    `capture.captured_step`.
    """
    device = precision.device
    captured = options.capture_step
    if captured is None:
        captured = getattr(version, "CAPTURED", False) and devices.is_gpu(device)
    if captured:
        capture.check_supported(device, options.switches.get("torch-compile"))
    model = preparation.move_model(
        model or version.make_model(options), device, options.checkpoint_activations
    )
    optimizer = version.make_optimizer(model, options)
    if captured:
        optimizer = preparation.capturable(optimizer, precision)
    prepared = Prepared(model, optimizer, version.make_step(model, optimizer, precision))
    preparation.warm_up(prepared, precision, batch)
    return capture.captured_step(prepared, precision, batch) if captured else prepared
