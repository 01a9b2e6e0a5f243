"""The file of a benchmark, benchmark.json: its schema and its reader."""

import itertools
from pathlib import Path
from typing import Annotated, Any, Literal

from common import files
from common.analysis.profiles import run_record
from common.errors import UsageError
from common.studies.job_runner import Attempted

from pydantic import Field, PositiveInt
from typing_extensions import NotRequired

SCHEMA = "tiny-llama-benchmark/1"
METRICS = ("throughput", "memory", "accuracy")


class Run(run_record.PeakMemory):
    """One process of a cell."""

    step_ms: run_record.Summary
    reserved_mib: NotRequired[files.Amount]  # on a GPU: what the pools of the allocator held


class Entry(Attempted):
    model: str
    batch_size: PositiveInt
    sequence_length: PositiveInt


class Cell(Entry):
    runs: list[Run]


class Accuracy(Entry):
    """The other keys are there if the status is "ok"; an error can be infinite."""

    loss: NotRequired[float]  # nats
    floor: NotRequired[float]  # the entropy of the source
    logits_error: NotRequired[float]
    gradient_error: NotRequired[float]  # the largest of all gradients
    gradient: NotRequired[str]  # the parameter that it belongs to


class Benchmark(run_record.Header):
    """The content of benchmark.json."""

    schema: Literal[SCHEMA]
    status: Literal["completed", "interrupted"]
    device: run_record.Device | None  # None, as the environment, if no process came far enough to describe it
    environment: run_record.Environment | None
    packages: dict[str, str]  # versions of the packages that the external baselines need
    model: run_record.ModelOfAnyLength
    precision: run_record.Compute
    seed: int
    models: Annotated[list[str], Field(min_length=1)]
    metrics: Annotated[list[Literal[METRICS]], Field(min_length=1)]
    batch_sizes: Annotated[list[PositiveInt], Field(min_length=1)]
    sequence_lengths: Annotated[list[PositiveInt], Field(min_length=1)]
    steps: PositiveInt
    repeats: PositiveInt
    accuracy_steps: PositiveInt
    cells: list[Cell]  # one for each model and shape, the smallest shape first
    accuracy: list[Accuracy]


def read(path: Path) -> Benchmark:
    """A benchmark.json with a cell for each model and shape, and with numbers wherever the status is "ok".

    Raises:
        UsageError: the file is missing, damaged or of another schema.
    """
    measured = files.read(path, Benchmark)
    cells = {(cell["model"], cell["batch_size"], cell["sequence_length"]) for cell in measured["cells"]}
    wanted = itertools.product(measured["models"], measured["batch_sizes"], measured["sequence_lengths"])
    if missing := [case for case in wanted if case not in cells and measured["metrics"] != ["accuracy"]]:
        raise UsageError(f"{path}: cells: there is none of {', '.join(map(str, missing[0]))}")
    for part in ("cells", "accuracy"):
        for number, entry in enumerate(measured[part]):
            wanted = {"cells": ["runs"], "accuracy": ["loss", "logits_error", "gradient_error", "gradient"]}[part]
            wrong = [key for key in wanted if entry["status"] == "ok" and (key not in entry or entry[key] == [])]
            if wrong:
                raise UsageError(f"{path}: {part}.{number}.{wrong[0]}: nothing was measured, but the status is ok")
            if entry["status"] == "ok" and not (measured["device"] and measured["environment"]):
                raise UsageError(f"{path}: device and environment: they are null, but something was measured")
    return measured


def place(entry: dict[str, Any]) -> str:
    """A cell by name, such as "v1, B 8, S 128"."""
    return f"{entry['model']}, B {entry['batch_size']}, S {entry['sequence_length']}"
