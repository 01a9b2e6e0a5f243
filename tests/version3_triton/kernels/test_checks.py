"""What the kernels of Versions 3 and 4 refuse, called directly: bfloat16 in the interpreter, and
shapes that no kernel takes.
"""

from types import SimpleNamespace

from tests.oracle import DEVICE
from tracepage.errors import UsageError

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")
from version3_triton import kernels
from version3_triton.kernels import checks
from version4_ultra_fused.kernels import KERNELS as FUSED
from version4_ultra_fused.kernels import short_attention
from version4_ultra_fused.kernels.reference import Rope

only_interpreted = pytest.mark.skipif(not checks.INTERPRETED, reason="needs Triton's interpreter")


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


@only_interpreted
@pytest.mark.parametrize("kernel", [*kernels.KERNELS, *FUSED[1:], short_attention.attend_backward])
def test_the_interpreter_refuses_bfloat16_in_a_direct_call(kernel):
    """Whichever argument has it; and whichever device: the check looks at none."""
    for arguments in (
        [zeros(2, 4, dtype=torch.bfloat16)],
        [zeros(2, 4), torch.bfloat16],
        [zeros(2, 4), zeros(1).bfloat16()],
    ):
        with pytest.raises(UsageError, match="computes bfloat16 wrong"):
            kernel(*arguments)


@only_interpreted
def test_the_interpreter_refuses_autocast_to_bfloat16():
    x, weight = zeros(2, 4), zeros(4)
    with (
        torch.autocast(DEVICE.type, torch.bfloat16),
        pytest.raises(UsageError, match="computes bfloat16 wrong"),
    ):
        kernels.KERNELS.rms_norm(x, weight, 1e-5)


def there(device: str) -> SimpleNamespace:
    return SimpleNamespace(device=torch.device(device), dtype=torch.float32)


def test_another_gpu_than_the_current_one_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(UsageError, match=r"not on cuda:1: call torch.cuda.set_device\(1\)"):
        kernels.KERNELS.swiglu(there("cuda:1"), None)
    checks.refuse_other(there("cuda:0"))


@pytest.mark.parametrize("size", [0, 1, 3, 7])
def test_rope_refuses_a_head_dimension_of_which_it_cannot_turn_all(size):
    table, heads = zeros(5, size), zeros(1, 2, 5, size)
    with pytest.raises(UsageError, match=f"must be even and at least 2, not {size}"):
        Rope(table, table, 5)
    with pytest.raises(UsageError, match=f"must be even and at least 2, not {size}"):
        kernels.KERNELS.apply_rope(heads, heads, table, table)


@pytest.mark.parametrize(
    "name, shapes, message",
    [
        ("rms_norm", [(3, 0), (0,)], "D at least 1"),
        ("rms_norm", [(1, 70000), (70000,)], "at most 65536 .*, not 70000"),
        ("add_rms_norm", [(2, 3, 8), (1, 3, 8), (8,)], "in the same shape"),
        (
            "swiglu",
            [(4, 8), (1, 8)],
            r"one shape and type, not \[4, 8\] torch.float32 and \[1, 8\]",
        ),
        (
            "apply_rope",
            [(1, 2, 5, 8), (1, 2, 5, 8), (4, 8), (4, 8)],
            "tables hold 4 positions, not 5",
        ),
        ("apply_rope", [(1, 2, 5, 8), (1, 2, 3, 8), (9, 8), (9, 8)], "RoPE takes q and k alike"),
        ("attention", [(1, 1, 4, 160)] * 3, "head dimensions to 128, not 160"),
        (
            "attention",
            [(1, 4, 8, 16), (1, 3, 8, 16), (1, 3, 8, 16)],
            r"takes k and v alike but for fewer heads",
        ),
        ("linear_cross_entropy", [(2, 0, 8), (5, 8), (2, 0)], "there are none"),
        (
            "linear_cross_entropy",
            [(1, 4, 8), (5, 8), (1, 3)],
            r"not \[\[1, 4, 8\], \[5, 8\], \[1, 3\]\]",
        ),
    ],
)
def test_shapes_that_no_kernel_takes_are_refused_in_one_line(name, shapes, message):
    tensors = [zeros(*shape) for shape in shapes]
    if name == "linear_cross_entropy":
        tensors[-1] = tensors[-1].long()
    with pytest.raises(UsageError, match=message) as refusal:
        getattr(kernels.KERNELS, name)(*tensors, *([1e-5] if "norm" in name else []))
    assert "\n" not in str(refusal.value)
