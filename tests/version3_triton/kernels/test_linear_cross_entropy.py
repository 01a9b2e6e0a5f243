"""The loss's kernel against float64: whole, in chunks, and with numbers that are large for float16."""

import importlib
from collections.abc import Callable

from tests.conftest import runs_kernels
from tests.oracle import DEVICE, DTYPES, as_accurate, check, confident, results, stacked
from version1_pytorch_baseline import tiny_llama_v1

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")
from version3_triton.kernels.linear_cross_entropy import linear_cross_entropy

pytestmark = runs_kernels


@pytest.fixture
def chunk_elements(monkeypatch) -> Callable[[int], None]:
    """chunk_elements(n): the number of logits that a chunk may have."""
    module = importlib.import_module("version3_triton.kernels.linear_cross_entropy")
    return lambda elements: monkeypatch.setattr(module, "CHUNK_ELEMENTS", elements)


def losses(targets: Tensor) -> tuple[Callable, Callable]:
    """The kernel and PyTorch's operations as functions of x and weight, in their type: the loss is
    float32 in every precision.
    """
    return tuple(
        lambda x, weight, operation=operation: operation(x, weight, targets).to(x.dtype)
        for operation in (linear_cross_entropy, tiny_llama_v1.linear_cross_entropy)
    )


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "tokens, vocabulary", [((1, 1), 2), ((3, 17), 101), ((2, 8), 1000), ((1, 3), 9000)]
)
def test_linear_cross_entropy(tokens, vocabulary, dtype):
    targets = torch.randint(vocabulary, tokens, device=DEVICE)
    check(*losses(targets), [torch.randn(*tokens, 24), torch.randn(vocabulary, 24)], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_chunks(chunk_elements, dtype):
    chunk_elements(101 * 13)  # 13 tokens, rounded to 16
    targets = torch.randint(101, (2, 20), device=DEVICE)
    check(*losses(targets), [torch.randn(2, 20, 24), torch.randn(101, 24)], dtype)


@pytest.mark.parametrize("tokens", [16, 32], ids=["a chunk", "two chunks"])
def test_a_sum_over_tokens_may_exceed_float16(chunk_elements, tokens):
    """Autocast must not round it on its way: 7,936 for each of 16 tokens is 126,976, float16 ends
    at 65,504.
    """
    chunk_elements(16 * 32)
    x = torch.full((1, tokens, 16), 8192.0, device=DEVICE)
    weight = torch.zeros(32, 16, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE.type, torch.float16):
        linear_cross_entropy(x, weight, zeros(1, tokens)).backward()
    expected = torch.full((32, 16), 8192 / 32, device=DEVICE)
    expected[0] -= 8192
    torch.testing.assert_close(weight.grad, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("offset", [0, 1000])
def test_confident_tokens_and_offset_logits_are_as_accurate_as_pytorchs(offset):
    batches = [confident(32, 64, 200, offset, seed) for seed in range(8)]
    ours, theirs, exact = (
        stacked(
            results(losses(targets)[which], [x.to(dtype), weight.to(dtype)])
            for x, weight, targets in batches
        )
        for which, dtype in ((0, torch.float32), (1, torch.float32), (1, torch.float64))
    )
    as_accurate(ours, theirs, exact, margin=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "ignored", [[0], range(16, 20), range(1, 20)], ids=["the first", "a chunk", "all but the first"]
)
def test_ignored_tokens_do_not_count(chunk_elements, ignored, dtype):
    chunk_elements(31 * 16)  # chunks of 16 and 4 tokens
    targets = torch.randint(31, (1, 20), device=DEVICE)
    targets[0, list(ignored)] = -100
    check(*losses(targets), [torch.randn(1, 20, 24), torch.randn(31, 24)], dtype)


def test_the_gradient_is_over_all_that_count_of_more_tokens_than_are_counted_at_once():
    targets = torch.randint(5, (1, 520), device=DEVICE)
    targets[0, 500:516] = -100
    inputs = [torch.randn(1, 520, 4, device=DEVICE), torch.randn(5, 4, device=DEVICE)]
    ours, theirs = (results(operation, inputs) for operation in losses(targets))
    torch.testing.assert_close(ours, theirs)


def test_an_ignored_token_has_no_gradient_and_the_loss_of_ignored_ones_is_nan():
    targets = zeros(1, 4)
    targets[0, 1] = -100
    x, weight = (
        torch.randn(1, 4, 8, device=DEVICE, requires_grad=True),
        torch.randn(5, 8, device=DEVICE),
    )
    linear_cross_entropy(x, weight, targets).backward()
    assert x.grad[0].any(1).tolist() == [True, False, True, True]

    targets = zeros(1, 4) - 100
    for operation in losses(targets):
        loss, *gradients = results(
            operation, [torch.randn(1, 4, 8, device=DEVICE), torch.randn(5, 8, device=DEVICE)]
        )
        assert loss.isnan() and not any(gradient.any() for gradient in gradients)


@pytest.mark.skipif(
    DEVICE.type == "cuda", reason="needs the CPU: an assertion on a GPU ends the process"
)
@pytest.mark.parametrize("target", [-1, -99, 5, 2**40])
def test_other_targets_are_refused_as_by_pytorch(target):
    x, weight, targets = torch.randn(1, 4, 8), torch.randn(5, 8), zeros(1, 4)
    targets[0, 2] = target
    for operation in losses(targets):
        with pytest.raises(IndexError, match=f"Target {target} is out of bounds"):
            operation(x, weight)


def test_the_mean_comes_last_in_float16():
    """An unlikely token's probability of 2e-5 keeps nine bits; divided by the 32 tokens it would
    keep four.
    """
    x = torch.tensor([11.25, 1.0], device=DEVICE).expand(1, 32, 2)
    # The head's rows of a likely token, of the target, and of unlikely ones.
    weight = torch.tensor([[1.0, 0.0], [0.0, 0.0]] + [[0.0, 0.5]] * 29, device=DEVICE)
    gradients = []
    for operation, dtype in (
        (linear_cross_entropy, torch.float16),
        (tiny_llama_v1.linear_cross_entropy, torch.float64),
    ):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (x, weight)]
        (
            operation(*leaves, torch.ones(1, 32, dtype=torch.long, device=DEVICE)) * 2.0**10
        ).backward()
        # where the unlikely ones alone contribute
        gradients.append([leaves[0].grad[..., 1], leaves[1].grad[2:]])
    for got, right in zip(*gradients, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=0.01, atol=0)
