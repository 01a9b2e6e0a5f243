"""The record of a training run (schema tiny-llama-run/1): its model, its reader, and when two runs may be compared.

`common.training.record` writes it.
"""

import functools
from pathlib import Path
from typing import Annotated, Any, Literal

from common import files
from common.analysis.formulas import peaks
from common.analysis.output import tables
from common.config import ModelConfig
from common.errors import UsageError
from common.files import Amount, Number, PositiveAmount

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt
from typing_extensions import NotRequired, TypedDict

SCHEMA = "tiny-llama-run/1"


class Summary(TypedDict):
    """Median and spread of some times in ms, as `common.timing.summarize` gives them."""

    median: PositiveAmount
    p20: PositiveAmount
    p80: PositiveAmount
    count: PositiveInt


class Steps(TypedDict):
    all: list[Amount]  # ms of each step
    profiled: NonNegativeInt  # how many of them, the last ones, ran under the profiler


class TimedSteps(Steps, Summary):
    """The summary is of the steps without the profiler, or of all if there are no others."""


class Loss(TypedDict):
    uniform: Amount  # nats, of a guess among all tokens
    all: list[Number]  # nats, of each step


class TimedLoss(Loss):
    all: Annotated[list[Number], Field(min_length=1)]


class Training(TypedDict):
    preset: str
    batch_size: PositiveInt
    sequence_length: PositiveInt
    num_steps: PositiveInt
    warmup_steps: NonNegativeInt
    learning_rate: Amount
    seed: int
    first_step: NotRequired[PositiveInt]  # above 1 in a run that went on from a checkpoint
    world_size: NotRequired[PositiveInt]  # processes, each with `batch_size` sequences; 1 in older records
    parallel: NotRequired[str | None]  # how several processes trained together


class Ranks(TypedDict):
    """The values of every process of a job, by rank."""

    forward_ms: list[Amount]  # in the spans of a forward pass, without waiting for others
    step_ms: list[Amount]  # median
    peak_mib: list[Amount]


class Compute(TypedDict):
    compute: Literal["fp32", "fp16", "bf16"]
    tf32: NotRequired[bool]


class Precision(Compute):
    tf32: bool


class Data(TypedDict):
    name: str
    tokens: NonNegativeInt
    sha256: str
    entropy_floor: Amount | None  # nats, where it is known


class Device(TypedDict):
    kind: Literal["cpu", "cuda", "rocm"]
    name: str
    memory_mib: PositiveAmount
    threads: NotRequired[PositiveInt]  # of a CPU
    multiprocessors: NotRequired[PositiveInt]  # of a GPU


class Environment(TypedDict):
    python: str
    platform: str
    torch: str
    cuda: str | None
    hip: str | None


class Flops(TypedDict):
    forward: PositiveInt
    backward: PositiveInt
    total: PositiveInt


class Memory(TypedDict):
    peak_mib: Amount
    kind: str


class PeakMemory(Memory):
    """The peak of a run that finished at least one step."""

    peak_mib: PositiveAmount


class Ceilings(TypedDict):
    """The highest rates of the device, as `common.training.ceilings.measure` measures them."""

    flops_per_second: PositiveAmount
    bytes_per_second: PositiveAmount
    operation_seconds: Amount
    precision: str


class Utilization(TypedDict):
    """As it was written; older records may hold a share of a measured GEMM. Reports take `mfu` and `of_measured_gemm`."""

    utilization: Amount
    peak_flops_per_second: PositiveAmount
    peak_source: str


def _has_all_sizes(model: Any, but: str = "") -> Any:
    for name, field in ModelConfig.model_fields.items():
        if isinstance(model, dict) and model.get(name) is None and field.default is not None and name != but:
            raise ValueError(f"{name} is missing")
    return model


Model = Annotated[ModelConfig, BeforeValidator(_has_all_sizes)]
ModelOfAnyLength = Annotated[ModelConfig, BeforeValidator(functools.partial(_has_all_sizes, but="max_sequence_length"))]


