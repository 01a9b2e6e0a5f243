"""The inputs of `profiling.py`, and the commands of this lab, which call it.

    python lab.py time                                   # the values of a problem; also memory
    python lab.py report                                 # components of attention, recommendation
    python lab.py experiment launches                    # a bottleneck and its fix
    python lab.py compare mine.json yours.json           # two records; --output page.html
    python lab.py measure --output profiling_lab.json    # tables of all parts, and their file
    python lab.py measure --output mine.json --parts optimizations

All commands take `--implementation solution`, and otherwise call your functions. Times are in ms,
memory is in MB of 2^20 bytes. Numbers are in fp16 on a GPU and in fp32 on a CPU. The parts over
sequence lengths have a batch of 1 and a head dimension of D/H.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the root of this clone

import functools
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any, Literal, NamedTuple

import exercise_tools as exercises
from common import cli
from common import device as devices
from common.precision import Precision
from common.training import ceilings, record
from tracepage.errors import UsageError
from tracepage.files import PositiveAmount, read, schema_of, writable_file, write_measurement
from tracepage.records.fields import Ceilings, Header
from tracepage.show import tables

import torch
from pydantic import PositiveInt
from settings import ITERATIONS as ITERATIONS  # profiling.py takes them from here
from settings import WARMUP as WARMUP
from settings import compile_runs_on as compile_runs_on
from torch import Tensor
from typing_extensions import TypedDict

LAB = Path(__file__).resolve().parent
FOLDERS = {"starter": LAB / "src", "solution": LAB / "solution"}  # of the two profiling.py
COMPONENTS = ("qkv_projection", "score_computation", "softmax", "weighted_sum", "output_projection")
CORE = COMPONENTS[1:4]  # these read or write scores
OPTIMIZATIONS = {"baseline": 0, "compiled": 1, "sdpa": 2, "flash": 3}  # name: optimization level
WAYS = {
    "optimizations": tuple(OPTIMIZATIONS),
    "frameworks": ("PyTorch eager", "PyTorch compiled", "JAX jit"),
}
PARTS = ("components", *WAYS)  # of profiling_lab.json; one that was not measured is None
# in experiments.py
EXPERIMENTS = ("bandwidth", "launches", "transfer", "synchronization", "techniques", "layer")
SIZES = ("batch_size", "seq_len", "d_model", "num_heads", "seq_lens")
UNEXPLAINED = 0.1  # below this share of the measured time, neither FLOPs nor bytes explain it
MIB = 2**20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Shape = Sequence[int]


@dataclass(frozen=True)
class ProfileResult:
    """The measured time and memory of a call of one operation, and its work."""

    name: str
    time_ms: float
    memory_mb: float = 0.0  # MB (2^20 bytes) that it adds at its peak; 0 where it is not known
    flops: int = 0  # floating-point operations
    # the least that it can move: it reads every input once and writes every output once
    bytes_moved: int = 0


class Component(TypedDict):
    name: str
    time_ms: PositiveAmount


class Components(TypedDict):
    pytorch: list[Component]


class Length(TypedDict):
    seq_len: PositiveInt
    ms: dict[str, PositiveAmount]  # by way


class Measured(Header):
    """What `measure` writes; a part that was not measured is None."""

    schema: Literal["tiny-llama-profiling-lab/1"]
    precision: str
    sizes: dict[str, Any]
    components: Components | None
    optimizations: list[Length] | None
    frameworks: list[Length] | None


class MemoryUsage(NamedTuple):
    """The memory of a call in MB (2^20 bytes); None where it is not known."""

    peak_mb: float | None  # that the call adds at its peak
    current_mb: float | None  # that it has added at its end, while its result lives
    # that the allocator holds of the device, in use or not; a CPU's allocator caches nothing
    cached_mb: float | None


def projection_inputs(device: str, batch_size: int, seq_len: int, d_model: int) -> list[Tensor]:
    """x [B, S, D], and the weights [3 D, D] and [D, D], divided by sqrt(D) so that float16 does not
    overflow.
    """
    x, *weights = _random(
        device, (batch_size, seq_len, d_model), (3 * d_model, d_model), (d_model, d_model)
    )
    return [x, *(weight / math.sqrt(d_model) for weight in weights)]


def attention_inputs(device: str, batch: int, heads: int, seq_len: int, d_k: int) -> list[Tensor]:
    """q, k and v [B, H, S, dk]."""
    return _random(device, *[(batch, heads, seq_len, d_k)] * 3)


def _random(device: str, *shapes: Shape) -> list[Tensor]:
    """Standard normal tensors, the same on every device; float16 on a GPU, float32 on a CPU."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).to(device, dtype) for shape in shapes]


