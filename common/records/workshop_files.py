"""The file of guesses that attendees make, predictions.json (schema tiny-llama-predictions/1)."""

from typing import Annotated, Literal

from common.files import PositiveAmount

from pydantic import Field
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