class Header(TypedDict):
    """The keys that `common.training.record.header` writes at the beginning of every measurement's file."""

    command: str
    date: str
    device: Device
    environment: Environment


class RunRecord(Header):
    """A run of any length, even one that failed in its first step."""

    schema: Literal[SCHEMA]
    status: str  # completed, interrupted, or "failed: ..."
    version: str
    model: Model
    training: Training
    settings: NotRequired[dict[str, Any]]  # the switches of the version
    precision: Precision
    data: Data
    parameters: PositiveInt
    flops_per_step: Flops
    memory: Memory
    ceilings: Ceilings | None
    loss: Loss
    step_ms: Steps
    phases_ms: NotRequired[dict[str, Summary]]
    ranks: NotRequired[Ranks]


class TimedRun(RunRecord):
    """A run that finished at least one step."""

    memory: PeakMemory
    loss: TimedLoss
    step_ms: TimedSteps
    tokens_per_second: PositiveAmount
    flops_per_second: PositiveAmount
    mfu: Utilization | None


def read(path: Path) -> dict[str, Any]:
    """The record of a run; with the keys of `TimedRun` if at least one step is in it.

    Raises:
        UsageError: the file is missing, damaged, or not a record of a run.
    """
    return check(path, files.read(path, RunRecord))


def check(path: Path, run: dict[str, Any]) -> dict[str, Any]:
    """A record in `path`, unchanged, if it fits RunRecord and, with a finished step, TimedRun.

    Raises:
        UsageError: it does not.
    """
    return files.check(path, run, TimedRun if run["step_ms"]["all"] else RunRecord)


def peak_flops(run: dict[str, Any]) -> float | None:
    """FLOP/s of the run's device in its number format by the data sheet; None if that is not listed."""
    return peaks.flops_per_second(run["device"]["name"], run["precision"]["compute"], run["precision"]["tf32"])


def mfu(run: dict[str, Any]) -> float | None:
    """Model FLOPs utilisation (Chowdhery et al. 2022, arXiv:2204.02311): FLOP/s in percent of `peak_flops`, or None."""
    peak = peak_flops(run)
    return 100 * run["flops_per_second"] / peak if peak else None


def of_measured_gemm(run: dict[str, Any]) -> float | None:
    """FLOP/s in percent of the matrix product that the run itself measured; None if it measured none."""
    return 100 * run["flops_per_second"] / run["ceilings"]["flops_per_second"] if run["ceilings"] else None


FEW_STEPS = 10  # fewer timed steps make a median doubtful
NOISY = 30  # %: so does a wider spread from p20 to p80, as a share of the median


def identity(run: dict[str, Any]) -> dict[str, Any]:
    """The conditions that two runs must share for their step times to be compared, by name."""
    device = {key: run["device"].get(key) for key in ("kind", "name", "threads", "multiprocessors")}
    named = {
        "version": run["version"],
        "sequence length": run["training"]["sequence_length"],
        "torch": run["environment"]["torch"],
        "processes": run["training"].get("world_size", 1),
        "parallel": run["training"].get("parallel"),
    }
    groups = {"device": device, "model": run["model"], "precision": run["precision"]}
    return named | {f"{group} {key}": value for group, values in groups.items() for key, value in values.items()}


def unusable(path: Path, run: dict[str, Any]) -> list[str]:
    """Why this run's step times cannot be used."""
    if run["status"] != "completed":
        return [f"{path.name} was not completed ({run['status']})"]
    if run["step_ms"]["profiled"] >= len(run["step_ms"]["all"]):
        return [f"all steps of {path.name} ran under the profiler, which slows them"]
    return []


def conditions(run: dict[str, Any]) -> dict[str, Any]:
    """The conditions that a step's time depends on, besides the code."""
    return {"batch size": run["training"]["batch_size"]} | {k: v for k, v in identity(run).items() if k != "version"}


