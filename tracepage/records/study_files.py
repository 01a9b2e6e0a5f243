"""The files of the studies: the fields of each schema, checked when a file is read.

benchmark.json, fusion_ablation.json, a benchmark of kernels, flops_profile.json and
predictions.json. Unknown keys are allowed, and kept. Times are in ms.
"""

import itertools
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from tracepage import files
from tracepage.errors import UsageError
from tracepage.files import Amount, Number, PositiveAmount
from tracepage.records.fields import (
    Attempted,
    Ceilings,
    Compute,
    Header,
    Model,
    NumberFormat,
    StudyHeader,
    Summary,
    Timed,
)
from tracepage.records.run_record import TimedRun

from pydantic import Field, PositiveInt
from typing_extensions import NotRequired, TypedDict

Metric = Literal["throughput", "memory", "accuracy", "energy"]
METRICS: tuple[Metric, ...] = get_args(Metric)
PositiveInts = Annotated[list[PositiveInt], Field(min_length=1)]
Names = Annotated[list[str], Field(min_length=1)]


class BenchmarkCell(Attempted):
    model: str
    batch_size: PositiveInt
    sequence_length: PositiveInt
    runs: list[Timed]


class Accuracy(Attempted):
    """At the smallest shape. The other keys are there if the status is "ok"; an error can be
    infinite.
    """

    model: str
    batch_size: PositiveInt
    sequence_length: PositiveInt
    logits_error: NotRequired[float]
    gradient_error: NotRequired[float]  # the largest of all gradients
    gradient: NotRequired[str]  # the parameter that it belongs to
    # By seed: of all gradients as one vector, |a - b| / |a|; not in older files.
    gradients_together: NotRequired[list[float]]


class Benchmark(StudyHeader):
    schema: Literal["tiny-llama-benchmark/1"]
    status: Literal["completed", "interrupted"]
    packages: dict[str, str]  # versions of the packages that the external baselines need
    model: Model
    precision: Compute
    models: Names
    metrics: Annotated[list[Metric], Field(min_length=1)]
    batch_sizes: PositiveInts
    sequence_lengths: PositiveInts
    steps: PositiveInt  # timed in each process, at least
    load_seconds: NotRequired[Amount]  # of steps before the timed ones
    timed_seconds: NotRequired[Amount]  # of timed steps, at least
    repeats: PositiveInt
    cells: list[BenchmarkCell]  # one for each model and shape, the smallest shape first
    accuracy: list[Accuracy]


class Fusions(TypedDict):
    qkv_fusion: bool
    flash_attention: bool
    swiglu_fusion: bool
    torch_compile: bool
    fused_adamw: NotRequired[bool]  # Older files lack it.


class Combination(TypedDict):
    fusions: Fusions
    step_ms: Summary
    round_ms: Annotated[list[PositiveAmount], Field(min_length=1)]  # median of each round
    peak_mib: PositiveAmount | None
    # None if the study was ended before the launches were counted.
    launches_per_step: PositiveAmount | None
    loss: Number | None  # nats; None as the launches
    steps: PositiveInt  # trained, until that loss where there is one


class Shape(TypedDict):
    batch_size: PositiveInt
    sequence_length: PositiveInt
    seed: int


class Ablation(Header):
    """The first combination is the one without fusions."""

    schema: Literal["tiny-llama-ablation/1"]
    version: str
    model: Model
    settings: NotRequired[dict[str, Any]]  # {"capture_step": true} if the steps were captured
    training: Shape
    precision: Compute
    rounds: PositiveInt
    steps_per_round: PositiveInt
    left_out: str | None  # why there are no combinations with torch_compile
    # By launches_per_step: kernels on a GPU, operators on a CPU.
    counted: Literal["kernels", "operators"]
    notes: list[str]  # what to know about that count, and whether the study was stopped early
    combinations: Annotated[list[Combination], Field(min_length=2)]


def read_benchmark(path: Path) -> Benchmark:
    """UsageError: the file is missing, damaged, or a cell that is ok holds no run, or no device is
    known, or it has cells, but not one for each model and shape.
    """
    study = files.read(path, Benchmark)
    names = study["models"], study["batch_sizes"], study["sequence_lengths"]
    cells = [(row["model"], row["batch_size"], row["sequence_length"]) for row in study["cells"]]
    if cells and sorted(cells) != sorted(itertools.product(*names)):
        raise UsageError(f"{path}: cells: there is not one for each model and shape")
    for number, cell in enumerate(study["cells"]):
        known = cell["runs"] and study["device"] and study["environment"]
        if cell["status"] == "ok" and not known:
            raise UsageError(f"{path}: cells.{number}: nothing was measured, but the status is ok")
    return study


