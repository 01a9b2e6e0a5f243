"""The file of an ablation, fusion_ablation.json (schema tiny-llama-ablation/1): its fields."""

from typing import Annotated, Any, Literal

from common.files import Number, PositiveAmount, schema_of
from common.records.fields import Compute, Header, Model, Summary

from pydantic import Field, PositiveInt
from typing_extensions import NotRequired, TypedDict


class Fusions(TypedDict):
    qkv_fusion: bool
    flash_attention: bool
    swiglu_fusion: bool
    torch_compile: bool


class Combination(TypedDict):
    fusions: Fusions
    flags: list[str]  # the version's flags for it
    step_ms: Summary
    round_ms: Annotated[list[PositiveAmount], Field(min_length=1)]  # median of each round
    peak_mib: PositiveAmount | None
    launches_per_step: PositiveAmount | None  # None if the study was ended before the launches were counted
    loss: Number | None  # nats; None as the launches
    steps: PositiveInt  # trained, until that loss where there is one


class Training(TypedDict):
    batch_size: PositiveInt
    sequence_length: PositiveInt
    seed: int


class Ablation(Header):
    """The first combination is the one without fusions."""

    schema: Literal["tiny-llama-ablation/1"]
    version: str
    model: Model
    settings: NotRequired[dict[str, Any]]  # {"capture_step": true} if the steps were captured
    training: Training
    precision: Compute
    rounds: PositiveInt
    steps_per_round: PositiveInt
    left_out: str | None  # why there are no combinations with torch_compile
    counted: Literal["kernels", "operators"]  # by launches_per_step: kernels on a GPU, operators on a CPU
    notes: list[str]  # what to know about that count, and whether the study was stopped early
    combinations: Annotated[list[Combination], Field(min_length=2)]


SCHEMA = schema_of(Ablation)
