"""The files about kernels that are compiled for several targets (results/compiled/).

version3_triton/compile_kernels.py writes kernels.json (schema tiny-llama-compiled/1) and tritons.json
(tiny-llama-compiled-summary/1).
"""

from typing import Literal

from common.files import schema_of

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


COMPILED, SUMMARY = map(schema_of, (Compiled, CompiledSummary))
