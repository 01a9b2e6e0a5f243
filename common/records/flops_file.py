"""The files of FLOP counts, flops_profile.json, and of a step's matrix products, gemm_analysis.json: their fields.

In flops_profile.json (schema tiny-llama-flops/1):

counts    rows of counter, forward, backward, step (FLOPs of one training step); the first row is the reference
parts     forward FLOPs by part of the model: causal (needed) and full (executed by code that masks)
run       the record of the run, schema "tiny-llama-run/1"
work      a mean step under the profiler: FLOPs, bytes and seconds by span and by operator (`roofline.Point`), null where
          not known; older files have none, and files of a run that was stopped before its profiled steps
"""

from typing import Annotated, Literal, get_args

from common.files import Amount, PositiveAmount, schema_of
from common.records.fields import Ceilings, Header, Model, Precision, Summary
from common.records.run_record import TimedRun

from pydantic import Field, PositiveInt
from typing_extensions import NotRequired, TypedDict

Layout = Literal["NN", "NT", "TN"]
Phase = Literal["forward", "input_grad", "weight_grad"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class Count(TypedDict):
    counter: str
    forward: PositiveInt
    backward: PositiveInt
    step: PositiveInt


class Parts(TypedDict):
    projections: PositiveInt
    attention: PositiveInt
    mlp: PositiveInt
    head: PositiveInt
    total: PositiveInt


class CausalAndFull(TypedDict):
    causal: Parts
    full: Parts


class Work(TypedDict):
    name: str
    flops: Amount | None
    bytes: Amount | None
    seconds: PositiveAmount
    group: str


class FlopCounts(TypedDict):
    schema: Literal["tiny-llama-flops/1"]
    counts: Annotated[list[Count], Field(min_length=1)]
    parts: CausalAndFull
    run: TimedRun
    work: NotRequired[list[Work]]


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
    """gemm_analysis.json."""

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


SCHEMA = schema_of(FlopCounts)
GEMMS = schema_of(Measurement)
