"""What the stages share. A stage is Version 3 with one part replaced, which its file hands to
`Stage`.

Every stage takes Version 3's flags but --mode, and `--diagnose`, which prints statistics of the
first batch in place of training. All stages time their phases, so that the line of phases gives
none of them away. All but stage 5 take `--fixed`, which undoes the replacement. The record of a run
(schema tiny-llama-run/1) gets a section more:

    "stage": {"fixed": false, "parameters": 26, "updated": 26, "state_mib": 22.0, "caveat": null}

    parameters      tensors that the model trains
    updated         those that the optimizer keeps moments for: AdamW makes them when a parameter
                    first gets a gradient
    state_mib       MiB of these moments
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from common import cli
from common import device as devices
from common.options import RunOptions
from studies import version_files
from tracepage.records import run_record
from version3_triton import kernels
from version3_triton import tiny_llama_v3 as v3
from version3_triton.kernels import Operations

import diagnose
import torch
from torch import Tensor, nn

__all__ = ["Operations", "Parts", "Stage", "kernels", "v3"]


@dataclass(frozen=True, kw_only=True)
class StageOptions(RunOptions):
    diagnose: bool
    fixed: bool = False


class Parts(NamedTuple):
    """What stands in place of Version 3's."""

    # Replaces parts of the model.
    change: Callable[[v3.TinyLlama], None] = lambda model: None
    # The functions that the model calls, with some replaced.
    operations: Callable[[Operations], Operations] = lambda table: table
    phase_clock: type | None = None  # of the run's options


@dataclass
class Stage:
    description: str | None  # for --help
    file: str  # of the stage; it names the record
    parts: Parts = Parts()
    # The defaults of flags, where they are not Version 3's.
    defaults: Mapping[str, object] = field(default_factory=dict)
    # The flags of the stage alone, with the keywords of argparse for each.
    flags: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fix: Parts | None = None  # those of --fixed
    # A sentence about what a device cannot show, or None.
    caveat: Callable[[torch.device], str | None] = lambda device: None

    def chosen(self, options: StageOptions) -> Parts:
        return self.fix if self.fix and options.fixed else self.parts

    def make_model(self, options: StageOptions) -> nn.Module:
        parts = self.chosen(options)
        table = kernels.choose(options.switches, options.device)
        model = v3.make_model(options, parts.operations(table))
        parts.change(model)
        return model

    def options(self, arguments: Sequence[str] | None = None) -> StageOptions:
        """The options from these arguments, or from those of the command line."""
        parser = version_files.run_parser(v3, self.description)
        parser.set_defaults(time_phases=True, **self.defaults)
        group = parser.add_argument_group("stage")
        if self.fix:
            group.add_argument("--fixed", action="store_true", help="with the fix")
        group.add_argument(
            "--diagnose",
            action="store_true",
            help="print statistics of every layer on the first batch, and end",
        )
        for flag, keywords in self.flags.items():
            group.add_argument(flag, **keywords)
        return cli.resolve(StageOptions, cli.parse(parser, arguments), v3.SWITCHES)

    def train(self, options: StageOptions) -> int:
        """A training run of the stage, or its diagnosis; returns the exit code."""
        if options.diagnose:
            print(diagnose.report(self.make_model, options))
            return 0
        caveat = self.caveat(devices.select(options.device))
        if caveat:
            print(f"note: {caveat}", file=sys.stderr)
        clock = self.chosen(options).phase_clock
        options = replace(options, name=Path(self.file).stem, phase_clock=clock)
        run = v3.train(options, self.make_model)
        run.amend(stage={"fixed": options.fixed, **updated(run.optimizer), "caveat": caveat})
        if run_record.finished(run.record) and "phases_ms" in run.record:
            total = sum(phase["median"] for phase in run.record["phases_ms"].values())
            step = run.record["step_ms"]["median"]
            print(f"  phases       {total:.2f} ms together, {total / step:.0%} of a step")
        return run.exit_code

    def main(self) -> None:
        """Runs the stage, and exits the process."""
        cli.command(lambda: self.train(self.options()))


def updated(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """How many parameters there are, for how many the optimizer has moments, and their MiB."""
    moments = [
        tensor
        for state in optimizer.state.values()
        for tensor in state.values()
        if isinstance(tensor, Tensor)
    ]
    return {
        "parameters": sum(len(group["params"]) for group in optimizer.param_groups),
        "updated": len(optimizer.state),
        "state_mib": sum(tensor.numel() * tensor.element_size() for tensor in moments) / 2**20,
    }
