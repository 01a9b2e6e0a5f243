"""The files that attendees make: predictions.json (schema tiny-llama-predictions/1) and race_NAME.json (tiny-llama-race/1)."""

from typing import Annotated, Literal

from common.files import Amount, PositiveAmount
from common.records.fields import Compute, Header, Model

from pydantic import Field, PositiveInt
from typing_extensions import TypedDict


class Prediction(TypedDict):
    """A guess of what a change gains, made before the change."""

    profile: str  # path, as it was given
    profiled: str  # date of its run, by which --check finds the guess
    change: Annotated[str, Field(min_length=1)]  # of `optimization_targets.CHANGES`
    expected: PositiveAmount  # times as fast
    bound: PositiveAmount | None  # None where no ceiling is known


class Predictions(TypedDict):
    schema: Literal["tiny-llama-predictions/1"]
    predictions: Annotated[list[Prediction], Field(min_length=1)]


class Result(TypedDict):
    """By the evaluator's clock, and by Version 1's code."""

    steps: PositiveInt
    ms_per_step: PositiveAmount
    baseline_ms_per_step: PositiveAmount  # of Version 1 in this race
    held_out_loss: Amount  # nats
    checked_steps: PositiveInt  # which Version 1 has repeated
    errors: dict[str, Amount]  # the largest: loss and curve in nats, gradient and update of a tensor in relation to itself


class Race(Header):
    schema: Literal["tiny-llama-race/1"]
    name: str
    script_sha256: str
    minutes: Amount
    model: Model
    precision: Compute
    preset: str
    batch_size: PositiveInt
    sequence_length: PositiveInt
    data: str
    data_sha256: str
    refused: str | None  # why there is no result
    result: Result | None
