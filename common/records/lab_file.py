"""The file of the profiling lab, profiling_lab.json (schema tiny-llama-profiling-lab/1): its fields."""

from typing import Annotated, Literal

from common.files import Number, PositiveAmount, schema_of
from common.records.fields import Ceilings, Header, Summary

from pydantic import Field, PositiveInt
from typing_extensions import NotRequired, TypedDict


class Component(TypedDict):
    name: str
    time_ms: PositiveAmount
    memory_mb: Number
    flops: PositiveAmount
    bytes_moved: PositiveAmount
    bound: str


Components = dict[Literal["pytorch", "jax"], list[Component] | None]


class Times(TypedDict):
    """The ms of each way at one sequence length; None where it cannot run."""

    seq_len: PositiveInt
    ms: dict[str, PositiveAmount | None]


class Added(TypedDict):
    """The MiB that each way adds at one sequence length."""

    seq_len: PositiveInt
    baseline: NotRequired[Number | None]
    chunked: NotRequired[Number | None]
    sdpa: NotRequired[Number | None]


class Way(TypedDict):
    bottleneck: str
    way: str
    ms: PositiveAmount


class Fix(TypedDict):
    fix: str
    step_ms: Summary
    peak_mib: PositiveAmount
    kind: str
    loss: Number


class Layer(TypedDict):
    ms: PositiveAmount
    profiled_ms: PositiveAmount
    on_gpu: bool
    spans: dict[str, dict[str, Number]]  # ms by span and phase


class Sizes(TypedDict):
    batch_size: PositiveInt
    seq_len: PositiveInt
    d_model: PositiveInt
    num_heads: PositiveInt
    preset: str


PartName = Literal["components", "optimizations", "frameworks", "memory", "bottlenecks", "fixes", "layer"]


class Lab(Header):
    """A part that was not measured is None."""

    schema: Literal["tiny-llama-profiling-lab/1"]
    jax: str | None  # its version
    precision: str
    sizes: Sizes
    ceilings: Ceilings
    components: Components | None
    optimizations: list[Times] | None
    frameworks: list[Times] | None
    memory: list[Added] | None
    bottlenecks: list[Way] | None
    fixes: Annotated[list[Fix], Field(min_length=1)] | None
    layer: Layer | None


SCHEMA = schema_of(Lab)
