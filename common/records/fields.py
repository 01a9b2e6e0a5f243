"""Fields that the files of several measurements share.

A model of a file is a TypedDict: pydantic checks a file against it, and its content stays plain dictionaries and lists, because a
file can hold thousands of rows.
"""

from typing import Annotated, Any, Literal

from common.config import ModelConfig
from common.files import Amount, PositiveAmount

from pydantic import AfterValidator, PositiveInt
from typing_extensions import NotRequired, TypedDict


def _checked(model: dict[str, Any]) -> dict[str, Any]:
    """A model of a file names its sizes: the default of today need not be that of the run."""
    for name, field in ModelConfig.model_fields.items():
        if model.get(name) is None and field.default is not None and name != "max_sequence_length":
            raise ValueError(f"{name} is missing")
    ModelConfig(**model)
    return model


Model = Annotated[dict[str, Any], AfterValidator(_checked)]


class Summary(TypedDict):
    """Median and spread of some times in ms, as `common.timing.summarize` gives them."""

    median: PositiveAmount
    p20: PositiveAmount
    p80: PositiveAmount
    count: PositiveInt


class Compute(TypedDict):
    compute: Literal["fp32", "fp16", "bf16"]


class Precision(Compute):
    tf32: bool


class Device(TypedDict):
    kind: Literal["cpu", "cuda", "rocm"]
    name: str
    memory_mib: PositiveAmount
    threads: NotRequired[PositiveInt]  # of a CPU
    multiprocessors: NotRequired[PositiveInt]  # of a GPU


class Ceilings(TypedDict):
    """The highest rates of a device, as `common.training.ceilings.measure` measures them."""

    flops_per_second: PositiveAmount
    bytes_per_second: PositiveAmount
    operation_seconds: Amount
    precision: str  # of the matrix product
    work: NotRequired[str]  # what reached these FLOP/s, if no matrix product


class PeakMemory(TypedDict):
    peak_mib: Amount
    kind: str  # what it counts: "GPU allocator" or "process RSS"
    reserved_mib: NotRequired[Amount]  # on a GPU: what the pools of the allocator held


class Timed(PeakMemory):
    """One process of a cell of a study."""

    step_ms: Summary
    no_kernels: NotRequired[str]  # why the version's kernels could not run, so that PyTorch's operations were timed
    joules: NotRequired[PositiveAmount]  # of a step


class Header(TypedDict):
    """The keys that `common.training.record.header` writes at the beginning of every measurement's file."""

    command: str
    date: str
    device: Device
    environment: dict[str, str | None]  # versions of python, platform, torch, cuda, hip


class StudyHeader(TypedDict):
    """The same for a study of many processes, which describe the device; None if none came far enough to do so."""

    command: str
    date: str
    device: Device | None
    environment: dict[str, str | None] | None


class Attempted(TypedDict):
    """The keys of a study's cell that `studies.job_runner` writes."""

    status: Literal["ok", "out of memory", "timed out", "failed", "not run"]
    reason: str | None  # one line
