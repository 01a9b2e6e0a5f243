"""Compares the measured runs of the stages, and reports what is wrong with each. It runs no stage.

    python compare_stages.py
    python compare_stages.py --results-dir results --output results/comparison.md

It reads the files of run_all_stages.sh from --results-dir: the records stage0_metrics.json (Version
1), stageN_metrics.json and stageN_fixed_metrics.json. All runs must have the same configuration.
`loss` is the loss of the first step, and the mean of the last five; samples/s is the batch size
over the median step; the optimizer has moments for the parameters that ever got a gradient. These
rules decide "what is wrong":

    start       the first loss is more than 1 nat above ln V, the loss of a uniform guess
    gradient    the optimizer never had a gradient for a parameter
    learning    the last loss is more than 0.1 above that of Version 1, with the same data and the
                same initial weights
    clock       on a GPU, forward, backward and optimizer add up to less than 0.8 of a step
    speed       the steps are slower or faster than those of stage 5 by more than 1.5: one process a
                side cannot tell less; where the time went, the profiles stageN_profile.csv say
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the root of this clone

import math
import re
from typing import Any, NamedTuple

from common import cli
from tracepage.errors import UsageError
from tracepage.files import Amount, check, writable_file, write_text
from tracepage.records import run_record
from tracepage.show import run_facts
from tracepage.show.report import Report

from pydantic import NonNegativeInt
from typing_extensions import TypedDict

RECORD = re.compile(r"stage(\d+)(_fixed)?_metrics\.json")
V1 = 0  # the number of Version 1 in the files' names
V3 = 5
# The limits of the rules:
START = 1.0
LEARNING = 0.1
CLOCK = 0.8
SPEED = 1.5
LAST_STEPS = 5


class Updates(TypedDict):
    """What a stage's record adds to that of a run."""

    fixed: bool
    parameters: NonNegativeInt
    updated: NonNegativeInt  # parameters that ever got a gradient
    state_mib: Amount
    caveat: str | None


class StageRun(run_record.TimedRun):
    stage: Updates


class Stage(NamedTuple):
    """A run of a stage."""

    number: int
    fixed: bool
    run: run_record.TimedRun
    updates: Updates | None  # None for Version 1

    @property
    def name(self) -> str:
        if self.updates is None:
            return "Version 1"
        title = self.run["version"].split("_", 2)[-1].replace("_", " ")
        return f"{self.number} {title}, fixed" if self.fixed else f"{self.number} {title}"

    @property
    def step(self) -> float:
        """Median, ms."""
        return self.run["step_ms"]["median"]

    @property
    def losses(self) -> tuple[float, float]:
        """The loss of the first step, and the mean of the last steps."""
        losses = self.run["loss"]["all"]
        last = losses[-LAST_STEPS:]
        return losses[0], sum(last) / len(last)

    @property
    def phases(self) -> float | None:
        """Forward, backward and optimizer together, as a share of the step."""
        timed = self.run.get("phases_ms")
        return sum(phase["median"] for phase in timed.values()) / self.step if timed else None


def read(folder: Path) -> list[Stage]:
    """The runs in a folder, in order, each stage before its fix.

    UsageError: Version 1 or stage 5 is missing, a run was not completed, two runs differ in their
    configuration, or a file is damaged.
    """
    stages = []
    for path in folder.glob("*_metrics.json"):
        match = RECORD.fullmatch(path.name)
        if not match:
            continue
        number = int(match[1])
        run = run_record.read_timed(path)
        problems = run_record.unusable(path, run)
        if problems:
            raise UsageError(f"{folder}: {problems[0]}: run it again with run_all_stages.sh")
        updates = None if number == V1 else check(path, run, StageRun)["stage"]
        stages.append(Stage(number, bool(match[2]), run, updates))
    stages.sort(key=lambda stage: stage[:2])
    for number in (V1, V3):
        if not any(stage.number == number for stage in stages):
            raise UsageError(
                f"there is no {folder}/stage{number}_metrics.json: "
                f"make it with run_all_stages.sh --stages {number}"
            )
    for stage in stages[1:]:
        differing = run_record.differences(conditions(stages[0]), conditions(stage))
        if differing:
            raise UsageError(
                f"{folder}: Version 1 and stage {stage.name} differ in {'; '.join(differing)}: "
                "run both again"
            )
    return stages


