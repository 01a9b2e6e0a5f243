"""Selects the file of an exercise to test, and launches its kernels.

    pytest test_exercises.py                               # starter/, which you fill in
    KERNEL_EXERCISES=solution pytest test_exercises.py     # solution/

A launcher takes your kernel and its inputs, makes the outputs, sets grid and block sizes, and
passes pointers, sizes and strides in the order of the kernel's arguments. Strides count elements,
not bytes. Inputs may be strided: where the kernel takes no stride for a gap, the launcher makes a
copy. Every output holds NaN, and so does the memory after it: an element that no program wrote
stays NaN, and a store after the end fails the test.
"""

import functools
import math
from pathlib import Path

import exercise_tools as exercises
from exercise_tools import launch, new_output
from tracepage.errors import UsageError

import torch
import triton
from torch import Tensor
from triton.runtime import KernelInterface

load = functools.partial(exercises.load, Path(__file__).parent)


def _without_gaps(x: Tensor) -> Tensor:
    """x with neighbouring elements in its last dimension; its other strides stay where it has them
    already.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def launch_add(
    kernel: KernelInterface, grid: tuple[int, ...], x: Tensor, y: Tensor, block: int
) -> Tensor:
    """x + y, both [size]; the learner computes the grid."""
    out = new_output(x, *x.shape)
    x = x.contiguous()
    y = y.contiguous()
    launch(kernel, grid, (out,), x, y, out, x.numel(), BLOCK=block)
    return out


def launch_softmax(kernel: KernelInterface, x: Tensor) -> Tensor:
    """Softmax of each row of x [rows, size], with any strides; one program per row."""
    rows, size = x.shape
    out = new_output(x, *x.shape)
    launch(kernel, (rows,), (out,), x, out, size, *x.stride(), BLOCK=triton.next_power_of_2(size))
    return out


def launch_rope(kernel: KernelInterface, x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Every head of x turned by its position, or turned back; one program per token and head.

    Args:
        x: [B, S, heads, Dh], Dh even. Tokens may have a stride; an x with other gaps is copied.
        cos, sin: [S, Dh], contiguous.
        sign: 1 forward, -1 backward.
    """
    batch, length, heads, head_dim = x.shape
    out = new_output(x, *x.shape)
    tokens = x.flatten(0, 1)
    if tokens.stride()[1:] != (head_dim, 1):
        tokens = tokens.contiguous()
    half = head_dim // 2
    grid = batch * length, heads
    sizes = {"HALF": half, "SIGN": sign, "BLOCK": triton.next_power_of_2(half)}
    launch(kernel, grid, (out,), tokens, cos, sin, out, length, tokens.stride(0), **sizes)
    return out


def launch_swiglu_forward(
    kernel: KernelInterface, gate: Tensor, up: Tensor, block: int = 64
) -> Tensor:
    """y [rows, size] of gate and up [rows, size], rows of both with any stride; one program for
    `block` elements of a row.
    """
    rows, size = gate.shape
    y = new_output(gate, *gate.shape)
    gate = _without_gaps(gate)
    up = _without_gaps(up)
    grid = rows, triton.cdiv(size, block)
    launch(kernel, grid, (y,), gate, up, y, size, gate.stride(0), up.stride(0), BLOCK=block)
    return y


def launch_swiglu_backward(
    kernel: KernelInterface, gate: Tensor, up: Tensor, dy: Tensor, block: int = 64
) -> tuple[Tensor, Tensor]:
    """dgate and dup, contiguous; shapes and strides as in the forward pass.

    Raises:
        UsageError: dy is not contiguous. The kernel would read the wrong elements.
    """
    if not dy.is_contiguous():
        raise UsageError(
            f"dy has strides {dy.stride()} and the kernel takes rows without gaps: "
            "pass dy.contiguous()"
        )
    rows, size = gate.shape
    outputs = (new_output(gate, *gate.shape), new_output(up, *up.shape))
    gate = _without_gaps(gate)
    up = _without_gaps(up)
    grid = rows, triton.cdiv(size, block)
    strides = (gate.stride(0), up.stride(0))
    launch(kernel, grid, outputs, gate, up, dy, *outputs, size, *strides, BLOCK=block)
    return outputs


def launch_log_sum_exp(kernel: KernelInterface, x: Tensor, block: int = 16) -> Tensor:
    """Log-sum-exp of each row of x [rows, size] in float32, rows with any stride; one program per
    row.
    """
    rows, size = x.shape
    lse = new_output(x, rows, dtype=torch.float32)
    x = _without_gaps(x)
    launch(kernel, (rows,), (lse,), x, lse, size, x.stride(0), BLOCK=block)
    return lse


def launch_attention(
    kernel: KernelInterface, q: Tensor, k: Tensor, v: Tensor, block_m: int = 16, block_n: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention; one program for `block_m` queries of a head.

    Args:
        q: [B, H, S, Dh], Dh 16, 32 or 64.
        k, v: [B, K, S, Dh], K divides H.

    Returns:
        o [B, H, S, Dh] with the dtype of q, log-sum-exp [B, H, S] in float32, and the number of key
        blocks that each program read, [B, H, ceil(S / block_m)] in int32, -1 if the kernel does not
        store it.
    """
    q, k, v = map(_without_gaps, (q, k, v))
    batch, heads, length, head_dim = q.shape
    programs = triton.cdiv(length, block_m)
    o = new_output(q, *q.shape)
    lse = new_output(q, batch, heads, length, dtype=torch.float32)
    visited = torch.full((batch, heads, programs), -1, dtype=torch.int32, device=q.device)
    launch(
        kernel,
        (programs, batch * heads),
        (o, lse),
        q,
        k,
        v,
        o,
        lse,
        visited,
        length,
        1 / math.sqrt(head_dim),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        H=heads,
        GROUPS=heads // k.shape[1],
        DIM=head_dim,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
    )
    return o, lse, visited
