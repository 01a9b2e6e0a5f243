"""Attention on packed q, k and v: its result and its gradient before RoPE, by each of its kernels,
against float64.
"""

import sys
from types import SimpleNamespace

from common.rope import rope_tables
from tests.conftest import runs_kernels
from tests.oracle import DEVICE, as_accurate, for_hopper
from tracepage.errors import UsageError

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
from version3_triton import kernels as third_kernels
from version4_ultra_fused.kernels import (
    KERNELS,
    REFERENCE,
    attention,
    reference,
    short_attention,
)
from version4_ultra_fused.kernels.attention import CausalAttention
from version4_ultra_fused.kernels.reference import Rope

# B, S, H, K, Dh
SHAPES = [
    (2, 48, 4, 2, 32),
    (1, 128, 2, 2, 64),
    (3, 17, 4, 1, 24),
    (1, 1, 2, 1, 16),
    (1, 33, 6, 2, 16),
    (1, 128, 4, 2, 32),
]


def attend(shape, dtype: torch.dtype, operations=KERNELS, fa4: bool = False) -> tuple:
    """The attention, its result, its gradient and the sum of that by q, k and v, for the same
    numbers in any dtype.

    Beside the attention: whether that sum is its kernel's.
    """
    batch, length, heads, kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(0)
    sizes = (batch * length, (heads + 2 * kv_heads) * head_dim), (batch * length, heads * head_dim)
    # Both roundings: exact in every dtype.
    numbers = (torch.randn(*size, generator=generator).half().bfloat16() for size in sizes)
    qkv, dout = (tensor.to(DEVICE, dtype) for tensor in numbers)
    wide = torch.float64 if dtype == torch.float64 else None
    cos, sin = (table.to(DEVICE, wide) for table in rope_tables(head_dim, length, 1e4))
    found = CausalAttention(
        qkv,
        Rope(cos, sin, length),
        (heads, kv_heads, kv_heads),
        {"fa4": fa4},
        operations if wide is None else REFERENCE,
    )
    gradient, dots = found.gradient(dout)
    before = reference.rotate(qkv, Rope(cos, -sin, length), (heads + kv_heads) * head_dim)
    products = (gradient.double() * before.double()).sum(1)  # of q, k and v before RoPE
    return (found, dots is not None), found.out, gradient, products if dots is None else dots.sum(0)


@pytest.mark.parametrize(
    "shape, dtype, form",
    [
        pytest.param(shape, torch.float16, form, marks=[runs_kernels, for_hopper])
        for shape in SHAPES
        for form in ("short", "short, sums")
    ]
    + [pytest.param(shape, torch.float32, "version3", marks=runs_kernels) for shape in SHAPES[:3:2]]
    + [(SHAPES[0], torch.float32, "library")],
    ids=str,
)
def test_each_form_against_float64(monkeypatch, shape, dtype, form):
    """The kernel for short sequences, which repeats; Version 3's where that does not reach;
    PyTorch's without kernels.
    """
    operations = REFERENCE if form == "library" else KERNELS
    monkeypatch.setattr(
        short_attention, "largest", lambda epilogue, depth: 1 << 40 if form == "short, sums" else 0
    )
    (found, sums), *ours = attend(shape, dtype, operations)
    short = form.startswith("short")
    assert sums == (form == "short, sums") and found.form == form.removesuffix(", sums")
    # where no kernel adds up, `attend` does so itself, from rounded numbers
    compared = 2 if form == "short" else 3
    for got, right in zip(
        ours[:compared], attend(shape, torch.float64)[1 : 1 + compared], strict=True
    ):
        assert got.shape == right.shape
        assert (got.double() - right).abs().max() <= (2e-3 if short else 1e-5) * max(
            right.abs().max(), 1e-3
        )
    assert not short or all(
        torch.equal(a, b) for a, b in zip(ours, attend(shape, dtype)[1:], strict=True)
    )


