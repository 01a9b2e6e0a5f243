"""The record of a training run (schema tiny-llama-run/1): its fields, its reader, and when two runs
may be compared.

`common.training.record` writes it. What a report says of a run is in `tracepage.show.run_facts`.
"""

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from tracepage import files
from tracepage.errors import UsageError
from tracepage.files import Amount, Number, PositiveAmount
from tracepage.records.fields import Ceilings, Header, Model, NumberFormat, PeakMemory, Summary

from pydantic import AfterValidator, NonNegativeInt, PositiveInt
from typing_extensions import NotRequired, TypedDict, TypeIs


class Steps(TypedDict):
    all: list[Amount]  # ms of each step
    profiled: NonNegativeInt  # how many of them, the last ones, ran under the profiler


class TimedSteps(Steps, Summary):
    """The summary is of the steps without the profiler, or of all if there are no others."""


class Losses(TypedDict):
    uniform: Amount  # nats, of a guess among all tokens
    all: list[Number]  # nats, of each step
    # How many of them, the last ones, are the first process's: another had ended.
    own: NotRequired[PositiveInt]


def _has_losses(losses: Losses) -> Losses:
    if not losses["all"]:
        raise ValueError("it has no loss, but steps were timed")
    return losses


def _agrees(steps: TimedSteps) -> TimedSteps:
    """A summary that is not that of its own steps makes every comparison wrong."""
    times = steps["all"][: max(0, len(steps["all"]) - steps["profiled"])] or steps["all"]
    if steps["count"] != len(times):
        raise ValueError(f"count is {steps['count']}, but {len(times)} steps count")
    median = statistics.median(times)
    if not math.isclose(steps["median"], median, rel_tol=1e-6):
        raise ValueError(f"median is {steps['median']:g}, but that of the steps is {median:g}")
    if steps["p20"] > steps["p80"]:
        raise ValueError("p20 is above p80")
    return steps


class HeldOut(TypedDict):
    """The loss on text that training does not see."""

    loss: Amount  # nats, a mean over all sequences
    perplexity: PositiveAmount  # exp(loss)
    sequences: PositiveInt


class Saturation(TypedDict):
    """In how many steps a tensor in FP8 outgrew its scale, so that it was clipped."""

    saturated_steps: NonNegativeInt
    # Of these, steps in which that was so of an x, a weight, a gradient of a product x W^T.
    x: NonNegativeInt
    weight: NonNegativeInt
    gradient: NonNegativeInt


class Training(TypedDict):
    preset: str
    batch_size: PositiveInt
    sequence_length: PositiveInt
    num_steps: PositiveInt
    warmup_steps: NonNegativeInt
    learning_rate: Amount
    lr_schedule: NotRequired[str]  # in words; constant in older records
    seed: int
    first_step: NotRequired[PositiveInt]  # above 1 in a run that went on from a checkpoint
    world_size: NotRequired[PositiveInt]  # processes, each with a batch; 1 in older records
    parallel: NotRequired[str | None]  # how several processes trained together


class Data(TypedDict):
    """The text of a run."""

    name: str
    tokens: PositiveInt
    sha256: str
    entropy_floor: Amount | None  # nats, where it is known


class StepFlops(TypedDict):
    forward: PositiveInt
    backward: PositiveInt
    total: PositiveInt


class AnyRun(Header):
    """What the record of every run holds."""

    schema: Literal["tiny-llama-run/1"]
    status: str  # completed, interrupted, or "failed: ..."
    version: str
    model: Model
    training: Training
    settings: NotRequired[dict[str, Any]]  # the switches of the version
    precision: NumberFormat
    data: Data
    parameters: PositiveInt
    flops_per_step: StepFlops
    ceilings: Ceilings | None
    phases_ms: NotRequired[dict[str, Summary]]
    memory: PeakMemory
    held_out: NotRequired[HeldOut]  # with --eval-steps
    fp8: NotRequired[Saturation]  # with products in FP8; not in older records
    # Of every process: forward_ms without waiting, step_ms (median), peak_mib.
    ranks: NotRequired[dict[str, list[Amount]]]


class RunRecord(AnyRun):
    """A run of any length, even one that failed in its first step."""

    loss: Losses
    step_ms: Steps


class TimedRun(AnyRun):
    """A run that finished at least one step."""

    loss: Annotated[Losses, AfterValidator(_has_losses)]
    step_ms: Annotated[TimedSteps, AfterValidator(_agrees)]
    tokens_per_second: PositiveAmount
    samples_per_second: NotRequired[PositiveAmount]  # sequences; not in older records
    flops_per_second: PositiveAmount
    # This is as it was written; older records may hold a share of a measured GEMM.
    mfu: dict[str, Any] | None


