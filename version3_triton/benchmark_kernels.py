"""Times each operation, forward and backward, as a Triton kernel and as PyTorch does it: at the model's shapes, or over a sweep.

    python benchmark_kernels.py --preset small --use-amp
    python benchmark_kernels.py --preset small --use-amp --sizes 512x128 1024x512 4096x8192 --compile
    python benchmark_kernels.py --operations attention linear_cross_entropy --metrics-out kernels.json

`python tiny_llama_v3.py --mode benchmark` is the first of these with that script's flags. The contenders, which take turns:

    kernel     Version 3's, from kernels/
    eager      PyTorch's operations in its place, from kernels/reference.py
    compiled   the same under torch.compile (with --compile)

Inputs are random, all in the number format of the run, and laid out as in the model: parts of a fused product are strided. A time
is that of an operation and of its gradients for all inputs, one after the other as in training, so at small sizes it is the
host's for launching them. From it follow

    GB/s       of norms, RoPE and SwiGLU: the numbers that forward and backward read and write at least (kernels/, each file),
               the same for all contenders
    TFLOP/s    of attention (two products forward and five backward, of the pairs that are not masked) and of the loss (three)

and their share of what a large copy and a matrix product reached here. Tensors that fit a cache can exceed the copy.

The JSON file, schema "tiny-llama-kernel-benchmark/1":

    command, date, device, environment, precision, ceilings   as in a run record
    rows    {"operation", "batch_size", "sequence_length", "hidden_size", "unit": "GB/s" or "TFLOP/s", "amount": bytes or FLOPs,
            "contender", "ms": {"median", "p20", "p80", "count"}, "peak_mib": with the inputs, null on a CPU}
"""

import shlex
import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import kernels
import torch
from torch import Tensor

from common import ceilings, cli, versions
from common import device as devices
from common.analysis import tables
from common.config import ModelConfig
from common.errors import UsageError
from common.files import writable_folder, write_json
from common.precision import AMP_DTYPES, Precision
from common.rope import rope_tables
from common.timing import benchmark, summarize

SCHEMA = "tiny-llama-kernel-benchmark/1"
DEFAULT_OUT = Path("metrics_kernels.json")
ROUNDS, ITERATIONS = 3, 20
BYTES, FLOPS = "GB/s", "TFLOP/s"
Shape = tuple[ModelConfig, int, int]  # model, B, S


@dataclass(frozen=True)
class Case:
    """An operation at a shape: its tensors with gradients, other arguments, and what it moves or computes at least."""

    operation: str
    inputs: tuple[Tensor, ...]
    rest: tuple[Any, ...]
    unit: str
    amount: int

    def step(self, function: Callable) -> Callable[[], object]:
        """A forward and backward pass, for gradients that are made here."""
        outputs = function(*self.inputs, *self.rest)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        gradients = [torch.randn_like(output) for output in outputs]
        return lambda: torch.autograd.grad(function(*self.inputs, *self.rest), self.inputs, gradients)


def case(operation: str, shape: Shape, precision: Precision) -> Case:
    """The operation's inputs and work at a shape; B, S and the model's sizes as in `common.config`."""
    config, batch, length = shape
    device, dtype, size = precision.device, precision.dtype, precision.dtype.itemsize
    hidden, ffn, vocabulary, tokens = config.hidden_size, config.intermediate_size, config.vocab_size, batch * length
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def tensor(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device, dtype=dtype).requires_grad_()

    def parts(*widths: int) -> tuple[Tensor, ...]:
        """Of one [B, S, sum of the widths], as a fused product leaves them."""
        whole = torch.randn(batch, length, sum(widths), device=device, dtype=dtype)
        return tuple(part.requires_grad_() for part in whole.split(widths, dim=-1))

    def by_head(part: Tensor) -> Tensor:  # [B, S, heads Dh] -> [B, heads, S, Dh]
        return part.detach().unflatten(-1, (-1, head_dim)).transpose(1, 2).requires_grad_()

    if operation == "rms_norm":
        inputs = tensor(batch, length, hidden), tensor(hidden)
        return Case(operation, inputs, (config.rms_norm_eps,), BYTES, 5 * tokens * hidden * size)
    if operation == "add_rms_norm":
        inputs = tensor(batch, length, hidden), tensor(batch, length, hidden), tensor(hidden)
        return Case(operation, inputs, (config.rms_norm_eps,), BYTES, 8 * tokens * hidden * size)
    if operation == "swiglu":
        return Case(operation, parts(ffn, ffn), (), BYTES, 8 * tokens * ffn * size)
    if operation == "linear_cross_entropy":
        targets = torch.randint(vocabulary, (batch, length), device=device)
        inputs = tensor(batch, length, hidden), tensor(vocabulary, hidden)
        return Case(operation, inputs, (targets,), FLOPS, 3 * 2 * tokens * hidden * vocabulary)
    q, k, v = (by_head(part) for part in parts(hidden, kv_heads * head_dim, kv_heads * head_dim))
    if operation == "apply_rope":
        tables = tuple(table.to(device) for table in rope_tables(head_dim, length, config.rope_theta))
        return Case(operation, (q, k), tables, BYTES, 4 * tokens * head_dim * (heads + kv_heads) * size)
    product = 2 * hidden * batch * length * (length + 1) // 2
    return Case(operation, (q, k, v), (), FLOPS, 7 * product)


