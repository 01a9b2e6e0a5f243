"""Results held against a reference: by the largest error of a tensor, or by PyTorch's own error
against float64.
"""

from collections.abc import Callable, Iterable

from tests.conftest import INTERPRETER_FAILS

import pytest
import torch
from torch import Tensor

# without a GPU Triton's kernels are interpreted
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16]
# interpreted bfloat16 is wrong, and versions refuse that of a GPU which emulates it
if DEVICE.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
    DTYPES.append(torch.bfloat16)
interpreted = pytest.mark.skipif(
    INTERPRETER_FAILS or DEVICE.type == "cuda", reason="needs Triton's interpreter"
)
# Tiles of Version 4's products and its attention of short sequences are for NVIDIA's data-centre GPUs
# from Hopper on, and for the interpreter.
HOPPER = DEVICE.type == "cpu" or (
    not torch.version.hip and torch.cuda.get_device_capability()[0] in (9, 10)
)
for_hopper = pytest.mark.skipif(not HOPPER, reason="needs an NVIDIA data-centre GPU from Hopper on")
MARGIN = 1.5  # times PyTorch's own error
FLOOR = 16  # units of rounding of the largest element, where PyTorch's own error is nearly none


def assert_close(ours: Tensor, reference: Tensor, tolerance: float = 1e-5) -> None:
    """Largest difference below `tolerance` times the reference's largest magnitude.

    float32 carries 6e-8 per operation, and sums here are at most 97 terms long, so rounding alone
    stays near 1e-6. Single elements may cancel to almost zero, which is why the error is held
    against the whole tensor's magnitude. A reference of zeros (attention's gradients at S = 1) must
    be met to 1e-8.
    """
    difference = (ours - reference).abs().max().item()
    assert difference <= max(tolerance * reference.abs().max().item(), 1e-8), difference


def results(operation: Callable, inputs: list[Tensor], seed: int = 1) -> list[Tensor]:
    """Outputs, and the gradients of all floating-point inputs for random output gradients, the same
    in every precision.
    """
    leaves = [x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    outputs = operation(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(seed)
    gradients = [
        torch.randn(o.shape, generator=generator).half().to(o.device, o.dtype) for o in outputs
    ]
    torch.autograd.backward(outputs, gradients)
    return [*(o.detach() for o in outputs), *(x.grad for x in leaves if x.is_floating_point())]


def check(ours: Callable, plain: Callable, inputs: list[Tensor], dtype: torch.dtype) -> None:
    """The results and gradients are `as_accurate` as PyTorch's in `dtype`, and a second call gives
    the same bits.
    """
    inputs = [x.to(DEVICE, dtype if x.is_floating_point() else None) for x in inputs]
    exact = results(plain, [x.double() if x.is_floating_point() else x for x in inputs])
    theirs, got = results(plain, inputs), results(ours, inputs)
    for i, (usual, mine, repeated) in enumerate(
        zip(theirs, got, results(ours, inputs), strict=True)
    ):
        assert mine.shape == usual.shape and mine.dtype == usual.dtype, i
        assert torch.equal(mine, repeated), f"result {i} differs between two calls"
    as_accurate(got, theirs, exact, FLOOR * torch.finfo(dtype).eps)


def confident(
    tokens: int, size: int, vocabulary: int, offset: float, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [1, N, D + 1], a head's weight [V, D + 1] and targets [1, N]: each token is all
    but sure of its target.

    The last dimension adds `offset` to all logits, which changes no loss.
    """
    generator = torch.Generator().manual_seed(seed)
    weight, noise = (torch.randn(rows, size, generator=generator) for rows in (vocabulary, tokens))
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    x = torch.cat((0.3 * weight[targets] + 0.02 * noise, torch.full((tokens, 1), float(offset))), 1)
    return (
        x[None].to(DEVICE),
        torch.cat((weight, torch.ones(vocabulary, 1)), 1).to(DEVICE),
        targets[None].to(DEVICE),
    )


def stacked(batches: Iterable[list[Tensor]]) -> list[Tensor]:
    """The results of several batches: of one, PyTorch's error in a single number, the loss, can be
    none by luck.
    """
    return [torch.stack(each) for each in zip(*batches, strict=True)]


def as_accurate(
    ours: list[Tensor],
    theirs: list[Tensor],
    exact: list[Tensor],
    rounding: float = 0.0,
    margin: float = MARGIN,
) -> None:
    """Each result's largest error against float64 is at most `margin` times PyTorch's, or
    `rounding` of the largest element.
    """
    for i, (mine, usual, right) in enumerate(zip(ours, theirs, exact, strict=True)):
        error, allowed = ((x.double() - right).abs().max().item() for x in (mine, usual))
        floor = rounding * right.abs().max().item()
        assert error <= max(margin * allowed, floor), (
            f"result {i}: error {error:.2g}, PyTorch's {allowed:.2g}, floor {floor:.2g}"
        )