class TimedKernel(TypedDict):
    """One contender at one operation and shape."""

    operation: str
    batch_size: PositiveInt
    sequence_length: PositiveInt
    hidden_size: PositiveInt
    unit: Literal["GB/s", "TFLOP/s"]
    amount: PositiveInt  # bytes or FLOPs, by `unit`
    contender: Literal["kernel", "eager", "compiled", "liger", "cudnn", "flash"]
    host_ms: Summary
    gpu_ms: Summary | None
    peak_mib: Amount | None


class KernelBenchmark(Header):
    """Each operation and shape has a row of kernel and one of eager."""

    schema: Literal["tiny-llama-kernel-benchmark/1"]
    precision: NumberFormat
    ceilings: Ceilings
    rows: list[TimedKernel]


def kernel_shape(row: TimedKernel) -> tuple[str, int, int, int]:
    """The operation and its B, S and D."""
    return row["operation"], row["batch_size"], row["sequence_length"], row["hidden_size"]


class Decoding(Header):
    """Texts that one process wrote (decoding/generate.py): one pass over the prompts, then a step
    for a token of each.
    """

    schema: Literal["tiny-llama-decoding/1"]
    preset: str
    model: Model
    precision: Compute
    operations: str  # the version whose they are, or "fused"
    mode: Literal["eager", "captured"]
    batch_size: NotRequired[PositiveInt]  # Older files lack it: they have 1 text.
    prompt_tokens: PositiveInt
    tokens: PositiveInt  # of a text
    prefill_ms: Summary
    token_ms: Summary  # of a step
    weight_bytes: PositiveInt
    cache_bytes: PositiveInt  # of a mean step
    token_intensity: PositiveAmount  # FLOPs by formula / bytes
    prefill_flops: PositiveInt
    prefill_intensity: PositiveAmount  # its bytes: the weights once, and the cache that it writes
    bytes_per_second: PositiveAmount  # of a step
    copy_percent: PositiveAmount | None  # that rate in percent of a measured copy
    ceilings: Ceilings | None


class CountedWork(TypedDict):
    """A span or an operator in a mean step under the profiler (`roofline.Point`); None where it is
    not known.
    """

    name: str
    flops: Amount | None
    bytes: Amount | None
    seconds: PositiveAmount
    group: str


class StepCount(TypedDict):
    """FLOPs of a step by one counter."""

    counter: str
    forward: Amount
    backward: Amount
    step: Amount


class Parts(TypedDict):
    """Forward FLOPs by part of the model and in total: needed, and executed by code that masks."""

    causal: dict[str, PositiveInt]
    full: dict[str, PositiveInt]


class FlopCounts(TypedDict):
    """flops_profile.json."""

    schema: Literal["tiny-llama-flops/1"]
    counts: Annotated[list[StepCount], Field(min_length=1)]  # The first is the reference.
    parts: Parts
    run: TimedRun
    work: NotRequired[list[CountedWork]]


class Prediction(TypedDict):
    """A guess of what a change gains, made before the change."""

    profile: str  # path, as it was given
    profiled: str  # date of its run, by which --check finds the guess
    change: Annotated[str, Field(min_length=1)]  # of `optimization_targets.CHANGES`
    expected: PositiveAmount  # times as fast
    bound: PositiveAmount | None  # None where no ceiling is known


class MemorySnapshot(Header):
    """The allocations of a training step (`common.memory_snapshot`)."""

    schema: Literal["tiny-llama-memory-snapshot/1"]
    peak_bytes: PositiveInt
    before_bytes: int  # allocated before the history began
    places: list[str]  # lines of ours that asked for memory
    # The block, its bytes, or less than 0 where it is released, and the number of its place.
    events: list[Annotated[list[int], Field(min_length=3, max_length=3)]]


class Predictions(TypedDict):
    schema: Literal["tiny-llama-predictions/1"]
    predictions: Annotated[list[Prediction], Field(min_length=1)]
