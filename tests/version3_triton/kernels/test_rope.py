"""The rotary embedding's kernel against float64."""

from collections.abc import Callable

from common import rope
from common.errors import UsageError
from tests.conftest import runs_kernels
from tests.oracle import DEVICE, DTYPES, check

import pytest
import torch

pytest.importorskip("triton")
from version3_triton.kernels.rope import apply_rope

pytestmark = runs_kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads, length, head_dim", [(4, 4, 1, 2), (4, 2, 33, 24), (3, 1, 64, 16), (2, 2, 7, 80)])
def test_rope(heads, kv_heads, length, head_dim, dtype):
    """q and k as they come from one fused product: strided views."""
    cos, sin = (table.to(DEVICE) for table in rope.rope_tables(head_dim, length + 3, 1e4))

    def split(operation: Callable) -> Callable:
        def run(qkv):
            q, k = qkv.unflatten(-1, (-1, head_dim)).transpose(1, 2).split([heads, kv_heads], dim=1)
            wide = (cos.to(qkv.dtype), sin.to(qkv.dtype)) if qkv.dtype == torch.float64 else (cos, sin)
            return operation(q, k, *wide)

        return run

    check(split(apply_rope), split(rope.apply_rope), [torch.randn(2, length, (heads + kv_heads) * head_dim)], dtype)


@pytest.mark.parametrize(
    "shapes, message",
    [
        ([(1, 2, 5, 8), (1, 2, 5, 8), (4, 8), (4, 8)], "tables hold 4 positions, not 5"),
        ([(1, 2, 5, 8), (1, 2, 3, 8), (9, 8), (9, 8)], "RoPE takes q and k alike"),
        ([(1, 2, 5, 8), (1, 2, 5, 8), (9, 16), (9, 16)], "RoPE takes q and k alike"),
    ],
    ids=["positions", "lengths", "table"],
)
def test_wrong_shapes_are_refused(shapes, message):
    with pytest.raises(UsageError, match=message):
        apply_rope(*(torch.randn(shape, device=DEVICE) for shape in shapes))
