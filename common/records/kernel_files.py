"""The files about kernels alone: compiled for several targets (results/compiled/), and Version 4's levers (results/<device>/).

version3_triton/compile_kernels.py writes kernels.json (schema tiny-llama-compiled/1) and tritons.json
(tiny-llama-compiled-summary/1). version4_ultra_fused/benchmark_levers.py writes levers.json (tiny-llama-levers/1).
"""

from typing import Annotated, Literal

from common.files import schema_of
from common.records.fields import Compute, Header, Model, Summary

from pydantic import Field
from typing_extensions import NotRequired, TypedDict


class CompiledKernel(TypedDict):
    """A compiled kernel; kernels.json has more of each. The last three count AMD's instructions."""

    target: str
    dtype: NotRequired[str]
    file: str
    size: NotRequired[str]
    kernel: str
    registers: int
    spills: int
    shared_bytes: int
    occupancy: NotRequired[int]
    mfma: NotRequired[int | None]
    memory: NotRequired[int | None]
    lds: NotRequired[int | None]


class Compiled(TypedDict):
    """kernels.json."""

    schema: Literal["tiny-llama-compiled/1"]
    triton: str
    command: str
    rows: list[CompiledKernel]


class Target(TypedDict):
    """The kernels of one Triton for one target."""

    triton: str
    target: str
    compiled: int
    spilling: int
    largest_spill: int
    least_registers: int
    largest_shared_bytes: int


class SpillingKernel(CompiledKernel):
    triton: str


class Spills(TypedDict):
    """What tritons.json says of some files."""

    targets: list[Target]
    spilling: list[SpillingKernel]


class CompiledSummary(Spills):
    """tritons.json."""

    schema: Literal["tiny-llama-compiled-summary/1"]
    command: str


class Lever(TypedDict):
    """One way to do a lever's work; `preset` is empty for the one that has sizes of its own."""

    preset: str
    lever: str
    way: str
    us: Summary


class Levers(Header):
    """levers.json."""

    schema: Literal["tiny-llama-levers/1"]
    model: NotRequired[Model]
    precision: Compute
    rows: Annotated[list[Lever], Field(min_length=1)]


COMPILED, SUMMARY, LEVERS = map(schema_of, (Compiled, CompiledSummary, Levers))
