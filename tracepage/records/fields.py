"""Fields that the files of several measurements share.

A model of a file is a TypedDict: pydantic checks a file against it, and its content stays plain
dictionaries and lists, because a file can hold thousands of rows.
"""

from typing import Annotated, Literal

from tracepage.files import Amount, PositiveAmount

from pydantic import AfterValidator, PositiveInt
from typing_extensions import NotRequired, TypedDict


class ModelSizes(TypedDict):
    """Sizes of a model, all of them: the default of today need not be that of the run."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    intermediate_size: PositiveInt
    max_sequence_length: NotRequired[PositiveInt]
    rope_theta: PositiveAmount
    rms_norm_eps: PositiveAmount
    initializer_range: NotRequired[PositiveAmount | None]


def _heads_divide(model: ModelSizes) -> ModelSizes:
    hidden = model["hidden_size"]
    heads = model["num_attention_heads"]
    kv_heads = model["num_key_value_heads"]
    if hidden % heads:
        raise ValueError(f"hidden_size {hidden} is not divisible by num_attention_heads {heads}")
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads {heads} is not divisible by num_key_value_heads {kv_heads}"
        )
    return model


Model = Annotated[ModelSizes, AfterValidator(_heads_divide)]


class Summary(TypedDict):
    """Median and spread of some times in ms, as `common.timing.summarize` gives them."""

    median: PositiveAmount
    p20: PositiveAmount
    p80: PositiveAmount
    count: PositiveInt


class Compute(TypedDict):
    compute: Literal["fp32", "fp16", "bf16"]


class NumberFormat(Compute):
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
    load_seconds: NotRequired[Amount]  # of the same work before; older records: milliseconds


class HostCost(TypedDict):
    """Microseconds that the host spends on a call of PyTorch, by its median."""

    mm: PositiveAmount  # a matrix product
    launch: PositiveAmount  # an elementwise operation


class PeakMemory(TypedDict):
    peak_mib: Amount
    kind: str  # What it counts, such as "GPU allocator" or "process RSS".
    reserved_mib: NotRequired[Amount]  # on a GPU: what the pools of the allocator held


class Timed(PeakMemory):
    """One process of a cell of a study."""

    step_ms: Summary
    # Why the version's kernels could not run, so that PyTorch's operations were timed.
    no_kernels: NotRequired[str]
    joules: NotRequired[PositiveAmount]  # of a step
    # Medians over the timed steps; None where NVML does not tell them.
    clock_mhz: NotRequired[PositiveAmount | None]
    watts: NotRequired[PositiveAmount | None]
    celsius: NotRequired[PositiveAmount | None]
    host_us: NotRequired[HostCost | None]  # None on a CPU


class Environment(TypedDict):
    """Versions that a timing depends on; python, platform, cuda and hip are only kept."""

    torch: str


class Header(TypedDict):
    """The keys that `common.training.record.header` writes at the beginning of every measurement's
    file.
    """

    command: str
    date: str
    device: Device
    environment: Environment
    # Older records lack it: all runs were deterministic, but for Version 4's attention.
    deterministic: NotRequired[bool]


class StudyHeader(TypedDict):
    """The same for a study of many processes, which describe the device; None if none came far
    enough to do so.
    """

    command: str
    date: str
    device: Device | None
    environment: Environment | None
    deterministic: NotRequired[bool]  # of models whose name does not say it; older files lack it


class Attempted(TypedDict):
    """The keys of a study's cell that `studies.job_runner` writes."""

    status: Literal["ok", "out of memory", "timed out", "failed", "not run"]
    reason: str | None  # one line