def to_jax(tensor: Tensor) -> Any:
    """A copy of the tensor on JAX's device of the same kind."""
    import jax

    return jax.device_put(
        tensor.cpu().numpy(), jax.devices("gpu" if devices.is_gpu(tensor.device) else "cpu")[0]
    )


def has_jax_arrays(args: Sequence[Any]) -> bool:
    """Whether a call with these arguments is one of JAX."""
    return "jax" in sys.modules and any(isinstance(arg, sys.modules["jax"].Array) for arg in args)


def jax_statistics() -> dict[str, int] | None:
    """What JAX's allocator counts, in bytes. On a CPU it counts nothing: None."""
    return sys.modules["jax"].devices()[0].memory_stats()


def jax_memory(fn: Callable[..., object], args: Sequence[Any]) -> MemoryUsage:
    """The memory of a call of a JAX function.

    All of it is None on a CPU. JAX's peak is that of the process, so it is None where the call
    stays below an earlier peak.
    """
    before = jax_statistics()
    result = sys.modules["jax"].block_until_ready(fn(*args))
    after = jax_statistics()
    del result  # held until here: its memory is current
    if before is None or after is None:
        return MemoryUsage(None, None, None)
    peak = after["peak_bytes_in_use"] - before["bytes_in_use"]
    raised = after["peak_bytes_in_use"] > before["peak_bytes_in_use"]
    current = after["bytes_in_use"] - before["bytes_in_use"]
    return MemoryUsage(peak / MIB if raised else None, current / MIB, after["pool_bytes"] / MIB)


def allocations(fn: Callable[..., object], args: Sequence[Any]) -> list[int]:
    """Bytes of each allocation of the CPU's memory during a call, in their order; those of a
    release are negative.
    """
    # otherwise torch 2.12 and later print two lines for each profile
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        result = fn(*args)  # held: its memory counts
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text(errors="replace"))["traceEvents"]
    del result
    events = [event for event in events if event["name"] == "[memory]"]
    return [event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])]


@functools.cache
def peaks(device: torch.device) -> Ceilings:
    """The measured ceilings of the device, such as `flops_per_second` and `bytes_per_second`, in
    the inputs' number format.
    """
    return ceilings.measure(
        device, Precision(device, torch.float16 if devices.is_gpu(device) else None)
    )


def has_flash_kernel(Q: Tensor, K: Tensor, V: Tensor) -> bool:
    """Whether PyTorch has a flash attention kernel for these tensors; its kernel for the CPU takes
    every floating-point dtype.
    """
    if not Q.is_cuda:
        return True
    # no mask, no dropout, not causal, no groups
    inputs = torch.backends.cuda.SDPAParams(Q, K, V, None, 0.0, False, False)
    return torch.backends.cuda.can_use_flash_attention(inputs)


def jax_runs_on(device: str) -> bool:
    """Whether JAX is installed and has this kind of device; it always has a CPU."""
    if importlib.util.find_spec("jax") is None:
        return False
    import jax

    return device == "cpu" or jax.default_backend() == "gpu"


def load(implementation: str) -> ModuleType:
    """`profiling` from the folder of the starter or of the solution."""
    sys.path.insert(0, str(FOLDERS[implementation]))
    return importlib.import_module("profiling")


