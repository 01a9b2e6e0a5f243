"""Compiles every kernel for the GPUs of both vendors, without having one, and shows what each needs of a multiprocessor.

    python compile_kernels.py                              # gfx90a gfx942 gfx950 sm_80 sm_90
    python compile_kernels.py --targets gfx942 --dtypes bf16
    python compile_kernels.py --output ../results/compiled/kernels.json

A summary of several Tritons takes a run of the last command with each of them, and then one of

    python compile_kernels.py --summarize triton_3.6.json triton_3.7.json --output ../results/compiled/tritons.json

The kernels are launched as in training, in 16 bits under autocast, forward and backward. A driver that compiles and does not run
stands in for the GPU's. With Triton 3.6 and 3.7 no kernel spills at the sizes below (others: LOG.md). Other cases do: norms of
rows much wider than 4,096, and with `--allow-tf32` the keys' kernel in float32 (16 bytes on sm_90 at head dimension 80).

    registers        of a thread; on AMD its vector registers, accumulation registers included
    spills           values that did not fit into registers and live in memory, which is slow. On AMD it is the number of such
                     registers, vector and scalar; on NVIDIA the bytes that a thread stores and loads for them, as ptxas counts
    shared_bytes     of shared memory (LDS on AMD), for a program
"""

import os
import shlex
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from common import cli
from common.progress import progress
from common.records import kernel_files

os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported
cli.require("triton")

from common.analysis.output import tables
from common.documents import compiled_kernels
from common.errors import UsageError
from common.files import writable_file, write_json
from common.rope import rope_tables
from version3_triton.kernels.flash_attention import attention
from version3_triton.kernels.linear_cross_entropy import linear_cross_entropy
from version3_triton.kernels.offline import TARGETS, compiling_for, resources
from version3_triton.kernels.rms_norm import add_rms_norm, rms_norm
from version3_triton.kernels.rope import apply_rope
from version3_triton.kernels.swiglu import swiglu

import torch
import triton
from triton.runtime.jit import JITFunction

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SIZES = {  # by file: the length of a row, or the head dimension
    "rms_norm": ("D", 256, 512, 1024, 2048, 4096),
    "swiglu": ("F", 256, 4096, 5632),
    "linear_cross_entropy": ("V", 256, 1000, 4096, 32000),
    "rope": ("Dh", 16, 64, 80, 128),
    "flash_attention": ("Dh", 16, 32, 64, 80, 128),
}
CASES = [(file, size) for file, (_, *sizes) in SIZES.items() for size in sizes]


def launches(file: str, size: int, dtype: torch.dtype) -> list[Callable]:
    """The operations of a file at a size, on small tensors.

    The size decides what is compiled, and whether the other lengths are multiples of 16, as here they are.
    """

    def tensor(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype).requires_grad_()

    if file == "rms_norm":
        weight, residual = torch.ones(size, requires_grad=True), torch.ones(16, size)
        return [
            lambda: rms_norm(torch.zeros(16, size, requires_grad=True), weight, 1e-5),  # the embedding
            lambda: add_rms_norm(tensor(16, size), residual, weight, 1e-5),
            lambda: add_rms_norm(tensor(16, size), residual, weight, 1e-5)[1],  # the last norm, whose sum goes nowhere
        ]
    if file == "swiglu":
        return [lambda: swiglu(tensor(16, size), tensor(16, size))]
    if file == "linear_cross_entropy":
        return [lambda: linear_cross_entropy(tensor(1, 16, 16), tensor(size, 16), torch.zeros(1, 16).long())]
    if file == "rope":
        return [lambda: apply_rope(tensor(1, 4, 64, size), tensor(1, 2, 64, size), *rope_tables(size, 64, 1e4))]
    return [lambda: attention(tensor(1, 4, 64, size), *(tensor(1, 2, 64, size) for _ in range(2)))]


def compile_all(name: str, dtypes: Collection[str] = DTYPES, cases: Collection[tuple[str, int]] = CASES) -> list[dict[str, Any]]:
    """A row per kernel, number format and size for one target.

    Args:
        name: a key of TARGETS.
        dtypes: keys of DTYPES.
        cases: file and size, some of CASES.
    """
    found: dict[tuple, dict[str, Any]] = {}
    where: dict[str, str] = {}

    def take(function: JITFunction, kernel: Any, options: dict[str, Any], ptxas_log: str) -> None:
        sizes = [value for key, value in options.items() if key in ("ROWS", "BLOCK", "BLOCK_M", "BLOCK_N")]
        name_in_file = function.fn.__name__.removeprefix("_").removeprefix(f"{where['file']}_")
        what = " + ".join([name_in_file, *(key.lower() for key, value in options.items() if value is True)])
        found[(*where.values(), what)] = {
            "target": name, **where, "kernel": what, "blocks": " x ".join(map(str, sizes)),
            "warps": kernel.metadata.num_warps, "stages": kernel.metadata.num_stages, **resources(kernel, ptxas_log),
        }  # fmt: skip

    with compiling_for(name, take):
        for dtype in dtypes:
            for file, size in cases:
                where |= {"dtype": dtype, "file": file, "size": f"{SIZES[file][0]} = {size}"}
                for call in launches(file, size, DTYPES[dtype]):
                    with torch.autocast("cpu", DTYPES[dtype], enabled=dtype != "fp32"):
                        outputs = call()
                    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    return list(found.values())


def shown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table, in which a terminal has room for registers and spills."""
    return tables.text(list(rows[0]), [list(row.values()) for row in rows], least=("stages", "warps", "blocks"))


def main() -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="ARCH", help="default: all five")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), metavar="DTYPE", help="default: all three")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="also write the rows, with the version of triton")
    parser.add_argument(
        "--summarize",
        type=Path,
        nargs="+",
        metavar="FILE.json",
        help="compile nothing; write a summary of these files to --output",
    )
    options = parser.parse_args()
    if options.summarize and not options.output:
        raise UsageError("--summarize needs --output FILE.json")
    if options.output:
        writable_file(options.output, "--output")
    command = shlex.join(sys.argv)
    if options.summarize:
        schema = kernel_files.SUMMARY
        write_json(options.output, {"schema": schema, "command": command, **compiled_kernels.summary(options.summarize)})
        return
    with progress(f"compiling for {', '.join(options.targets)}"):
        rows = [row for name in options.targets for row in compile_all(name, options.dtypes)]
    if options.output:
        schema = kernel_files.COMPILED
        write_json(options.output, {"schema": schema, "triton": triton.__version__, "command": command, "rows": rows})
    print(shown(rows))


if __name__ == "__main__":
    cli.command(main)