OPERATIONS = tuple(operation for names in kernels.SWITCHES.values() for operation in names)


def contenders(operation: str, device: torch.device, compiled: bool) -> dict[str, Callable]:
    """The functions to time, by name; a kernel only where one can run."""
    plain = getattr(kernels.REFERENCE, operation)
    found = {} if kernels.missing(device) else {"kernel": getattr(kernels.choose(device), operation)}
    found |= {"eager": plain}
    return found | ({"compiled": torch.compile(plain)} if compiled else {})


def time_case(work: Case, functions: dict[str, Callable], device: torch.device) -> dict[str, dict[str, Any]]:
    """Milliseconds, and on a GPU the peak memory of one pass, by contender."""
    steps = {name: work.step(function) for name, function in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            times[name] += benchmark(step, device, warmup=3, iterations=ITERATIONS)
    peaks = dict.fromkeys(steps)
    for name, step in steps.items() if devices.is_gpu(device) else ():
        devices.synchronize(device)
        devices.reset_peak_memory(device)
        step()
        peaks[name] = devices.peak_memory(device)["peak_mib"]
    return {name: {"ms": summarize(times[name]), "peak_mib": peaks[name]} for name in steps}


def measure(options: Namespace, shapes: list[Shape], operations: Sequence[str], compiled: bool) -> dict[str, Any]:
    """Times all operations at all shapes; the content of the JSON file.

    Args:
        options: device, seed, use_amp and amp_dtype as `common.cli` parses them.
    """
    device = devices.select(options.device)
    devices.prepare(device, options.seed)
    torch.use_deterministic_algorithms(False)  # training asks for it; eager gradients would pay for it here
    precision = Precision(device, AMP_DTYPES[options.amp_dtype] if options.use_amp else None)
    if reason := kernels.missing(device):
        print(f"no Triton kernels: {reason}; PyTorch's operations are timed alone", file=sys.stderr)
    elif kernels.INTERPRETED:
        print("the kernels are interpreted: their times say nothing about a GPU", file=sys.stderr)
    rows = []
    for shape in shapes:
        for operation in operations:
            torch.compiler.reset()  # or the compiler gives up after a few shapes
            work = case(operation, shape, precision)
            where = {"operation": operation, "batch_size": shape[1], "sequence_length": shape[2]}
            for name, figures in time_case(work, contenders(operation, device, compiled), device).items():
                row = {"hidden_size": shape[0].hidden_size, "unit": work.unit, "amount": work.amount, "contender": name}
                rows.append(where | row | figures)
    return {
        "schema": SCHEMA,
        "command": shlex.join(sys.argv), "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": devices.describe(device), "environment": devices.environment(),
        "precision": {"compute": precision.name, "tf32": False},
        "ceilings": ceilings.measure(device, precision),
        "rows": rows,
    }  # fmt: skip


def text(measured: dict[str, Any]) -> str:
    """A row per operation, shape and contender: times, rate, share of the ceiling, memory, and how often eager's speed."""
    peaks = {BYTES: measured["ceilings"]["bytes_per_second"], FLOPS: measured["ceilings"]["flops_per_second"]}
    body, eager = [], {}
    for row in measured["rows"]:
        if row["contender"] == "eager":
            eager[row["operation"], row["hidden_size"], row["sequence_length"]] = row["ms"]["median"]
    for row in measured["rows"]:
        ms, rate = row["ms"]["median"], row["amount"] / row["ms"]["median"] * 1e3
        body.append([
            row["operation"], f"{row['batch_size']} x {row['sequence_length']}", row["hidden_size"], row["contender"], ms,
            f"{tables.figure(row['ms']['p20'])} to {tables.figure(row['ms']['p80'])}",
            rate / 1e9 if row["unit"] == BYTES else None, rate / 1e12 if row["unit"] == FLOPS else None,
            100 * rate / peaks[row["unit"]], eager[row["operation"], row["hidden_size"], row["sequence_length"]] / ms,
            row["peak_mib"],
        ])  # fmt: skip
    header = ["operation", "B x S", "D", "contender", "ms", "p20 to p80", "GB/s", "TFLOP/s", "% of ceiling", "eager / it",
              "peak MiB"]  # fmt: skip
    kept = [i for i in range(len(header)) if any(row[i] is not None for row in body)]
    table = tables.text([header[i] for i in kept], [[row[i] for i in kept] for row in body])
    device, precision = measured["device"]["name"], measured["precision"]["compute"]
    return f"forward and backward of each operation, {precision}, {device}\n{table}"


def size(argument: str) -> tuple[int, int]:
    """ "1024x512" -> (1024, 512)."""
    hidden, separator, length = argument.partition("x")
    if not separator:
        raise ArgumentTypeError(f"{argument!r} is not HIDDENxLENGTH, such as 1024x512")
    return cli.positive(hidden), cli.positive(length)


def scaled(config: ModelConfig, hidden: int) -> ModelConfig:
    """The model at another hidden size, with the same head dimension, heads per key head, and ratio of F to D.

    Raises:
        UsageError: the hidden size cannot be cut into such heads.
    """
    groups = config.num_attention_heads // config.num_key_value_heads
    if hidden % (config.head_dim * groups):
        raise UsageError(f"--sizes: the model's heads need a hidden size in steps of {config.head_dim * groups}, not {hidden}")
    heads, ffn = hidden // config.head_dim, config.intermediate_size * hidden // config.hidden_size
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": heads // groups}
    return config.model_copy(update=sizes | {"intermediate_size": ffn})


def run(
    options: Namespace, sizes: Sequence[tuple[int, int]] = (), operations: Sequence[str] = OPERATIONS, compiled: bool = False
) -> None:
    """Measures, writes the JSON file and prints the table.

    Args:
        options: parsed, with model, batch_size, seq_len and metrics_out.
        sizes: hidden size and sequence length of each shape; empty for the model's own.
    """
    path = options.metrics_out or DEFAULT_OUT
    writable_folder(path.parent, "--metrics-out")
    shapes = [(scaled(options.model, hidden), options.batch_size, length) for hidden, length in sizes]
    measured = measure(options, shapes or [(options.model, options.batch_size, options.seq_len)], operations, compiled)
    write_json(path, measured)
    print(f"{text(measured)}\n  metrics      {path}")


def of_version(version: ModuleType, options: Namespace) -> None:
    """`--mode benchmark` of tiny_llama_v3.py: what is not switched off."""
    off = [operation for name in version.switched_off(options) for operation in kernels.SWITCHES[name]]
    run(options, operations=[operation for operation in OPERATIONS if operation not in off])


def main() -> None:
    parser = versions.parser(__doc__)
    parser.add_argument("--sizes", type=size, nargs="+", default=[], metavar="DxS", help="hidden size x sequence length, a sweep")
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS, metavar="NAME", help="default: all")
    parser.add_argument("--compile", action="store_true", help="also time PyTorch's operations under torch.compile")
    parser.add_argument("--metrics-out", type=Path, metavar="FILE", help=f"default: {DEFAULT_OUT}")
    options = parser.parse_args()
    run(versions.resolve(options), options.sizes, options.operations, options.compile)


if __name__ == "__main__":
    cli.command(main)
