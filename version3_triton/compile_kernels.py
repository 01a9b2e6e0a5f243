"""Compiles every kernel for the GPUs of both vendors, without having one, and shows what each needs of a multiprocessor.

    python compile_kernels.py                              # gfx90a gfx942 gfx950 sm_80 sm_90
    python compile_kernels.py --targets sm_75 --dtypes fp16     # for a T4: some minutes
    python compile_kernels.py --targets gfx942 --dtypes bf16
    python compile_kernels.py --output ../results/compiled/kernels.json

A summary of several Tritons takes a run of the last command with each of them, and then one of

    python compile_kernels.py --summarize triton_3.6.json triton_3.7.json --output ../results/compiled/tritons.json

The kernels are launched as in training, in 16 bits under autocast, forward and backward. With Triton 3.6 and 3.7 no kernel spills
at the sizes below (others: LOG.md). Other cases do: norms of rows much wider than 4,096, and with `--allow-tf32` the keys' kernel
in float32 (16 bytes on sm_90 at head dimension 80).

    registers        of a thread; on AMD its vector registers, accumulation registers included
    agprs            the accumulation registers among them, on AMD
    spills           values that did not fit into registers and live in memory, which is slow. On AMD it is the number of such
                     registers, vector and scalar; on NVIDIA the bytes that a thread stores and loads for them, as ptxas counts
    scratch_bytes    of memory of a thread's own, for spilled values and for arrays
    shared_bytes     of shared memory (LDS on AMD), for a program
    occupancy        percent of a multiprocessor's warps that can be resident at once, by registers, warps and shared memory
    mfma, memory, lds    instructions of AMD's machine code: matrix products, loads and stores of memory, and of LDS
"""

import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

import functools
import os
from collections.abc import Callable

from common import cli

os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported
cli.require("triton")

from common.rope import rope_tables
from version3_triton.kernels import offline
from version3_triton.kernels.flash_attention import attention
from version3_triton.kernels.linear_cross_entropy import linear_cross_entropy
from version3_triton.kernels.rms_norm import add_rms_norm, rms_norm
from version3_triton.kernels.rope import apply_rope
from version3_triton.kernels.swiglu import swiglu

import torch
from torch import Tensor


def launch(operation: Callable[..., Tensor | tuple[Tensor, ...]], dtype: torch.dtype, *arguments: object) -> None:
    """Forward under autocast, as in training, and backward."""
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        outputs = operation(*arguments)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def tensor(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, requires_grad=True)


# The launches at a size, on small tensors: the size decides what is compiled, and whether the other lengths are multiples of 16,
# as here they are.


def norms(size: int, dtype: torch.dtype) -> None:
    x, residual, weight = tensor(torch.float32, 16, size), torch.ones(16, size), torch.ones(size, requires_grad=True)
    launch(rms_norm, dtype, x, weight, 1e-5)  # the norm of the embedding
    launch(add_rms_norm, dtype, tensor(dtype, 16, size), residual, weight, 1e-5)
    # The last norm of a model, whose sum is not used.
    launch(lambda *arguments: add_rms_norm(*arguments)[1], dtype, tensor(dtype, 16, size), residual, weight, 1e-5)


def activation(size: int, dtype: torch.dtype) -> None:
    launch(swiglu, dtype, tensor(dtype, 16, size), tensor(dtype, 16, size))


def loss(size: int, dtype: torch.dtype) -> None:
    launch(linear_cross_entropy, dtype, tensor(dtype, 1, 16, 16), tensor(dtype, size, 16), torch.zeros(1, 16).long())


def rotation(size: int, dtype: torch.dtype) -> None:
    launch(apply_rope, dtype, tensor(dtype, 1, 4, 64, size), tensor(dtype, 1, 2, 64, size), *rope_tables(size, 64, 1e4))


def heads(size: int, dtype: torch.dtype) -> None:
    launch(attention, dtype, tensor(dtype, 1, 4, 64, size), *(tensor(dtype, 1, 2, 64, size) for _ in range(2)))


TABLE = [
    offline.Launch(f"{letter} = {size}", functools.partial(run, size))
    for letter, run, sizes in (
        ("D", norms, (256, 512, 1024, 2048, 4096)), ("F", activation, (256, 4096, 5632)), ("V", loss, (256, 1000, 4096, 32000)),
        ("Dh", rotation, (16, 64, 80, 128)), ("Dh", heads, (16, 32, 64, 80, 128)),
    )
    for size in sizes
]  # fmt: skip

if __name__ == "__main__":
    cli.command(lambda: offline.main(__doc__, TABLE, list(offline.DTYPES)))
