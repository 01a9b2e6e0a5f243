"""The file of a benchmark, benchmark.json (schema tiny-llama-benchmark/1): its fields and its reader."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from common import files
from common.errors import UsageError
from common.records.fields import Attempted, Compute, ModelOfAnyLength, StudyHeader, Timed

from pydantic import Field, PositiveInt
from typing_extensions import NotRequired

Metric = Literal["throughput", "memory", "accuracy"]
METRICS: tuple[Metric, ...] = get_args(Metric)
ERRORS = ["loss", "logits_error", "gradient_error", "gradient"]  # of an Accuracy that was measured


class Entry(Attempted):
    model: str
    batch_size: PositiveInt
    sequence_length: PositiveInt


class Cell(Entry):
    runs: list[Timed]


class Accuracy(Entry):
    """The other keys are there if the status is "ok"; an error can be infinite."""

    loss: NotRequired[float]  # nats
    floor: NotRequired[float]  # the entropy of the source
    logits_error: NotRequired[float]
    gradient_error: NotRequired[float]  # the largest of all gradients
    gradient: NotRequired[str]  # the parameter that it belongs to


class Benchmark(StudyHeader):
    schema: Literal["tiny-llama-benchmark/1"]
    status: Literal["completed", "interrupted"]
    packages: dict[str, str]  # versions of the packages that the external baselines need
    model: ModelOfAnyLength
    precision: Compute
    seed: int
    models: Annotated[list[str], Field(min_length=1)]
    metrics: Annotated[list[Metric], Field(min_length=1)]
    batch_sizes: Annotated[list[PositiveInt], Field(min_length=1)]
    sequence_lengths: Annotated[list[PositiveInt], Field(min_length=1)]
    steps: PositiveInt
    repeats: PositiveInt
    accuracy_steps: PositiveInt
    cells: list[Cell]  # one for each model and shape, the smallest shape first
    accuracy: list[Accuracy]


SCHEMA = files.schema_of(Benchmark)


def read(path: Path) -> Benchmark:
    """A benchmark.json with a cell for each model and shape, and numbers if it is ok. UsageError: it is damaged, or not so."""
    measured = files.read(path, Benchmark)
    cells = {(cell["model"], cell["batch_size"], cell["sequence_length"]) for cell in measured["cells"]}
    cases = itertools.product(measured["models"], measured["batch_sizes"], measured["sequence_lengths"])
    if missing := [case for case in cases if case not in cells and measured["metrics"] != ["accuracy"]]:
        raise UsageError(f"{path}: cells: there is none of {', '.join(map(str, missing[0]))}")
    entries: list[tuple[str, Cell | Accuracy, list[str]]] = []
    entries += [(f"cells.{number}", cell, ["runs"]) for number, cell in enumerate(measured["cells"])]
    entries += [(f"accuracy.{number}", entry, ERRORS) for number, entry in enumerate(measured["accuracy"])]
    for name, entry, wanted in entries:
        if wrong := [key for key in wanted if entry["status"] == "ok" and entry.get(key, []) == []]:
            raise UsageError(f"{path}: {name}.{wrong[0]}: nothing was measured, but the status is ok")
        if entry["status"] == "ok" and not (measured["device"] and measured["environment"]):
            raise UsageError(f"{path}: device and environment: they are null, but something was measured")
    return measured


def place(entry: Mapping[str, Any]) -> str:
    """A cell by name, such as "v1, B 8, S 128"."""
    return f"{entry['model']}, B {entry['batch_size']}, S {entry['sequence_length']}"
