"""Tables of Version 4's comparisons, from the files that benchmark_levers.py and benchmark_block_fusion.py write."""

from pathlib import Path
from typing import Annotated, Literal

from common.analysis.profiles import run_record
from common.documents.measured import table
from common.files import read

from pydantic import Field, PositiveInt
from typing_extensions import NotRequired, TypedDict


class Way(TypedDict):
    """One way to do a lever's work; `preset` is empty for the one that has sizes of its own."""

    preset: str
    lever: str
    way: str
    us: run_record.Summary


class Levers(run_record.Header):
    """levers.json."""

    schema: Literal["tiny-llama-levers/1"]
    model: NotRequired[run_record.Model]
    precision: run_record.Compute
    rows: Annotated[list[Way], Field(min_length=1)]


class Block(TypedDict):
    batch_size: PositiveInt
    single_ms: run_record.Summary
    layered_ms: run_record.Summary
    difference: float


class Gpu(run_record.Device):
    multiprocessors: PositiveInt


class BlockFusion(run_record.Header):
    """block_fusion.json."""

    schema: Literal["tiny-llama-block-fusion/1"]
    device: Gpu
    model: NotRequired[run_record.Model]
    precision: run_record.Compute
    sequence_length: PositiveInt
    rows: list[Block]


def levers(path: Path) -> str:
    """A row for each way to do a lever's work, a column for each preset: microseconds."""
    measured, cells = read(path, Levers), {}
    for row in measured["rows"]:
        cells.setdefault((row["lever"], row["way"]), {})[row["preset"] or "own sizes"] = row["us"]["median"]
    columns = list(dict.fromkeys(row["preset"] or "own sizes" for row in measured["rows"]))
    header = ["lever", "way", *(f"{column}, us" for column in columns)]
    return table(header, [[*key, *map(found.get, columns)] for key, found in cells.items()], measured)


def block_fusion(path: Path) -> str:
    """A row for each batch size: the time of a block as one kernel and in layers, in microseconds."""
    measured = read(path, BlockFusion)
    programs = measured["device"]["multiprocessors"]
    rows = []
    for row in measured["rows"]:
        single, layered = (1e3 * row[f"{name}_ms"]["median"] for name in ("single", "layered"))
        rows.append([row["batch_size"], row["batch_size"] / programs, single, layered, layered / single])
    header = ["B", "programs of the single kernel / multiprocessors", "one kernel, us", "in layers, us", "layers / one kernel"]
    return table(header, rows, measured)