def training_inputs(run: dict[str, Any]) -> dict[str, Any]:
    """The inputs that a loss curve depends on besides the code, if the conditions above are equal."""
    training = {key.replace("_", " "): run["training"][key] for key in ("seed", "learning_rate")}
    training["first step"] = run["training"].get("first_step", 1)
    return {"data": run["data"]["name"], "data sha256": run["data"]["sha256"][:12]} | training


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Conditions or inputs that differ between two runs, each with both values."""
    return [f"{name} ({ours[name]} and {theirs.get(name)})" for name in ours if ours[name] != theirs.get(name)]


def require_equal(paths: tuple[Path, Path], conditions: tuple[dict[str, Any], dict[str, Any]], but: str) -> None:
    """Refuses two runs whose conditions are not equal.

    Args:
        but: what may differ between the two, for the message.

    Raises:
        UsageError: names every condition that differs, with both values.
    """
    if differing := differences(*conditions):
        raise UsageError(
            f"{paths[0]} and {paths[1]} differ in more than {but}: {', '.join(differing)}; give runs that are otherwise equal"
        )


def loss_difference(before: dict[str, Any], after: dict[str, Any]) -> tuple[float, int]:
    """The largest difference in nats over the steps that both have, and how many these are."""
    pairs = list(zip(before["loss"]["all"], after["loss"]["all"], strict=False))
    return max(abs(ours - theirs) for ours, theirs in pairs), len(pairs)


def describe(run: dict[str, Any], *varied: str) -> str:
    """Device, number format, PyTorch and shape of a run, or of a study that holds the same keys, in one line.

    Args:
        varied: the keys of `training` that differ between the runs that the line stands for; they are left out.
    """
    device, precision, training = run["device"], run["precision"], run["training"]
    threads = f"{device['threads']} threads" if device.get("threads") else ""
    compute = precision["compute"] + " (TF32 allowed)" * precision.get("tf32", False)
    sizes = [f"{name.replace('_', ' ')} {training[name]}" for name in ("batch_size", "sequence_length") if name not in varied]
    parts = [device["name"], threads, compute, f"torch {run['environment']['torch']}", *sizes]
    return f"{', '.join(filter(None, parts))}; {tables.letters(run['model'])}"


def noise(steps: dict[str, Any]) -> list[str]:
    """A note that names the step times whose spread from p20 to p80 is too wide; nothing if none is.

    Args:
        steps: summaries (median, p20, p80) under the names by which the table shows them.
    """
    spreads = {name: 100 * (step["p80"] - step["p20"]) / step["median"] for name, step in steps.items()}
    noisy = [f"{name} ({spread:.0f} %)" for name, spread in spreads.items() if round(spread, 6) > NOISY]
    return [f"Noisy: p20 to p80 spans more than {NOISY} % of the median for {', '.join(noisy)}."] if noisy else []


def doubts(runs: dict[str, Any]) -> list[str]:
    """Notes that name runs whose step times are not to be relied on: profiled, few or noisy steps.

    Args:
        runs: records with a finished step, under the names by which the table shows them.
    """
    slowed = [name for name, run in runs.items() if run["step_ms"]["profiled"] >= len(run["step_ms"]["all"])]
    notes = [f"All steps of {', '.join(slowed)} ran under the profiler, which slows them: raise --num-steps."] * bool(slowed)
    few = min(run["step_ms"]["count"] for run in runs.values())
    if few < FEW_STEPS:
        notes.append(f"A median is of only {few} timed steps: raise --num-steps.")
    return notes + noise({name: run["step_ms"] for name, run in runs.items()})


def origin(run: dict[str, Any]) -> str:
    """The command of a run, its time, and how the switches of the version's own stood, where the record has them."""
    parts = [f"`{run['command']}` on {run['date']}"]
    for name, value in run.get("settings", {}).items():
        shown = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
        parts.append(f"{name.replace('_', ' ')} {shown}")
    return ", ".join(parts)
