"""The file of the profiling lab, profiling_lab.json (schema tiny-llama-profiling-lab/1): its fields, and a table of each part."""

from typing import Any, Literal, get_args

from common.files import Amount, PositiveAmount, schema_of
from common.records.fields import Ceilings, Header

from pydantic import PositiveInt
from typing_extensions import TypedDict


class Component(TypedDict):
    name: str
    time_ms: PositiveAmount
    memory_mb: Amount
    flops: PositiveAmount
    bytes_moved: PositiveAmount
    bound: str


Components = dict[Literal["pytorch", "jax"], list[Component] | None]


class Times(TypedDict):
    """The ms of each way at one sequence length; None where it cannot run."""

    seq_len: PositiveInt
    ms: dict[str, PositiveAmount | None]


class Lab(Header):
    """A part that was not measured is None."""

    schema: Literal["tiny-llama-profiling-lab/1"]
    jax: str | None  # its version
    precision: str
    sizes: dict[str, Any]
    ceilings: Ceilings
    components: Components | None
    optimizations: list[Times] | None
    frameworks: list[Times] | None


SCHEMA = schema_of(Lab)
PartName = Literal["components", "optimizations", "frameworks"]
PARTS = get_args(PartName)
NAMES = {"pytorch": "PyTorch", "jax": "JAX"}
WAYS = {
    "optimizations": ("baseline", "compiled", "sdpa", "flash"),
    "frameworks": ("PyTorch eager", "PyTorch compiled", "JAX jit"),
}  # the columns over sequence lengths


def rows(part: str, measured: Any) -> tuple[list[str], list[list[Any]]]:
    """The header and the rows of a part's table."""
    if part == "components":
        return _components(measured)
    ways = WAYS[part]
    return ["S", *(f"{way} ms" for way in ways)], [[row["seq_len"], *map(row["ms"].get, ways)] for row in measured]


def _components(measured: Components) -> tuple[list[str], list[list[Any]]]:
    body = []
    for framework, found in measured.items():
        total = sum(result["time_ms"] for result in found or [])
        for result in found or []:
            flops, moved, memory = result["flops"], result["bytes_moved"], result["memory_mb"] or None  # 0: not measured
            time = [result["time_ms"], 100 * result["time_ms"] / total, memory]
            body.append([NAMES[framework], result["name"], *time, flops / 1e9, moved / 1e6, flops / moved, result["bound"]])
    return ["framework", "component", "ms", "% of total", "MiB added", "GFLOP", "MB moved", "FLOP/byte", "bound"], body
