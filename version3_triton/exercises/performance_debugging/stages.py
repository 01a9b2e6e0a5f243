"""What the stages share. A stage is Version 3 with one thing replaced: what its file defines takes the place of Version 3's.

Every stage takes Version 3's flags, and two more: `--fixed` undoes the replacement, and `--diagnose` prints statistics of the
first batch in place of training. A stage may have

    add_arguments(parser)     adds its own flags
    prepare(options)          is called before the run
    caveat(device)            returns a sentence about what this device cannot show, or None
    HAS_FIX = False           leaves out --fixed

The record of a run (schema tiny-llama-run/1) gets a section more:

    "stage": {"fixed": false, "parameters": 26, "updated": 26, "state_mib": 22.0, "caveat": null}

    parameters      tensors that the model trains
    updated         those that the optimizer keeps moments for: AdamW makes them when a parameter first gets a gradient
    state_mib       MiB of these moments
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

from common import cli
from common import device as devices
from common.files import write_measurement
from common.training import run, version_files
from version3_triton import kernels
from version3_triton import tiny_llama_v3 as v3

import diagnose
import torch
from torch import Tensor, nn

__all__ = ["kernels", "main", "of", "train", "v3", "with_operations"]


def add_arguments(module: ModuleType, parser: ArgumentParser) -> None:
    """The flags of a stage, beside Version 3's."""
    group = parser.add_argument_group("stage")
    if getattr(module, "HAS_FIX", True):
        group.add_argument("--fixed", action="store_true", help="with the fix")
    else:
        parser.set_defaults(fixed=False)
    group.add_argument("--diagnose", action="store_true", help="print statistics of every layer on the first batch, and end")
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)


def with_operations(options: Namespace, **replaced: Callable) -> nn.Module:
    """Version 3's model with some of its operations replaced, by name."""
    version = version_files.load(Path(v3.__file__))  # a module of its own: replacing a function changes no other model
    for name, function in replaced.items():
        setattr(version, name, function)
    return version.make_model(options)


def of(module: ModuleType) -> SimpleNamespace:
    """The version that a stage's file stands for."""
    return SimpleNamespace(**vars(v3) | vars(module) | {"add_arguments": partial(add_arguments, module)})


def main(module: ModuleType) -> None:
    """Parses the command line, runs the stage, and exits the process."""
    stage = of(module)
    options = run.parser(stage).parse_args()
    cli.command(lambda: train(stage, cli.parse(options)))


def train(stage: SimpleNamespace, options: Namespace) -> int:
    """A training run of the stage, or its diagnosis; errors as in `common.training.run.train`. Returns the exit code."""
    if options.diagnose:
        print(diagnose.report(stage, options))
        return 0
    device = devices.select(options.device)
    caveat = stage.caveat(device) if hasattr(stage, "caveat") else None
    if caveat:
        print(f"note: {caveat}", file=sys.stderr)
    if hasattr(stage, "prepare"):
        stage.prepare(options)
    make_optimizer, optimizers = stage.make_optimizer, []

    def keep_optimizer(model: nn.Module, options: Namespace) -> torch.optim.Optimizer:
        optimizers.append(make_optimizer(model, options))
        return optimizers[0]

    stage.make_optimizer = keep_optimizer
    options.metrics_out = options.metrics_out or Path(f"metrics_{Path(stage.__file__).stem}.json")
    result = run.train(stage, options)
    record = result.record | {"stage": {"fixed": options.fixed, **updated(optimizers[0]), "caveat": caveat}}
    write_measurement(result.metrics, record, "--metrics-out")
    if "phases_ms" in record:
        total, step = sum(phase["median"] for phase in record["phases_ms"].values()), record["step_ms"]["median"]
        print(f"  phases       {total:.2f} ms together, {total / step:.0%} of a step")
    return result.exit_code


def updated(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """How many parameters there are, for how many the optimizer has moments, and their MiB."""
    moments = [tensor for state in optimizer.state.values() for tensor in state.values() if isinstance(tensor, Tensor)]
    return {
        "parameters": sum(len(group["params"]) for group in optimizer.param_groups),
        "updated": len(optimizer.state),
        "state_mib": sum(tensor.numel() * tensor.element_size() for tensor in moments) / 2**20,
    }
