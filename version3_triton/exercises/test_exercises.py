"""Tests for the problems of the exercises, the same for starter/ and solution/ (adapter.py selects
one).

    pytest test_exercises.py -k exercise1         # one exercise
    pytest test_exercises.py -k exercise1_b       # one problem
    pytest test_exercises.py -k rope              # the optional one of exercise 1

On a GPU the kernels are compiled. Otherwise Triton's interpreter runs them on the CPU, in float32
and float16: its bfloat16 is wrong. The tests compare results with float64. NaN follows the rows and
columns of an input, to detect loads after its end.
"""

import math
import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton")

import adapter  # noqa: E402

basics = adapter.load("exercise1_triton_basics")
rope = adapter.load("rope")
swiglu = adapter.load("exercise2_swiglu_optimization")
flash = adapter.load("exercise3_flash_attention")

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
ROUNDINGS = 16  # tolerance, in roundings of the largest number


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers in a larger tensor, which has 64 more rows and 3 more columns of NaN."""
    *leading, rows, columns = shape
    larger = torch.full((*leading, rows + 64, columns + 3), math.nan, dtype=dtype, device=DEVICE)
    part = larger[..., :rows, :columns]
    return part.copy_(torch.randn(shape))


def check(
    got: Tensor | None, exact: Tensor, dtype: torch.dtype, inside: torch.dtype = torch.float32
) -> None:
    """Asserts the dtype of `got`, and that rounding in the dtype `inside` explains its difference
    to the float64 result.
    """
    assert got is not None and got.dtype == dtype
    allowed = ROUNDINGS * torch.finfo(inside).eps * exact.abs().max().item()
    torch.testing.assert_close(got.double(), exact, rtol=torch.finfo(dtype).eps, atol=allowed)


@pytest.mark.parametrize("size, programs", [(1, 1), (64, 1), (65, 2), (1000, 16)])
def test_exercise1_a_add(size, programs):
    assert tuple(basics.add_grid(size, 64)) == (programs,)
    x, y = torch.randn(2, size, device=DEVICE)
    out = adapter.launch_add(basics.add_kernel, basics.add_grid(size, 64), x, y, 64)
    assert torch.equal(out, x + y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, size, shift", [(1, 1, 0), (3, 20, -1000), (5, 37, 0), (2, 1000, 1000)]
)
def test_exercise1_b_softmax(rows, size, shift, dtype):
    """exp(1000) is infinite and exp(-1000) is 0 in float32."""
    x = random(rows, size, dtype=dtype).add_(shift)
    check(adapter.launch_softmax(basics.softmax_kernel, x), x.double().softmax(1), dtype)


# Dh / 2 of 5 is no power of two
ROPE_SHAPES = [(1, 1, 1, 2), (1, 7, 3, 16), (2, 5, 3, 10), (3, 7, 2, 64)]


def rope_inputs(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, S, heads, Dh] with NaN after each token, and tables [S, Dh] of random angles."""
    batch, length, heads, head_dim = shape
    x = random(batch, length, heads * head_dim, dtype=dtype).unflatten(2, (heads, head_dim))
    angles = torch.randn(length, head_dim // 2, device=DEVICE).repeat(1, 2)
    return x, angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in float64."""
    a, b = x.double().chunk(2, dim=-1)
    return x.double() * cos.double()[:, None] + torch.cat((-b, a), dim=-1) * sin.double()[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ROPE_SHAPES, ids=str)
def test_rope_forward(shape, dtype):
    x, cos, sin = rope_inputs(shape, dtype)
    check(adapter.launch_rope(rope.rope_kernel, x, cos, sin, 1), rotated(x, cos, sin), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ROPE_SHAPES, ids=str)
def test_rope_backward(shape, dtype):
    """With SIGN = -1 the kernel makes the gradient of x from that of the output."""
    x, cos, sin = rope_inputs(shape, dtype)
    dy = torch.randn(shape, device=DEVICE).to(dtype)
    x = x.double().requires_grad_()
    (exact,) = torch.autograd.grad(rotated(x, cos, sin), x, dy.double())
    check(adapter.launch_rope(rope.rope_kernel, dy, cos, sin, -1), exact, dtype)


SWIGLU_SHAPES = [(1, 1), (3, 64), (2, 65), (5, 150)]


def gate_and_up(rows: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each with its own stride of a row."""
    return random(rows, size, dtype=dtype).mul_(2), random(2 * rows, size, dtype=dtype)[::2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, size", SWIGLU_SHAPES)
def test_exercise2_a_forward(rows, size, dtype):
    gate, up = gate_and_up(rows, size, dtype)
    y = adapter.launch_swiglu_forward(swiglu.swiglu_forward_kernel, gate, up)
    check(y, F.silu(gate.double()) * up.double(), dtype)


def gradients(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """The gradients of autograd, in float64."""
    gate, up = (x.detach().double().requires_grad_() for x in (gate, up))
    return torch.autograd.grad(F.silu(gate) * up, (gate, up), dy.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, size", SWIGLU_SHAPES)
def test_exercise2_b_backward(rows, size, dtype):
    (gate, up), dy = (
        gate_and_up(rows, size, dtype),
        torch.randn(rows, size, device=DEVICE).to(dtype),
    )
    got = adapter.launch_swiglu_backward(swiglu.swiglu_backward_kernel, gate, up, dy)
    for gradient, exact in zip(got, gradients(gate, up, dy), strict=True):
        check(gradient, exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exercise2_c_function(dtype):
    """With views, as in the model, so that the gradients of both halves are parts of one tensor."""
    both = torch.randn(6, 2 * 70, device=DEVICE).to(dtype).requires_grad_()
    dy = torch.randn(6, 70, device=DEVICE).to(dtype)
    y = swiglu.SwiGLU.apply(*both.chunk(2, dim=1))
    y.backward(dy)
    gate, up = both.detach().chunk(2, dim=1)
    check(y.detach(), F.silu(gate.double()) * up.double(), dtype)
    check(both.grad, torch.cat(gradients(gate, up, dy), dim=1), dtype)


def test_exercise2_c_function_saves_its_inputs_alone():
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x.data_ptr()), lambda x: x
    ):
        gate, up = (torch.randn(3, 10, device=DEVICE, requires_grad=True) for _ in range(2))
        swiglu.SwiGLU.apply(gate, up)
    assert sorted(saved) == sorted([gate.data_ptr(), up.data_ptr()])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size, step", [(1, 0), (17, 0), (50, -100), (50, 100)])
def test_exercise3_a_log_sum_exp(size, step, dtype):
    """With a step, the numbers of each block are far below or above those of the block before."""
    x = random(3, size, dtype=dtype).add_(step * (torch.arange(size, device=DEVICE) // 16))
    check(
        adapter.launch_log_sum_exp(flash.log_sum_exp_kernel, x),
        x.double().logsumexp(1),
        torch.float32,
    )


def heads_of_one_product(
    heads: int, kv_heads: int, length: int, head_dim: int, dtype: torch.dtype = torch.float32
):
    """q, k, v [2, heads, S, Dh] as views of one tensor [2, S, (H + 2 K) Dh], with NaN after each
    position and each batch.
    """
    qkv = random(2, length, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    return (
        qkv.unflatten(-1, (-1, head_dim)).transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
    )


def check_attention(q: Tensor, k: Tensor, v: Tensor, **blocks: int) -> None:
    """Compares o and log-sum-exp with float64."""
    o, lse, _ = adapter.launch_attention(flash.attention_forward_kernel, q, k, v, **blocks)
    wide_k, wide_v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q.double() @ wide_k.transpose(2, 3) / math.sqrt(q.shape[3])
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    # The factors of the second matmul have that dtype.
    check(o, scores.softmax(-1) @ wide_v, q.dtype, inside=q.dtype)
    check(lse, scores.logsumexp(-1), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "length, head_dim, factor", [(16, 16, 1), (1, 32, 1), (40, 16, 6), (50, 64, 1)]
)
def test_exercise3_b_attention(length, head_dim, factor, dtype):
    """In float32 the exponential of a score over 88 is infinite."""
    q, k, v = heads_of_one_product(2, 2, length, head_dim, dtype)
    check_attention(q.mul_(factor), k.mul_(factor), v)


@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (3, 1)])
def test_exercise3_c_grouped_heads(heads, kv_heads):
    check_attention(*heads_of_one_product(heads, kv_heads, 20, 16))


TILINGS = [(1, 16, 16), (16, 16, 16), (70, 16, 16), (65, 16, 32), (70, 32, 16)]


@pytest.mark.parametrize("length, block_m, block_n", TILINGS)
def test_exercise3_d_visited_blocks(length, block_m, block_n):
    """The number of tiles in which a query sees a key."""
    i = torch.arange(length)
    tiles = i[:, None] // block_m * length + i[None, :] // block_n
    visible = tiles[i[None, :] <= i[:, None]]
    assert flash.visited_blocks(length, block_m, block_n) == visible.unique().numel()


@pytest.mark.parametrize("length, block_m, block_n", TILINGS)
def test_exercise3_d_the_kernel_skips_the_others(length, block_m, block_n):
    q, k, v = heads_of_one_product(1, 1, length, 16)
    _, _, visited = adapter.launch_attention(
        flash.attention_forward_kernel, q, k, v, block_m, block_n
    )
    assert visited.sum(-1).unique().tolist() == [flash.visited_blocks(length, block_m, block_n)]
