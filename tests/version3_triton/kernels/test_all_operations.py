"""Every public operation of Version 3, given strided tensors, against Version 1's in float64; and
no gradients of gradients.
"""

from collections.abc import Callable

from common.rope import rope_tables
from tests.conftest import runs_kernels
from tests.oracle import DEVICE, check
from version1_pytorch_baseline import tiny_llama_v1

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")
from version3_triton import kernels
from version3_triton.kernels import reference

B, S, D, H, K, V = 2, 5, 16, 4, 2, 31
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "rms_norm": [(B, S, D), (D,)],
    "add_rms_norm": [(B, S, D), (B, S, D), (D,)],
    "apply_rope": [(B, H, S, D), (B, K, S, D)],
    "attention": [(B, H, S, D), (B, K, S, D), (B, K, S, D)],
    "swiglu": [(B, S, D), (B, S, D)],
    "linear_cross_entropy": [(B, S, D), (V, D), (B, S)],
}
TABLES = [torch.stack((table, table), -1).to(DEVICE)[..., 0] for table in rope_tables(D, S, 1e4)]


def inputs(name: str, in_memory: Callable = tuple) -> list[Tensor]:
    """Of an operation; targets are class numbers."""
    shapes = [in_memory(shape) for shape in SHAPES[name]]
    integers = name == "linear_cross_entropy"
    return [
        torch.randint(V, shape) if integers and i == 2 else torch.randn(shape)
        for i, shape in enumerate(shapes)
    ]


def others(name: str, dtype: torch.dtype) -> list:
    """Arguments that are no tensors with gradients."""
    tables = [table.to(torch.promote_types(table.dtype, dtype)) for table in TABLES]
    return [1e-5] if "norm" in name else tables if name == "apply_rope" else []


def reverse(x: Tensor) -> Tensor:
    return x.permute(tuple(reversed(range(x.ndim))))


# the shape of a tensor in memory, and the view of it that an operation gets
LAYOUTS: dict[str, tuple[Callable, Callable]] = {
    "every second row": (lambda shape: (2 * shape[0], *shape[1:]), lambda x: x[::2]),
    "every second element": (lambda shape: (*shape[:-1], 2 * shape[-1]), lambda x: x[..., 1::2]),
    "part of a fused product": (
        lambda shape: (
            *(shape[i] for i in ((0, 2, 1) if len(shape) == 4 else range(len(shape) - 1))),
            shape[-1] + 5,
        ),
        lambda x: (x.transpose(1, 2) if x.ndim == 4 else x)[..., 3:-2],
    ),
    "reversed dimensions": (lambda shape: shape[::-1], reverse),
    "one sequence for all": (
        lambda shape: shape,
        lambda x: x[:1].expand_as(x) if x.ndim > 2 else x,
    ),
}


@runs_kernels
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", kernels.Operations._fields)
def test_an_operation_on_strided_inputs_and_output_gradients(name, layout):
    in_memory, view = LAYOUTS[layout]
    # expanded, or permuted
    strided_gradient = (lambda y: y.sum(0)) if layout.endswith("for all") else reverse

    def strided(operation: Callable) -> Callable:
        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            outputs = operation(*map(view, tensors), *others(name, tensors[0].dtype))
            return tuple(
                map(strided_gradient, outputs if isinstance(outputs, tuple) else (outputs,))
            )

        return run

    tensors = inputs(name, in_memory)
    plain = reference.add_rms_norm if name == "add_rms_norm" else getattr(tiny_llama_v1, name)
    check(strided(getattr(kernels.KERNELS, name)), strided(plain), tensors, torch.float32)


@runs_kernels
@pytest.mark.parametrize("name", kernels.Operations._fields)
def test_gradients_of_gradients_are_refused(name):
    """A gradient of a gradient would miss what goes through a kernel's backward pass, so autograd
    refuses it.
    """
    first, *rest = (x.to(DEVICE) for x in inputs(name))
    outputs = getattr(kernels.KERNELS, name)(
        first.requires_grad_(), *rest, *others(name, first.dtype)
    )
    output = outputs[-1] if isinstance(outputs, tuple) else outputs
    (gradient,) = torch.autograd.grad(output.square().sum(), first, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