def time(profiling: ModuleType, options: Namespace, device: torch.device) -> None:
    """Problem 1."""

    def microseconds(*call: Any, **options: Any) -> float:
        return round(1e6 * profiling.benchmark_function(*call, **options), 1)

    vectors = [torch.ones(n, device=device) for n in (1, 10**3, 10**5, 10**6)]
    print("us of x + 1:", [microseconds(torch.add, (x, 1), iterations=200) for x in vectors])
    if devices.is_gpu(device):
        x = torch.ones(8192, 8192, device=device)
        times = [microseconds(torch.mm, (x, x), sync=sync) for sync in (True, False)]
        print("us of x @ x, with sync=True and False:", times)


def memory(profiling: ModuleType, options: Namespace, device: torch.device) -> None:
    """Problem 2."""
    x = torch.ones(8, MIB, device=device)
    arrays = {"PyTorch": x} | ({"JAX": to_jax(x)} if jax_runs_on(device.type) else {})
    for name, function in {
        "x + 1": lambda x: x + 1,
        "(x + 1).sum()": lambda x: (x + 1).sum(),
    }.items():
        for framework, array in arrays.items():
            usage = profiling.measure_memory_usage(function, (array,), device.type)
            peak, current, cached = (value if value is None else round(value, 1) for value in usage)
            print(f"{framework}, {name}: peak {peak}, current {current}, cached {cached} MB")


def component_sizes(options: Namespace, device: torch.device) -> tuple[int, int, int, int, str]:
    """The arguments of `profile_attention_components`. UsageError: D is not divisible by H."""
    if options.d_model % options.num_heads:
        raise UsageError(
            f"--d-model {options.d_model} is not divisible by --num-heads {options.num_heads}"
        )
    return options.seq_len, options.d_model, options.num_heads, options.batch_size, device.type


def report(profiling: ModuleType, options: Namespace, device: torch.device) -> None:
    """The report of problem 4."""
    results = profiling.profile_attention_components(*component_sizes(options, device))
    rates = peaks(device)
    print(
        profiling.generate_profile_report(
            results, rates["flops_per_second"], rates["bytes_per_second"]
        )
    )


def experiment(profiling: ModuleType, options: Namespace, device: torch.device) -> None:
    """The experiments that are named, or all."""
    import experiments

    if unknown := set(options.subjects) - set(EXPERIMENTS):
        raise UsageError(f"there is no experiment {min(unknown)!r}: use {', '.join(EXPERIMENTS)}")
    component_sizes(options, device)
    if options.output:
        writable_file(options.output, "--output")
    sizes = {name: getattr(options, name) for name in SIZES}
    result = record.header(experiments.SCHEMA, device) | {"sizes": sizes, "experiments": []}
    for name in options.subjects or EXPERIMENTS:
        result["experiments"] += experiments.run(name, profiling, options, device)
        if options.output:
            write_measurement(options.output, result, "--output")


def compare(profiling: ModuleType, options: Namespace, device: torch.device) -> None:
    """Records of `measure`, side by side."""
    import comparison

    if not options.subjects:
        raise UsageError("compare needs the files of measure: compare mine.json yours.json")
    pages = comparison.report([read(Path(name), Measured) for name in options.subjects], PARTS)
    if options.output and options.output.suffix != ".html":
        raise UsageError(f"--output {options.output}: name a .html file")
    if options.output:
        print(pages.publish(options.output.parent, options.output.stem, ("html",), "--output"))
    else:
        print(pages.terminal())


