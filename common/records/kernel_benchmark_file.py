"""The file of a benchmark of kernels (schema tiny-llama-kernel-benchmark/1): its fields and its reader."""

import itertools
from pathlib import Path
from typing import Literal

from common import files
from common.errors import UsageError
from common.files import Amount
from common.records.fields import Ceilings, Header, Precision, Summary

from pydantic import PositiveInt
from typing_extensions import TypedDict


class Timing(TypedDict):
    """One contender at one operation and shape."""

    operation: str
    batch_size: PositiveInt
    sequence_length: PositiveInt
    hidden_size: PositiveInt
    unit: Literal["GB/s", "TFLOP/s"]
    amount: PositiveInt  # bytes or FLOPs, by `unit`
    contender: Literal["kernel", "eager", "compiled", "liger", "cudnn", "flash"]
    host_ms: Summary
    gpu_ms: Summary | None
    peak_mib: Amount | None


class KernelBenchmark(Header):
    schema: Literal["tiny-llama-kernel-benchmark/1"]
    precision: Precision
    ceilings: Ceilings
    rows: list[Timing]


SCHEMA = files.schema_of(KernelBenchmark)


def read(path: Path) -> KernelBenchmark:
    """A benchmark with rows of kernel and eager for each operation and shape. UsageError: it is damaged, or one is missing."""
    measured = files.read(path, KernelBenchmark)
    found = {(shape(row), row["contender"]) for row in measured["rows"]}
    for case, contender in itertools.product({case for case, _ in found}, ("kernel", "eager")):
        if (case, contender) not in found:
            raise UsageError(f"{path}: rows: there is no row of {contender} for {' '.join(map(str, case))}")
    return measured


def shape(row: Timing) -> tuple[str, int, int, int]:
    """The operation and its B, S and D."""
    return row["operation"], row["batch_size"], row["sequence_length"], row["hidden_size"]
