"""Times each operation, forward and backward, as a Triton kernel and as PyTorch does it: at the
model's shapes, or over a sweep.

    python benchmark_kernels.py --preset small --use-amp
    python benchmark_kernels.py --preset small --use-amp --sizes 512x128 1024x512 4096x8192 --peers

`python tiny_llama_v3.py --mode benchmark` is the first of these with that script's flags. The
contenders, which take turns:

    kernel     Version 3's, from kernels/
    eager      PyTorch's operations in its place, from kernels/reference.py
    compiled   the same under torch.compile; with --peers, as the following
    liger      Liger-Kernel's, where it is installed and has one (`liger.py`)
    flash      attention in 16 bits: PyTorch's FlashAttention (version 2), whatever PyTorch takes
    cudnn      attention in 16 bits on NVIDIA: cuDNN's

Inputs are random and laid out as in the model: parts of a fused product are strided, but contiguous
for Liger. An operation and its gradients for all inputs are timed in two ways:

    host       called from Python as in training: at small sizes this is the time to launch it
    GPU        on a GPU the same, recorded as a graph and replayed, so that launches cost nothing

A contender that reads a number back to the host, as Liger's loss does, cannot be recorded. Its time
is held against the kernel's from Python.

From the second (on a CPU from the first) follow the GB/s of norms, RoPE and SwiGLU by the numbers
that they must read and write, and the TFLOP/s of attention (seven products of the pairs that are
not masked) and of the loss (three). Their share is that of a large copy or a matrix product here.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of this clone

import importlib.util
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from common import cli, ranks
from common import device as devices
from common.config import ModelConfig
from common.options import Options, RunOptions
from common.precision import Precision, amp_dtype
from common.timing import summarize
from common.training import ceilings, record
from studies import version_files
from tracepage.errors import UsageError
from tracepage.files import schema_of, writable_file, write_measurement
from tracepage.records.study_files import KernelBenchmark
from tracepage.terminal import progress
from tracepage.views.kernel_benchmark import render_kernel_benchmark
from version3_triton import kernels
from version3_triton.kernel_cases import Case, Shape, case, in_turns, replayed

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

OPERATIONS = tuple(operation for names in kernels.SWITCHES.values() for operation in names)
DEFAULT_OUT = Path("metrics_kernels.json")


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions(Options):
    metrics_out: Path | None
    allow_tf32: bool = False  # a flag of training alone


def contenders(operation: str, precision: Precision, peers: bool) -> dict[str, Callable]:
    """The functions to time, by name; a kernel only where one can run."""
    device = precision.device
    gpu = devices.is_gpu(device)
    plain = getattr(kernels.REFERENCE, operation)
    functions = {}
    if not kernels.missing(device):
        functions["kernel"] = getattr(kernels.KERNELS, operation)
    functions["eager"] = plain
    if not peers:
        return functions
    functions["compiled"] = devices.compiled(plain, device)
    if gpu and operation != "attention" and importlib.util.find_spec("liger_kernel"):
        from version3_triton import liger

        functions["liger"] = getattr(liger, operation)
    if gpu and operation == "attention" and precision.dtype.itemsize == 2:
        functions["flash"] = sdpa_kernel(SDPBackend.FLASH_ATTENTION)(plain)
        if torch.version.cuda:
            functions["cudnn"] = sdpa_kernel(SDPBackend.CUDNN_ATTENTION)(plain)
    return functions


def time_case(
    work: Case, functions: dict[str, Callable], device: torch.device
) -> dict[str, dict[str, Any]]:
    """Milliseconds, and on a GPU the peak memory of one pass, by contender."""
    steps = {
        name: work.step(function, separate=name == "liger") for name, function in functions.items()
    }
    times: dict[str, dict[str, list[float]]] = {"host_ms": in_turns(steps, device)}
    peaks = dict.fromkeys(steps)
    if devices.is_gpu(device):
        for name, step in steps.items():
            devices.synchronize(device)
            devices.reset_peak_memory(device)
            before = devices.peak_memory(device)["peak_mib"]
            step()
            peaks[name] = devices.peak_memory(device)["peak_mib"] - before
        captured = dict(steps)
        if work.operation == "linear_cross_entropy":
            captured.pop("liger", None)  # It reads a number back to the host.
        times["gpu_ms"] = replayed(captured, device)
    rows = {}
    for name in steps:
        rows[name] = {"host_ms": None, "gpu_ms": None, "peak_mib": peaks[name]}
        for key, values in times.items():
            if name in values:
                rows[name][key] = summarize(values[name])
    return rows


def measure(
    options: BenchmarkOptions | RunOptions,
    cases: list[Shape],
    operations: Sequence[str],
    peers: bool,
) -> Iterator[KernelBenchmark]:
    """Times all operations at all shapes: the content of the JSON file after each, with the rows so
    far.
    """
    device = devices.select(options.device)
    devices.configure(device, options.seed, options.allow_tf32, options.deterministic)
    precision = Precision(device, amp_dtype(options))
    reason = kernels.missing(device)
    if reason:
        print(f"no Triton kernels: {reason}; PyTorch's operations are timed alone", file=sys.stderr)
    elif kernels.INTERPRETED:
        kernels.refuse_wrong(precision.dtype)
        print("the kernels are interpreted: their times say nothing about a GPU", file=sys.stderr)
    schema = schema_of(KernelBenchmark)
    measured = record.header(
        schema, device, precision.name, options.allow_tf32, deterministic=options.deterministic
    )
    measured["ceilings"] = ceilings.measure(device, precision)
    measured["rows"] = []
    for shape in cases:
        config, batch_size, length = shape
        for operation in operations:
            torch.compiler.reset()  # Otherwise the compiler gives up after a few shapes.
            work = case(operation, shape, precision)
            functions = contenders(operation, precision, peers)
            for name, times in time_case(work, functions, device).items():
                row = {
                    "operation": operation,
                    "batch_size": batch_size,
                    "sequence_length": length,
                    "hidden_size": config.hidden_size,
                    "unit": work.unit,
                    "amount": work.amount,
                    "contender": name,
                }
                measured["rows"].append(row | times)
            yield cast(KernelBenchmark, measured)


def size(argument: str) -> tuple[int, int]:
    """ "1024x512" -> (1024, 512)."""
    hidden, separator, length = argument.partition("x")
    if not separator:
        raise ArgumentTypeError(f"{argument!r} is not HIDDENxLENGTH, such as 1024x512")
    return cli.positive(hidden), cli.positive(length)


def scaled(config: ModelConfig, hidden: int) -> ModelConfig:
    """The model at another hidden size, with the same head dimension, heads per key head, and ratio
    of F to D.

    Raises:
        UsageError: the hidden size cannot be cut into such heads.
    """
    groups = config.num_attention_heads // config.num_key_value_heads
    step = config.head_dim * groups
    if hidden % step:
        raise UsageError(
            f"--sizes: the model's heads need a hidden size in steps of {step}, not {hidden}"
        )
    sizes = {
        "hidden_size": hidden,
        "num_attention_heads": hidden // config.head_dim,
        "num_key_value_heads": hidden // step,
        "intermediate_size": config.intermediate_size * hidden // config.hidden_size,
    }
    return config.model_copy(update=sizes)


def shapes(options: BenchmarkOptions | RunOptions, sizes: Sequence[tuple[int, int]]) -> list[Shape]:
    """Those of a sweep over hidden sizes and sequence lengths; without one the model's own."""
    swept = [
        (scaled(options.model, hidden), options.batch_size, length) for hidden, length in sizes
    ]
    return swept or [(options.model, options.batch_size, options.seq_len)]


