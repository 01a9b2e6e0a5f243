"""Trials in FP8: kernels against PyTorch, and gradients against float64."""

from common.rope import rope_tables
from tests.conftest import runs_kernels
from tests.oracle import DEVICE

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
from tests.version4_ultra_fused.kernels.test_fp8 import FORMATS, gradients, numbers, slot
from version4_ultra_fused.kernels import KERNELS, REFERENCE
from version4_ultra_fused.kernels.reference import LOGITS_SCALE, Rope, Slot, Stored

TRIALS = [
    {"HEAD": "1"},
    {"HEAD": "2"},
    {"NORM": "1"},
    {"NORM": "2"},
    {"ROTATE": "1"},
    {"WEIGHTS": "1"},
    {"HEAD": "2", "NORM": "1", "ROTATE": "1", "WEIGHTS": "1"},
]


def set_trials(monkeypatch, trials: dict[str, str]) -> None:
    for name, form in trials.items():
        monkeypatch.setenv(f"TRIAL_{name}", form)


def check_stored(ours, right, dtype: torch.dtype) -> None:
    """Both are by rows and transposed; numbers may be neighbours in the format."""
    rows, transposed = ours
    assert rows.dtype == transposed.dtype == dtype
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(
        rows.float(), right.float(), rtol=step, atol=2 * torch.finfo(dtype).smallest_normal
    )
    assert torch.equal(transposed.float(), rows.float().T)


def slots(dtype: torch.dtype, scale: float) -> tuple[Slot, Slot]:
    return slot(dtype, scale), slot(dtype, scale)


@runs_kernels
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("form", ["1", "2"])
@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("tokens, size", [(33, 48), (16, 2048), (130, 1000)])
def test_a_norm(monkeypatch, tokens, size, branch, form, dtype):
    set_trials(monkeypatch, {"NORM": form})
    x = numbers(tokens, size).float()
    arguments = x, numbers(tokens, size).flip(0) if branch else None, numbers(size).float(), 1e-5
    ours, right = slots(dtype, 1e-2)
    total, stored, norm = KERNELS.add_norm_quantized(*arguments, ours, torch.float16)
    expected = REFERENCE.add_norm_quantized(*arguments, right, torch.float16)
    torch.testing.assert_close(total, expected[0])
    check_stored(stored, expected[1][0], dtype)
    torch.testing.assert_close(norm.total, expected[2].total)
    torch.testing.assert_close(norm.rstd, expected[2].rstd.float(), rtol=2e-3, atol=1e-5)
    torch.testing.assert_close(ours.largest, right.largest, rtol=1e-3, atol=0)


@runs_kernels
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("length, head_dim", [(24, 16), (80, 20), (64, 128)])
def test_the_gradient_before_rope(length, head_dim, dtype):
    cos, sin = (x.to(DEVICE) for x in rope_tables(head_dim, length, 10000.0))
    q = numbers(2, length, 4, head_dim).transpose(1, 2)
    k, v = numbers(2, 2, 2, length, head_dim)
    ours, right = slots(dtype, 1e-2)
    rope = Rope(cos, sin, length)
    stored = KERNELS.rotate_back_quantized(q, k, v, rope, ours)
    check_stored(stored, REFERENCE.rotate_back_quantized(q, k, v, rope, right)[0], dtype)
    torch.testing.assert_close(ours.largest, right.largest)


@runs_kernels
@pytest.mark.parametrize("dtype", FORMATS[-1:], ids=str)
@pytest.mark.parametrize("tokens, vocabulary", [(5, 33), (48, 1000), (3, 16400)])
def test_the_gradient_of_logits(tokens, vocabulary, dtype):
    logits = numbers(tokens, vocabulary) * 4
    targets = torch.arange(tokens, device=DEVICE) * 5 % vocabulary
    targets[1] = -100
    loss, *stored, scale = KERNELS.cross_entropy_quantized(logits.clone(), targets, dtype)
    expected = REFERENCE.cross_entropy_quantized(logits.clone(), targets, dtype)
    torch.testing.assert_close(loss, expected[0], rtol=1e-4, atol=1e-4)
    check_stored(stored, expected[1], dtype)
    torch.testing.assert_close(scale, expected[3])
    assert scale.item() == pytest.approx(LOGITS_SCALE / (tokens - 1))


@runs_kernels
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(48, 160), (33, 20)])
def test_an_update(shape, dtype):
    rule = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    results = []
    for operations, place in zip((KERNELS, REFERENCE), slots(dtype, 1e-2), strict=True):
        weight, gradient = numbers(2, *shape).float()
        moments = torch.full_like(weight, 0.1), torch.full_like(weight, 0.2)
        empty = Stored(*operations.quantize(weight, place), torch.zeros_like(place.scale))
        steps = torch.tensor(3.0, device=DEVICE)
        operations.adamw_quantized(weight, moments, gradient, place, empty, steps, **rule)
        results.append((weight, *moments, empty, place.largest))
    ours, right = results
    torch.testing.assert_close(ours[:3], right[:3])
    check_stored(ours[3][:2], right[3].rows, dtype)
    torch.testing.assert_close((ours[3].scale, ours[4]), (right[3].scale, right[4]))


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("trials", TRIALS, ids=str)
def test_gradients_are_those_of_float64_as_far_as_three_bits_can_tell(monkeypatch, trials):
    exact = gradients(False, torch.float64)
    today = gradients(True)
    set_trials(monkeypatch, trials)
    ours = gradients(True)
    assert any(not torch.equal(ours[name], today[name]) for name in ours) or "ROTATE" in trials
    for name, right in exact.items():
        error, before = ((x[name] - right).norm() / right.norm() for x in (ours, today))
        assert error < max(0.2, 1.2 * before), f"{name}: {error:.3f}, today {before:.3f}"
