"""The files of two memory studies: batch_search.json (schema tiny-llama-batch-search/1) and sequence_memory.json
(tiny-llama-sequence-memory/1).
"""

from typing import Annotated, Any, Literal

from common.files import Amount, Integer, PositiveAmount, schema_of
from common.records.fields import Compute, Header, Model, Precision, Summary
from common.records.run_record import Training

from pydantic import Field, PositiveInt
from typing_extensions import TypedDict


class Measured(TypedDict):
    """A batch size that was trained."""

    batch_size: PositiveInt
    status: Literal["ok", "over target"]
    step_ms: Summary
    tokens_per_second: PositiveAmount
    peak_mib: Amount


class TooLarge(TypedDict):
    """A batch size for which memory ran out."""

    batch_size: PositiveInt
    status: Literal["out of memory"]
    step_ms: None
    tokens_per_second: None
    peak_mib: None


Trial = Annotated[Measured | TooLarge, Field(discriminator="status")]


class Shape(TypedDict):
    sequence_length: PositiveInt
    seed: int


class Answer(TypedDict):
    ended: str  # why doubling ended
    batch_size: PositiveInt | None  # None if the search was interrupted
    reason: str  # why it is this one


class BatchSearch(Header, Answer):
    schema: Literal["tiny-llama-batch-search/1"]
    version: str
    model: Model
    settings: dict[str, Any]  # as in a run record
    training: Shape
    precision: Compute
    target: Literal["throughput", "latency", "memory"]
    target_memory_usage: PositiveAmount  # the share of device.memory_mib to stay under
    memory_kind: str  # what peak_mib counts: "GPU allocator" or "process RSS"
    trials: Annotated[list[Trial], Field(min_length=1)]  # in the order in which they ran


class ShownRun(Header):
    """The part of a run's record that the tables of sequence_memory.json show."""

    version: str
    model: Model
    training: Training
    precision: Precision


class StoredRun(TypedDict):
    """The peak of a run at one length; `step` is without weights and AdamW's moments."""

    group: str
    sequence_length: PositiveInt
    peak: Annotated[Integer, Field(gt=0)]  # bytes
    step: Annotated[Integer, Field(gt=0)]
    path: str
    record: ShownRun


class SequenceMemory(TypedDict):
    """The runs of a group stand together, the shortest first."""

    schema: Literal["tiny-llama-sequence-memory/1"]
    command: str
    runs: Annotated[list[StoredRun], Field(min_length=1)]


BATCH_SEARCH, SEQUENCE_MEMORY = map(schema_of, (BatchSearch, SequenceMemory))