@pytest.mark.parametrize(
    "length, head_dim, dtype, mode, on_sm_90, elsewhere",
    [
        (128, 64, torch.bfloat16, "", "short", "version3"),
        (128, 64, torch.float32, "", "version3", "version3"),
        (128, 128, torch.bfloat16, "", "version3", "version3"),
        (256, 64, torch.bfloat16, "", "version3", "version3"),
        (512, 64, torch.bfloat16, "", "library", "library"),
        (512, 64, torch.bfloat16, "exact", "version3", "version3"),
        (128, 136, torch.bfloat16, "exact", "library", "library"),
        (16, 16, torch.float64, "exact", "library", "library"),
        (1024, 64, torch.bfloat16, "fa4", "fa4", "fa4"),
        (1024, 64, torch.bfloat16, "fa4, exact", "fa4", "fa4"),
        (1023, 64, torch.bfloat16, "fa4", "library", "library"),
        (1024, 64, torch.float32, "fa4", "library", "library"),
    ],
)
def test_the_form_follows_the_shape_the_gpu_and_the_mode(
    monkeypatch, length, head_dim, dtype, mode, on_sm_90, elsewhere
):
    torch.use_deterministic_algorithms("exact" in mode)
    switches = {"fa4": "fa4" in mode}
    monkeypatch.setattr(attention, "INTERPRETED", False)
    for family, expected in (("sm_90", on_sm_90), ("sm_80", elsewhere), ("hip", elsewhere)):
        monkeypatch.setattr(attention.launch_sizes, "family", lambda family=family: family)
        q = torch.empty((), dtype=dtype, device=DEVICE)
        assert attention.form(q.expand(65535, 1, length, head_dim), switches) == expected
        more = "fa4" if expected == "fa4" else "library"
        assert attention.form(q.expand(32768, 2, length, head_dim), switches) == more, (
            "our grid has no more rows"
        )


@runs_kernels
@pytest.mark.parametrize("exact", [False, True])
def test_flash_attention_4_against_float64(monkeypatch, exact):
    """Where its package is missing, a module in its place computes the same with PyTorch, for
    tensors [B, S, H or K, Dh].
    """

    def flash_attn_func(q, k, v, causal, deterministic):
        assert causal and deterministic == exact
        return third_kernels.reference.attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(
            1, 2
        ), None

    if not attention.find_spec("flash_attn"):
        monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
        monkeypatch.setitem(
            sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_func=flash_attn_func)
        )
    shape = 1, attention.FA4, 2, 1, 64
    exactly = attend(shape, torch.float64)[1:3]
    torch.use_deterministic_algorithms(exact)  # in which cuBLAS would refuse float64
    (found, _), *ours = attend(shape, torch.float16, fa4=True)
    assert found.form == "fa4"
    for got, right in zip(ours[:2], exactly, strict=True):
        assert (got.double() - right).abs().max() <= 2e-3 * right.abs().max()
    again = attend(shape, torch.float16, fa4=True)[1:3]
    assert not exact or all(torch.equal(a, b) for a, b in zip(ours, again, strict=False))


@pytest.mark.gpu
@pytest.mark.skipif(not attention.find_spec("flash_attn"), reason="needs flash-attn-4")
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 2048, 32, 4, 64), (2, 1500, 8, 4, 128), (1, 1024, 4, 4, 32)], ids=str
)
def test_the_package_of_flash_attention_4_is_as_accurate_as_pytorch(shape, exact):
    """In bf16, of large's heads, of medium's at a length that no tile divides, and ungrouped."""
    theirs = attend(shape, torch.bfloat16, REFERENCE)[1:3]
    right = attend(shape, torch.float64)[1:3]
    torch.use_deterministic_algorithms(exact)
    (found, _), *ours = attend(shape, torch.bfloat16, fa4=True)
    assert found.form == "fa4"
    as_accurate(ours[:2], theirs, right, torch.finfo(torch.bfloat16).eps)
    again = attend(shape, torch.bfloat16, fa4=True)[1:3]
    assert not exact or all(torch.equal(a, b) for a, b in zip(ours[:2], again, strict=True))


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"device": "cpu"}, "needs a Hopper or Blackwell GPU"),
        ({"capability": (8, 0)}, "needs a Hopper or Blackwell GPU"),
        ({"packages": ["flash_attn"]}, "pip install flash-attn-4"),
        ({"packages": []}, "pip install flash-attn-4"),
        ({"use_amp": False}, "needs --use-amp"),
        ({"seq_len": 1023}, "--seq-len from 1024 on"),
        ({"head_dim": 12}, "a head dimension of 8"),
        ({"head_dim": 136}, "a head dimension of 8"),
    ],
    ids=str,
)
def test_flash_attention_4_is_refused_with_a_reason(monkeypatch, changes, reason):
    given = {
        "device": "cuda",
        "capability": (9, 0),
        "use_amp": True,
        "seq_len": 1024,
        "head_dim": 64,
    } | changes
    packages = given.pop("packages", ["flash_attn", "flash_attn.cute"])
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: given["capability"])
    monkeypatch.setattr(attention.devices, "select", torch.device)
    monkeypatch.setattr(attention, "find_spec", lambda name: name in packages)
    options = SimpleNamespace(model=SimpleNamespace(head_dim=given["head_dim"]), **given)
    with pytest.raises(UsageError, match=reason):
        attention.refuse_fa4(options)
