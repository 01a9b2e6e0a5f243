"""The files about kernels alone: compiled for several targets (results/compiled/), and Version 4's variants (results/<device>/).

version3_triton/compile_kernels.py writes kernels.json (schema tiny-llama-compiled/1) and tritons.json
(tiny-llama-compiled-summary/1). Version 4 writes levers.json (tiny-llama-levers/1) and block_fusion.json
(tiny-llama-block-fusion/1).
"""

from typing import Annotated, Literal

from common.files import PositiveAmount, schema_of
from common.records.fields import Compute, Environment, Header, Made, Model, Summary

from pydantic import Field, PositiveInt
from typing_extensions import NotRequired, TypedDict


class CompiledKernel(TypedDict):
    """A compiled kernel; kernels.json has its dtype, size, blocks, warps and stages too."""

    target: str
    file: str
    kernel: str
    registers: int
    spills: int
    shared_bytes: int


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


class Block(TypedDict):
    batch_size: PositiveInt
    single_ms: Summary
    layered_ms: Summary
    difference: float


class Gpu(TypedDict):
    kind: Literal["cpu", "cuda", "rocm"]
    name: str
    memory_mib: PositiveAmount
    multiprocessors: PositiveInt


class BlockFusion(Made):
    """block_fusion.json."""

    schema: Literal["tiny-llama-block-fusion/1"]
    device: Gpu
    environment: Environment
    model: NotRequired[Model]
    precision: Compute
    sequence_length: PositiveInt
    rows: list[Block]


COMPILED, SUMMARY, LEVERS = map(schema_of, (Compiled, CompiledSummary, Levers))
