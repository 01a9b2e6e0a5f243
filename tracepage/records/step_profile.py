"""The profile of a few training steps (schema tiny-llama-profile/1): its fields and its reader.

`common.training.profiler` writes it. Times are in us and, like calls and bytes, added up over the
profiled steps.
"""

from pathlib import Path
from typing import Annotated, Literal

from tracepage import files
from tracepage.errors import UsageError
from tracepage.files import Amount, Number, PositiveAmount
from tracepage.records.run_record import AnyRun, RunRecord, TimedRun

from pydantic import Field, GetPydanticSchema, Json, NonNegativeInt, PositiveInt
from typing_extensions import NotRequired, TypedDict

# Of a tensor, or of each tensor of a list.
Shape = list[int] | list[list[int]]
JsonShapes = Annotated[
    str, GetPydanticSchema(lambda _, handler: handler.generate_schema(Json[list[Shape]]))
]
JsonTypes = Annotated[
    str, GetPydanticSchema(lambda _, handler: handler.generate_schema(Json[list[str]]))
]


class Operator(TypedDict):
    """All calls of an operator with the same shapes in one span and phase."""

    name: str
    span: str
    phase: str
    input_shapes: JsonShapes  # of each argument
    input_types: JsonTypes
    calls: PositiveInt
    cpu_us: Amount
    self_cpu_us: Number  # Can be some ns below 0, by the resolution of the timestamps
    device_us: Amount
    self_device_us: Amount
    allocated_bytes: int  # Less what was released.


class Launch(TypedDict):
    """Of kernels; from the launching call to the start, by two clocks."""

    count: Amount
    mean_delay_us: Number


class Kernel(TypedDict):
    """All calls of a kernel, copy or fill of a GPU in one span and phase."""

    name: str
    span: str
    phase: str
    calls: PositiveInt
    device_us: Amount


class Sums(TypedDict):
    """The part of a profile that `tracepage.readers.chrome_trace` makes of a trace."""

    profiled_steps: NonNegativeInt
    step_us: list[PositiveAmount]  # Wall time of each step.
    operators: list[Operator]
    kernels: list[Kernel]  # None on a CPU.
    device_busy_us: Amount  # Time in which at least one kernel ran.
    launch: Launch
    memory_peak_bytes: NonNegativeInt | None  # With --profile-memory.


class Profile(Sums):
    schema: Literal["tiny-llama-profile/1"]
    run: TimedRun
    trace: Annotated[str, Field(pattern=r"^[\w.-]{1,60}$")]  # Beside the profile.
    attention_only: bool  # Whether only attention was kept.
    # With --profile-with-flops: by operator, as torch.profiler counts them.
    operator_flops: NotRequired[dict[str, Amount]]


class Profiled(TypedDict):
    """The part of a profile about its run, which may have ended before a step was profiled."""

    schema: Literal["tiny-llama-profile/1"]
    run: RunRecord
    attention_only: bool
    profiled_steps: NonNegativeInt


SCHEMA = files.schema_of(Profile)


def find(path: Path) -> Path:
    """The profile itself, or the newest one in a folder. UsageError: there is none."""
    if not path.exists():
        raise UsageError(
            f"{path} does not exist: give a profile_*.json or a folder that holds some"
        )
    profiles = sorted(path.glob("profile_*.json")) if path.is_dir() else [path]
    if not profiles:
        raise UsageError(
            f"{path} holds no profile_*.json: "
            f"make one with --enable-pytorch-profiler --profile-dir {path}"
        )
    return profiles[-1]


def read(path: Path) -> Profile:
    """A profile_*.json. UsageError: the file is missing, damaged, not a profile, or holds no
    finished step.
    """
    profile = files.read(path, Profile)
    if not (profile["profiled_steps"] and profile["step_us"] and profile["operators"]):
        raise UsageError(f"{path} holds no profiled step: its run was stopped early; profile again")
    return profile


def events(path: Path, run: AnyRun) -> Path:
    """The folder of TensorBoard's event files beside a profile; TensorBoard shows its name as that
    of the run.
    """
    training = run["training"]
    stamp = path.stem.removeprefix("profile_")
    shape = f"{training['batch_size']}x{training['sequence_length']}"
    return path.with_name(
        f"run_{run['version']}_{training['preset']}_{run['precision']['compute']}_{shape}_{stamp}"
    )


def span_milliseconds(profile: Sums) -> dict[str, dict[str, float]]:
    """Self time per step in ms, by span and within it by phase (forward, backward, optimizer,
    other); largest span first.
    """
    added: dict[str, dict[str, float]] = {}
    for operator in profile["operators"]:
        us = operator["self_device_us" if profile["kernels"] else "self_cpu_us"]
        phases = added.setdefault(operator["span"], {})
        phases.setdefault(operator["phase"], 0.0)
        phases[operator["phase"]] += us / profile["profiled_steps"] / 1e3
    return dict(sorted(added.items(), key=lambda item: -sum(item[1].values())))


def idle_percent(profile: Sums) -> float | None:
    """The share of the profiled steps' time in which no kernel ran; None on a CPU."""
    if not profile["kernels"]:
        return None
    return 100 * (1 - profile["device_busy_us"] / sum(profile["step_us"]))
