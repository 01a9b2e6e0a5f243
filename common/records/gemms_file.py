"""The file of a step's matrix products, gemm_analysis.json (schema tiny-llama-gemms/1): its fields."""

from typing import Annotated, Literal, get_args

from common.files import schema_of
from common.records.fields import Ceilings, Header, Model, Precision, Summary

from pydantic import Field, PositiveInt
from typing_extensions import NotRequired, TypedDict

Layout = Literal["NN", "NT", "TN"]
Phase = Literal["forward", "input_grad", "weight_grad"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class Product(TypedDict):
    """`per_step` products C [batch, m, n] = A [batch, m, k] @ B [batch, k, n] of a training step."""

    gemm: str
    phase: Phase
    batch: PositiveInt
    m: PositiveInt
    n: PositiveInt
    k: PositiveInt
    layout: Layout
    per_step: PositiveInt


class Timing(Product):
    """A product at a point of the grid."""

    batch_size: PositiveInt
    sequence_length: PositiveInt
    ms: Summary  # of one product; a sample is the mean of products back to back
    calls: PositiveInt  # in all samples


class Measurement(Header):
    schema: Literal["tiny-llama-gemms/1"]
    precision: Precision
    element_bytes: PositiveInt
    model: Model
    batch_sizes: list[PositiveInt]
    sequence_lengths: list[PositiveInt]
    ceilings: Ceilings  # the best of all rounds
    gemms: Annotated[list[Timing], Field(min_length=1)]
    fused: Annotated[list[Timing], Field(min_length=1)]
    notes: NotRequired[list[str]]  # how far it came, if it ended early; only points with all products are in the lists


SCHEMA = schema_of(Measurement)
