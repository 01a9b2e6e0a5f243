"""The file of a scaling study, scaling.json: its schema, its reader, and look-ups in what was measured."""

from pathlib import Path
from statistics import median
from typing import Annotated, Literal

from common import files, ranks
from common.analysis.formulas import data_parallel
from common.analysis.profiles import communication, run_record
from common.errors import UsageError
from common.studies.job_runner import Attempted

from pydantic import Field, PositiveInt
from typing_extensions import NotRequired, TypedDict

SCHEMA = "tiny-llama-scaling/1"
PHASES = ("forward", "backward", "optimizer")


class Run(run_record.PeakMemory):
    """One job of a cell; the memory is that of the process which took most."""

    step_ms: run_record.Summary


class Collectives(TypedDict):
    """The collectives of one kind in a step: a `data_parallel.Transfer`. A trace may lack the bytes."""

    kind: str
    count: files.Amount
    bytes: files.Amount | None
    beside: data_parallel.Beside


class Cell(Attempted):
    model: str
    parallel: Literal[ranks.FORMS] | None  # None on one process
    processes: PositiveInt
    batch_size: PositiveInt  # of a process
    runs: list[Run]
    parameters: NotRequired[PositiveInt]
    shares: NotRequired[dict[Literal[PHASES], files.Amount]]  # of the step on one process
    ranks: NotRequired[list[communication.Split]]
    collectives: NotRequired[list[Collectives]]
    trace_problem: NotRequired[str]  # why there is nothing from the traces


class Message(TypedDict):
    bytes: PositiveInt
    ms: files.PositiveAmount  # of an all-reduce


class Link(TypedDict):
    gb_per_second: files.PositiveAmount
    microseconds: files.Amount
    source: str
    messages: list[Message]


class Scaling(run_record.Header):
    """The content of scaling.json."""

    schema: Literal[SCHEMA]
    status: Literal["completed", "interrupted"]
    device: run_record.Device | None  # None, as the environment, if no job came far enough to describe it
    environment: run_record.Environment | None
    variables: dict[str, str]  # of the environment: those that NCCL and RCCL read
    model: run_record.Model
    precision: run_record.Compute
    seed: int
    models: Annotated[list[str], Field(min_length=1)]
    forms: list[Literal[ranks.FORMS]]
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


def read(path: Path) -> Scaling:
    """A scaling.json, with runs wherever the status is "ok".

    Raises:
        UsageError: the file is missing, damaged or of another schema.
    """
    measured = files.read(path, Scaling)
    for number, cell in enumerate(measured["cells"]):
        if cell["status"] == "ok" and not (cell["runs"] and measured["device"] and measured["environment"]):
            raise UsageError(f"{path}: cells.{number}: nothing was measured, but the status is ok")
        if (cell["parallel"] is None) != (cell["processes"] == 1):
            raise UsageError(f"{path}: cells.{number}.parallel: one process has no form, and several have one")
    return measured


def place(cell: Cell) -> str:
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