def run(
    options: BenchmarkOptions | RunOptions,
    sizes: Sequence[tuple[int, int]] = (),
    operations: Sequence[str] = OPERATIONS,
    peers: bool = False,
) -> None:
    """Measures, writes the JSON file, and prints the table.

    Args:
        sizes: hidden size and sequence length of each shape; empty for the model's own.
    """
    path = options.metrics_out or DEFAULT_OUT
    if not operations:
        raise UsageError("every operation is switched off: nothing is left to time")
    writable_file(path, "--metrics-out")
    with progress("timing the operations"):
        for measured in measure(options, shapes(options, sizes), operations, peers):
            write_measurement(path, measured, "--metrics-out")
    print(f"{render_kernel_benchmark(path).terminal()}\n\n  metrics      {path}")


def of_version(options: RunOptions) -> int:
    """`--mode benchmark` of tiny_llama_v3.py: the operations that are not switched off. Returns the
    exit code.
    """
    if ranks.here().world_size > 1:
        raise UsageError("--mode benchmark measures one process: start it without torchrun")
    run(
        options,
        operations=[
            name
            for switch, names in kernels.SWITCHES.items()
            if options.switches[switch]
            for name in names
        ],
    )
    return 0


def main() -> None:
    parser = version_files.parser(__doc__, "--capture-step")
    parser.add_argument(
        "--sizes",
        type=size,
        nargs="+",
        default=[],
        metavar="DxS",
        help="hidden size x sequence length, a sweep",
    )
    parser.add_argument(
        "--operations",
        nargs="+",
        choices=OPERATIONS,
        default=OPERATIONS,
        metavar="NAME",
        help="default: all",
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="also time torch.compile, Liger-Kernel, FlashAttention and cuDNN",
    )
    parser.add_argument("--metrics-out", type=Path, metavar="FILE", help=f"default: {DEFAULT_OUT}")
    arguments = cli.parse(parser)
    if arguments.sizes and arguments.seq_len:
        parser.error("--sizes names the sequence lengths: leave --seq-len out")
    run(
        cli.resolve(BenchmarkOptions, arguments),
        arguments.sizes,
        arguments.operations,
        arguments.peers,
    )


if __name__ == "__main__":
    cli.command(main)