def conditions(stage: Stage) -> dict[str, Any]:
    """What two runs must share to be compared."""
    return run_record.conditions(stage.run) | run_record.training_inputs(stage.run)


def findings(stage: Stage, v1: Stage, v3: Stage) -> list[str]:
    """What is wrong with the stage, by the rules above."""
    faults = []
    first, last = stage.losses
    _, last_of_v1 = v1.losses
    uniform = stage.run["loss"]["uniform"]
    phases = stage.phases
    if first > uniform + START:
        faults.append(f"the loss starts at {first:.1f}, a uniform guess costs {uniform:.1f}")
    if stage.updates:
        parameters = stage.updates["parameters"]
        idle = parameters - stage.updates["updated"]
        if idle > 0:
            faults.append(f"{idle} of {parameters} parameters never get a gradient")
    if not last <= last_of_v1 + LEARNING:
        faults.append(
            f"it learns less: the loss ends at {last:.2f}, Version 1's at {last_of_v1:.2f}"
        )
    if phases is not None and phases < CLOCK and stage.run["device"]["kind"] != "cpu":
        faults.append(
            f"the phases add up to {phases:.0%} of the step: "
            "their clock does not wait for the device"
        )
    if stage.step > SPEED * v3.step:
        faults.append(f"{stage.step / v3.step:.1f} times stage 5's step")
    if v3.step > SPEED * stage.step:
        ratio = v3.step / stage.step
        faults.append(f"{ratio:.1f} times as fast as stage 5: what does it leave out?")
    return faults


def row(stage: Stage, v1: Stage) -> list[object]:
    first, last = stage.losses
    counted = stage.updates
    phases = stage.phases
    return [
        stage.name,
        f"{first:.2f} to {last:.2f}",
        stage.run["training"]["batch_size"] / stage.step * 1e3,
        v1.step / stage.step,
        f"{counted['updated']} of {counted['parameters']}" if counted else "all (checked)",
        f"{phases:.0%}" if phases is not None else "",
        stage.run["memory"]["peak_mib"],
        counted["state_mib"] if counted else None,
    ]


def report(stages: list[Stage]) -> Report:
    """Conditions, a row for each run, what is wrong with each, and what this device cannot show."""
    v1 = stages[0]
    v3 = next(stage for stage in stages if stage.number == V3)
    header = [
        "stage",
        "loss",
        "samples/s",
        "x Version 1",
        "with gradient",
        "phases / step",
        f"peak MiB ({v1.run['memory']['kind']})",
        "MiB of moments",
    ]
    steps = len(v1.run["loss"]["all"])
    tokens = math.exp(v1.run["loss"]["uniform"])
    text = f"{v1.run['data']['name']}, {tokens:.0f} tokens"
    result = Report("Stages compared")
    result.text(f"{run_facts.describe(v1.run)}; {steps} steps; {text}")
    result.table(header, [row(stage, v1) for stage in stages])
    result.section("Key observations")
    faults = {stage.name: "; ".join(findings(stage, v1, v3)) for stage in stages[1:]}
    result.facts([(name, text or "nothing found") for name, text in faults.items()])
    for stage in stages:
        if stage.updates and not stage.fixed and stage.updates["caveat"]:
            result.text(f"Stage {stage.number}: {stage.updates['caveat']}.")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--results-dir", type=Path, default=Path("results"), metavar="DIR", help="default: results"
    )
    parser.add_argument("--output", type=Path, metavar="FILE.md", help="write the same as Markdown")
    options = cli.parse(parser)
    if options.output:
        writable_file(options.output, "--output", options.results_dir.glob("*.json"))
    result = report(read(options.results_dir))
    print(result.terminal())
    if options.output:
        write_text(options.output, result.markdown())


if __name__ == "__main__":
    cli.command(main)
