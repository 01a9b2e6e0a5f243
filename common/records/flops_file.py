"""The file of FLOP counts, flops_profile.json (schema tiny-llama-flops/1): its fields.

counts    rows of counter, forward, backward, step (FLOPs of one training step); the first row is the reference
parts     forward FLOPs by part of the model: causal (needed) and full (executed by code that masks)
run       the record of the run, schema "tiny-llama-run/1"
"""

from typing import Annotated, Literal

from common.files import schema_of
from common.records.run_record import TimedRun

from pydantic import Field, PositiveInt
from typing_extensions import TypedDict


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


class FlopCounts(TypedDict):
    schema: Literal["tiny-llama-flops/1"]
    counts: Annotated[list[Count], Field(min_length=1)]
    parts: CausalAndFull
    run: TimedRun


SCHEMA = schema_of(FlopCounts)
