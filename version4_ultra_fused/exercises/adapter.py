"""Selects the file of the exercise to test, and launches its kernels.

    pytest test_exercises.py                               # starter/, which you fill in
    KERNEL_EXERCISES=solution pytest test_exercises.py     # solution/

A launcher takes a kernel and its inputs, makes the outputs, and passes pointers, sizes and strides
in the order of the kernel's arguments. Every output holds NaN, and so does the memory after it. So
an element that no program wrote stays NaN, and a store after the end fails the test.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import exercise_tools as exercises
from exercise_tools import new_output

import triton
from torch import Tensor
from triton.runtime import KernelInterface

load = functools.partial(exercises.load, Path(__file__).parent)


class Tile(NamedTuple):
    """Rows and columns of a program's tile, and the depth of a step of the main loop; each a power
    of two, at least 16.
    """

    BM: int = 16
    BN: int = 32
    BK: int = 16


def _launch(
    kernel: KernelInterface,
    x: Tensor,
    w: Tensor,
    tile: Tile,
    outputs: tuple[Tensor, ...],
    *inputs: Tensor,
) -> None:
    M, K = x.shape
    N = w.shape[0]
    grid = (triton.cdiv(M, tile.BM), triton.cdiv(N, tile.BN))
    tensors = (x.contiguous(), w, *(tensor.contiguous() for tensor in inputs), *outputs)
    sizes = (M, N, K, *w.stride())
    exercises.launch(kernel, grid, outputs, *tensors, *sizes, **tile._asdict())


def launch_matmul(kernel: KernelInterface, x: Tensor, w: Tensor, tile: Tile) -> Tensor:
    """x W^T [M, N].

    x [M, K] is copied where it has gaps, as are other inputs but w [N, K], which may have any
    strides.
    """
    y = new_output(x, len(x), len(w))
    _launch(kernel, x, w, tile, (y,))
    return y


def launch_gate_up(
    kernel: KernelInterface, x: Tensor, w: Tensor, tile: Tile
) -> tuple[Tensor, Tensor]:
    """Gate and up, whose columns take turns, [M, 2 F], and silu(gate) up [M, F].

    x is [M, K], and w [2 F, K] has the rows of gate and up interleaved.
    """
    outputs = new_output(x, len(x), len(w)), new_output(x, len(x), len(w) // 2)
    _launch(kernel, x, w, tile, outputs)
    return outputs


def launch_residual(
    kernel: KernelInterface, x: Tensor, w: Tensor, stream: Tensor, tile: Tile
) -> Tensor:
    """stream + x W^T [M, N] in float32; x [M, K], w [N, K], stream [M, N] in float32."""
    out = new_output(stream, *stream.shape)
    _launch(kernel, x, w, tile, (out,), stream)
    return out
