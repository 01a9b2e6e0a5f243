"""Tests for the problems of the exercise, the same for starter/ and solution/ (adapter.py selects
one).

    pytest test_exercises.py -k exercise1_a       # one problem

On a GPU the kernels are compiled. Otherwise Triton's interpreter runs them on the CPU, in float32
and float16: its bfloat16 is wrong. The tests compare results with the same formulas in PyTorch, in
float64. NaN follows every input, to detect loads after its end.
"""

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
import plain_matmul  # noqa: E402

epilogues = adapter.load("exercise1_ultra_fusion")

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
ROUNDINGS = 16  # of float32: tolerance of the sums, in roundings of the largest number
TILE = adapter.Tile()
SHAPES = [(16, 16, 16), (1, 1, 1), (32, 64, 48), (17, 33, 20), (35, 19, 50)]  # M, and F or N, and K


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def random(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers, contiguous, with NaN after the last."""
    numbers = torch.randn(rows, columns)
    return adapter.new_output(numbers.to(DEVICE), rows, columns, dtype=dtype).copy_(numbers)


def check(got: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Asserts the dtype of `got`, and that one rounding to it, after float32, explains the
    difference to the float64 result.
    """
    assert got.dtype == dtype
    allowed = ROUNDINGS * torch.finfo(torch.float32).eps * exact.abs().max().item()
    torch.testing.assert_close(got.double(), exact, rtol=torch.finfo(dtype).eps / 2, atol=allowed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_matmul(m, n, k, dtype):
    """The kernel that is given: passes before anything is written. x is every second row, and w has
    gaps in its rows.
    """
    x = random(2 * m, k, dtype)[::2]
    w = random(n, 2 * k, dtype)[:, ::2]
    check(
        adapter.launch_matmul(plain_matmul.matmul_kernel, x, w, TILE),
        x.double() @ w.double().T,
        dtype,
    )


# Every shape in every number format, and two other tiles.
CASES = [(shape, dtype, TILE) for dtype in DTYPES for shape in SHAPES]
CASES += [
    ((35, 40, 50), torch.float32, adapter.Tile(*tile)) for tile in ((32, 16, 16), (16, 64, 32))
]


@pytest.mark.parametrize("shape, dtype, tile", CASES)
def test_exercise1_a_gate_up(shape, dtype, tile):
    m, f, k = shape
    x = random(m, k, dtype)
    gate = random(f, k, dtype)
    up = random(f, k, dtype)
    w = random(2 * f, k, dtype).copy_(torch.stack((gate, up), 1).flatten(0, 1))
    gate_up, y = adapter.launch_gate_up(epilogues.gate_up_kernel, x, w, tile)
    exact_gate = x.double() @ gate.double().T
    exact_up = x.double() @ up.double().T
    check(gate_up[:, 0::2], exact_gate, dtype)
    check(gate_up[:, 1::2], exact_up, dtype)
    check(y, F.silu(exact_gate) * exact_up, dtype)


@pytest.mark.parametrize("shape, dtype, tile", CASES)
def test_exercise1_b_residual(shape, dtype, tile):
    """In float32 whatever the dtype of the factors: a product that is rounded to 16 bits before the
    addition fails.
    """
    m, n, k = shape
    x = random(m, k, dtype)
    w = random(n, k, dtype)
    stream = random(m, n, torch.float32)
    out = adapter.launch_residual(epilogues.residual_kernel, x, w, stream, tile)
    check(out, stream.double() + x.double() @ w.double().T, torch.float32)