SCHEMA = files.schema_of(RunRecord)


def read(path: Path) -> RunRecord | TimedRun:
    """The record of a run. UsageError: the file is missing, damaged, or not a record of a run."""
    return check(path, files.read(path, RunRecord))


def read_timed(path: Path) -> TimedRun:
    """The record of a run that finished at least one step. UsageError: the file is missing,
    damaged, or no such record.
    """
    run = read(path)
    if not finished(run):
        raise UsageError(f"{path} is the record of a run that finished no step ({run['status']})")
    return run


def check(path: Path, run: RunRecord) -> RunRecord | TimedRun:
    """A record in `path`, unchanged, if it also fits TimedRun where it has a finished step.
    UsageError: it does not.
    """
    return files.check(path, run, TimedRun) if finished(run) else run


def finished(run: RunRecord | TimedRun) -> TypeIs[TimedRun]:
    """Whether the run finished at least one step."""
    return bool(run["step_ms"]["all"])


def processes(run: AnyRun) -> int:
    """How many processes trained together."""
    return run["training"].get("world_size", 1)


def conditions(run: AnyRun, *varied: str) -> dict[str, Any]:
    """The conditions that a step's time depends on, besides the code, without those of `varied`
    names.
    """
    named: dict[str, Any] = {
        "batch size": run["training"]["batch_size"],
        "sequence length": run["training"]["sequence_length"],
        "torch": run["environment"]["torch"],
        "processes": processes(run),
        "parallel": run["training"].get("parallel"),
        "deterministic": run.get("deterministic", True),
    }
    for key in ("kind", "name", "threads", "multiprocessors"):
        named[f"device {key}"] = run["device"].get(key)
    named |= {f"model {key}": value for key, value in run["model"].items()}
    named |= {f"precision {key}": value for key, value in run["precision"].items()}
    return {name: value for name, value in named.items() if name not in varied}


def all_profiled(run: RunRecord | TimedRun) -> bool:
    """Whether all steps ran under the profiler, which slows them."""
    return run["step_ms"]["profiled"] >= len(run["step_ms"]["all"])


def unusable(path: Path, run: RunRecord | TimedRun) -> list[str]:
    """Why this run's step times cannot be used."""
    if run["status"] != "completed":
        return [f"{path.name} was not completed ({run['status']})"]
    if all_profiled(run):
        return [f"all steps of {path.name} ran under the profiler, which slows them"]
    return []


def incomparable(*sides: tuple[Path, RunRecord | TimedRun]) -> list[str]:
    """Why the step times of two runs, each with its file, cannot be compared."""
    reasons = [reason for path, run in sides for reason in unusable(path, run)]
    return reasons + differences(*(conditions(run) for _, run in sides))


def training_inputs(run: AnyRun) -> dict[str, Any]:
    """The inputs that a loss curve depends on besides the code, if the conditions are equal."""
    training = run["training"]
    return {
        "data": run["data"]["name"],
        "data sha256": run["data"]["sha256"][:12],
        "seed": training["seed"],
        "learning rate": training["learning_rate"],
        "first step": training.get("first_step", 1),
        "learning rate schedule": training.get("lr_schedule", "constant"),
    }


def differences(ours: Mapping[str, object], theirs: Mapping[str, object]) -> list[str]:
    """Conditions or inputs that differ between two runs, each with both values."""
    return [
        f"{name} ({value} and {theirs.get(name)})"
        for name, value in ours.items()
        if value != theirs.get(name)
    ]


def require_equal(
    paths: tuple[Path, Path],
    conditions: tuple[Mapping[str, object], Mapping[str, object]],
    but: str,
) -> None:
    """Raises UsageError, with both values, if two runs differ in a condition; the message says that
    they may in `but`.
    """
    differing = ", ".join(differences(*conditions))
    if differing:
        raise UsageError(
            f"{paths[0]} and {paths[1]} differ in more than {but}: {differing}; "
            "give runs that are otherwise equal"
        )


def loss_difference(before: TimedRun, after: TimedRun) -> tuple[float, int]:
    """The largest difference in nats over the steps that both have, and how many these are."""
    pairs = zip(before["loss"]["all"], after["loss"]["all"], strict=False)
    differences = [abs(ours - theirs) for ours, theirs in pairs]
    return max(differences), len(differences)
