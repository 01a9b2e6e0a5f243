"""The file of a scaling study, scaling.json (schema tiny-llama-scaling/1): its fields, its reader, and look-ups in it."""

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, get_args

from common import files
from common.errors import UsageError
from common.files import Amount, PositiveAmount
from common.ranks import Form
from common.records.fields import Attempted, Compute, Model, StudyHeader, Timed

from pydantic import Field, PositiveInt
from typing_extensions import NotRequired, TypedDict

Phase = Literal["forward", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class Split(TypedDict):
    """Milliseconds of a step on one rank: communication is overlapped + exposed, and also waiting + moving."""

    communication_ms: Amount
    overlapped_ms: Amount
    exposed_ms: Amount
    waiting_ms: Amount
    moving_ms: Amount
    exposed_waiting_ms: Amount  # the part of both


class Collectives(TypedDict):
    """The collectives of one kind in a step: a `data_parallel.Transfer`. A trace may lack the bytes."""

    kind: str
    count: Amount
    bytes: Amount | None
    beside: Literal["forward", "backward", "nothing"]


class Cell(Attempted):
    model: str
    parallel: Form | None  # None on one process
    processes: PositiveInt
    batch_size: PositiveInt  # of a process
    runs: list[Timed]  # the memory is that of the process which took most
    parameters: NotRequired[PositiveInt]
    shares: NotRequired[dict[Phase, Amount]]  # of the step on one process
    ranks: NotRequired[list[Split]]
    collectives: NotRequired[list[Collectives]]
    trace_problem: NotRequired[str]  # why there is nothing from the traces


class Message(TypedDict):
    bytes: PositiveInt
    ms: PositiveAmount  # of an all-reduce


class Link(TypedDict):
    gb_per_second: PositiveAmount
    microseconds: Amount
    source: str
    messages: list[Message]


class Scaling(StudyHeader):
    schema: Literal["tiny-llama-scaling/1"]
    status: Literal["completed", "interrupted"]
    variables: dict[str, str]  # of the environment: those that NCCL and RCCL read
    model: Model
    precision: Compute
    seed: int
    models: Annotated[list[str], Field(min_length=1)]
    forms: list[Form]
    processes: Annotated[list[PositiveInt], Field(min_length=1)]
    batch_size: PositiveInt  # of a process, in weak scaling
    global_batch_size: PositiveInt  # of the job, in strong scaling
    sequence_length: PositiveInt
    steps: PositiveInt
    repeats: PositiveInt
    filled: NotRequired[bool]  # jobs ran at the same time, each on GPUs of its own
    left_out: list[str]
    link: Link | None
    cells: list[Cell]


SCHEMA = files.schema_of(Scaling)


def read(path: Path) -> Scaling:
    """A scaling.json, with runs wherever the status is "ok". UsageError: the file is missing, damaged or of another schema."""
    measured = files.read(path, Scaling)
    for number, cell in enumerate(measured["cells"]):
        if cell["status"] == "ok" and not (cell["runs"] and measured["device"] and measured["environment"]):
            raise UsageError(f"{path}: cells.{number}: nothing was measured, but the status is ok")
        if (cell["parallel"] is None) != (cell["processes"] == 1):
            raise UsageError(f"{path}: cells.{number}.parallel: one process has no form, and several have one")
    return measured


def place(cell: Mapping[str, Any]) -> str:
    """A cell by name, such as "v1, ddp, 2 x 8"."""
    return f"{cell['model']}, {cell['parallel'] or 'one process'}, {cell['processes']} x {cell['batch_size']}"


def step_of(cell: Cell) -> float:
    """Milliseconds: the median of the jobs' medians."""
    return median(run["step_ms"]["median"] for run in cell["runs"])


def pairs(measured: Scaling) -> list[tuple[str, str]]:
    """Each model and form that has a cell."""
    return list(dict.fromkeys((cell["model"], cell["parallel"]) for cell in measured["cells"] if cell["parallel"]))


def share(scaling: str, processes: int) -> float:
    """The share of one process's batch that each process has, in "weak" or in "strong" scaling."""
    return 1.0 if scaling == "weak" else 1 / processes


def whole_batch(measured: Scaling, scaling: str) -> int:
    """The batch size of one process, against which the scaling is."""
    return measured["batch_size" if scaling == "weak" else "global_batch_size"]


def one_process(measured: Scaling, scaling: str, model: str) -> Cell | None:
    """The cell of one process that the scaling is against, if it was measured."""
    wanted = (model, 1, whole_batch(measured, scaling), "ok")
    cells = measured["cells"]
    return next((c for c in cells if (c["model"], c["processes"], c["batch_size"], c["status"]) == wanted), None)