def measure_part(part: str, profiling: ModuleType, options: Namespace, device: torch.device) -> Any:
    """What the file holds of a part."""
    sizes = component_sizes(options, device)
    kind = device.type
    heads = options.num_heads
    d_k = options.d_model // heads
    if part == "components":
        found = {"pytorch": profiling.profile_attention_components(*sizes)}
        if jax_runs_on(kind):
            found["jax"] = profiling.profile_attention_components_jax(*sizes)
        peak = peaks(device)["flops_per_second"], peaks(device)["bytes_per_second"]

        def described(result: ProfileResult) -> dict[str, Any]:
            return asdict(result) | {"bound": profiling.classify_bound(result, *peak)}

        return {"jax": None} | {
            framework: list(map(described, results)) for framework, results in found.items()
        }
    compare = (
        profiling.compare_optimizations if part == "optimizations" else profiling.compare_frameworks
    )
    return [
        {"seq_len": length, "ms": compare(1, heads, length, d_k, kind)}
        for length in options.seq_lens
    ]


def rows(part: str, measured: Any) -> tuple[list[str], list[list[Any]]]:
    """The header and the rows of a part's table."""
    if part in WAYS:
        ways = WAYS[part]
        return ["S", *(f"{way} ms" for way in ways)], [
            [row["seq_len"], *map(row["ms"].get, ways)] for row in measured
        ]
    body = []
    for framework, found in measured.items():
        total = sum(result["time_ms"] for result in found or [])
        for result in found or []:
            # 0: not measured
            flops = result["flops"]
            moved = result["bytes_moved"]
            ms = result["time_ms"]
            cells = [framework, result["name"], ms, 100 * ms / total, result["memory_mb"] or None]
            cells += [flops / 1e9, moved / 1e6, flops / moved, result["bound"]]
            body.append(cells)
    return [
        "framework",
        "component",
        "ms",
        "% of total",
        "MiB added",
        "GFLOP",
        "MB moved",
        "FLOP/byte",
        "bound",
    ], body


def measure(profiling: ModuleType, options: Namespace, device: torch.device) -> None:
    """Measures the parts and writes the file after each, so that a stopped measurement keeps the
    parts before.
    """
    if not options.output:
        raise UsageError("measure needs --output FILE.json")
    writable_file(options.output, "--output")
    devices.configure(device, seed=0)
    result = (
        record.header(schema_of(Measured), device)
        | dict.fromkeys(PARTS)
        | {
            "jax": importlib.metadata.version("jax") if jax_runs_on(device.type) else None,
            "precision": peaks(device)["precision"],
            "sizes": {name: getattr(options, name) for name in SIZES},
            "ceilings": peaks(device),
        }
    )
    for part in options.parts:
        result[part] = measure_part(part, profiling, options, device)
        write_measurement(options.output, result, "--output")
        print(f"{part}\n{tables.text(*rows(part, result[part]))}\n", flush=True)
    print(f"written: {options.output}")


COMMANDS = {
    "time": time,
    "memory": memory,
    "report": report,
    "measure": measure,
    "experiment": experiment,
    "compare": compare,
}


@exercises.unsolved()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("command", choices=COMMANDS)
    add(
        "subjects",
        nargs="*",
        metavar="SUBJECT",
        help=f"of experiment: {', '.join(EXPERIMENTS)} (default: all); of compare: files",
    )
    add(
        "--implementation",
        choices=FOLDERS,
        default="starter",
        help="whose profiling.py (default: starter, yours)",
    )
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="of measure and experiment a .json file, of compare a .html file",
    )
    add(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        metavar="PART",
        help=f"of {', '.join(PARTS)} (default: all)",
    )
    size = functools.partial(add, type=cli.positive)
    size("--batch-size", default=8, metavar="B", help="of the components (default: 8)")
    size("--seq-len", default=512, metavar="S", help="of the components (default: 512)")
    size("--d-model", default=512, metavar="D", help="default: 512")
    size("--num-heads", default=8, metavar="H", help="default: 8")
    add(
        "--seq-lens",
        type=cli.positive_list,
        default=[128, 512, 2048],
        metavar="S,S,...",
        help="default: 128,512,2048",
    )
    cli.add(parser, "--device")
    options = cli.parse(parser)
    COMMANDS[options.command](load(options.implementation), options, devices.select(options.device))


if __name__ == "__main__":
    sys.modules["lab"] = sys.modules["__main__"]  # profiling.py imports it by this name
    cli.command(main)
