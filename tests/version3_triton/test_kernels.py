"""Version 3's kernels: outputs and every gradient against float64, next to what PyTorch itself gets wrong in the same precision.

On a machine without a GPU they run in Triton's interpreter, in float32 and float16: bfloat16 is wrong there (triton issue 11584).
"""

import os
import sys
from collections.abc import Callable

from common import rmsnorm, rope
from tests.conftest import runs_kernels

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported; scripts that tests start do not inherit it
triton = pytest.importorskip("triton")
if DEVICE == "cpu" and not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported before its interpreter was asked for", allow_module_level=True)

from version1_pytorch_baseline import tiny_llama_v1
from version3_triton.kernels.blocks import Blocks, Tile
from version3_triton.kernels.flash_attention import attention
from version3_triton.kernels.linear_cross_entropy import linear_cross_entropy
from version3_triton.kernels.rms_norm import add_rms_norm, rms_norm
from version3_triton.kernels.rope import apply_rope
from version3_triton.kernels.swiglu import swiglu

pytestmark = runs_kernels
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
MARGIN = 1.5  # times PyTorch's own error
FLOOR = 16  # units of rounding of the largest element, where PyTorch's own error is nearly none


def results(operation: Callable, inputs: list[Tensor], seed: int = 1) -> list[Tensor]:
    """Outputs, and the gradients of all floating-point inputs for random output gradients, the same in every precision."""
    leaves = [x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    outputs = operation(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(o.shape, generator=generator).half().to(o.device, o.dtype) for o in outputs]
    torch.autograd.backward(outputs, gradients)
    return [*(o.detach() for o in outputs), *(x.grad for x in leaves if x.is_floating_point())]


def check(ours: Callable, plain: Callable, inputs: list[Tensor], dtype: torch.dtype) -> None:
    """Each result's largest error against float64 is at most MARGIN times PyTorch's in `dtype`, or a few units of rounding."""
    inputs = [x.to(DEVICE, dtype if x.is_floating_point() else None) for x in inputs]
    exact = results(plain, [x.double() if x.is_floating_point() else x for x in inputs])
    theirs, got = results(plain, inputs), results(ours, inputs)
    again = results(ours, inputs)
    for i, (right, usual, mine, repeated) in enumerate(zip(exact, theirs, got, again, strict=True)):
        assert mine.shape == usual.shape and mine.dtype == usual.dtype, i
        assert torch.equal(mine, repeated), f"result {i} differs between two calls"
        error, allowed = ((x.double() - right).abs().max().item() for x in (mine, usual))
        floor = FLOOR * torch.finfo(dtype).eps * right.abs().max().item()
        assert error <= max(MARGIN * allowed, floor), f"result {i}: error {error:.2g}, PyTorch's {allowed:.2g}, floor {floor:.2g}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3), (2, 3, 37), (5, 256), (3, 1000), (130, 24)])
def test_rms_norm(shape, dtype):
    x, weight = torch.randn(shape), 1 + torch.randn(shape[-1])
    check(lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: rmsnorm.rms_norm(x, w, 1e-5), [x, weight], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 37), (5, 256)])
def test_add_rms_norm(shape, dtype):
    def plain(x, residual, weight):
        return x + residual, rmsnorm.rms_norm(x + residual, weight, 1e-5)

    inputs = [torch.randn(shape), torch.randn(shape), 1 + torch.randn(shape[-1])]
    check(lambda *tensors: add_rms_norm(*tensors, 1e-5), plain, inputs, dtype)


def test_add_rms_norm_of_two_types_and_one_result_unused():
    """float16 from a product added to a float32 residual, as under autocast; the last sum of a model is not used."""
    x, residual, weight = torch.randn(4, 40).half(), torch.randn(4, 40), torch.ones(40)
    inputs = [tensor.to(DEVICE) for tensor in (x, residual, weight)]
    total, y = add_rms_norm(*(tensor.requires_grad_() for tensor in inputs), 1e-5)
    assert total.dtype == y.dtype == torch.float32
    y.sum().backward()
    assert inputs[0].grad.dtype == torch.float16
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad.half())
    sum_only = [tensor.detach().requires_grad_() for tensor in inputs]
    add_rms_norm(*sum_only, 1e-5)[0].sum().backward()
    assert torch.equal(sum_only[1].grad, torch.ones_like(residual, device=DEVICE)) and sum_only[2].grad is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads, length, head_dim", [(4, 4, 1, 2), (4, 2, 33, 24), (3, 1, 64, 16), (2, 2, 7, 80)])
def test_rope(heads, kv_heads, length, head_dim, dtype):
    """q and k as they come from one fused product: strided views."""
    cos, sin = (table.to(DEVICE) for table in rope.rope_tables(head_dim, length + 3, 1e4))

    def split(operation):
        def run(qkv):
            q, k = qkv.unflatten(-1, (-1, head_dim)).transpose(1, 2).split([heads, kv_heads], dim=1)
            wide = (cos.to(qkv.dtype), sin.to(qkv.dtype)) if qkv.dtype == torch.float64 else (cos, sin)
            return operation(q, k, *wide)

        return run

    check(split(apply_rope), split(rope.apply_rope), [torch.randn(2, length, (heads + kv_heads) * head_dim)], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7,), (1, 1), (2, 9, 77), (3, 2048), (40, 130)])
def test_swiglu(shape, dtype):
    def halves(operation):
        return lambda both: operation(*both.chunk(2, dim=-1))

    check(halves(swiglu), halves(tiny_llama_v1.swiglu), [2 * torch.randn(*shape[:-1], 2 * shape[-1])], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads, kv_heads, length, head_dim",
    [(2, 2, 2, 8), (4, 2, 70, 16), (2, 1, 129, 32), (4, 1, 33, 80), (2, 1, 100, 64), (1, 1, 65, 96), (2, 2, 40, 128)],
)
def test_attention(heads, kv_heads, length, head_dim, dtype):
    q, k, v = (torch.randn(2, n, length, head_dim) for n in (heads, kv_heads, kv_heads))
    check(attention, tiny_llama_v1.attention, [q, k, v], dtype)


def test_attention_of_strided_views_and_a_strided_gradient():
    qkv = torch.randn(2, 20, 8 * 16, device=DEVICE)
    parts = qkv.unflatten(-1, (-1, 16)).transpose(1, 2).split([4, 2, 2], dim=1)
    out = attention(*parts)
    torch.testing.assert_close(out, tiny_llama_v1.attention(*parts), rtol=1e-5, atol=1e-5)
    assert out.transpose(1, 2).is_contiguous()  # the output projection reads it without a copy
    leaves = [part.detach().clone().requires_grad_() for part in parts]
    attention(*leaves).backward(torch.ones_like(out).expand_as(out))
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


def losses(targets: Tensor) -> tuple[Callable, Callable]:
    """The kernel and PyTorch's operations as functions of x and weight, in their type: the loss is float32 in every precision."""
    return tuple(
        lambda x, weight, operation=operation: operation(x, weight, targets).to(x.dtype)
        for operation in (linear_cross_entropy, tiny_llama_v1.linear_cross_entropy)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, vocabulary", [((1, 1), 2), ((3, 17), 101), ((2, 64), 1000)])
def test_linear_cross_entropy(tokens, vocabulary, dtype):
    targets = torch.randint(vocabulary, tokens, device=DEVICE)
    check(*losses(targets), [torch.randn(*tokens, 24), torch.randn(vocabulary, 24)], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_cross_entropy_in_chunks(monkeypatch, dtype):
    monkeypatch.setattr(sys.modules["kernels.linear_cross_entropy"], "CHUNK_ELEMENTS", 101 * 13)  # 13 tokens, rounded to 16
    targets = torch.randint(101, (2, 50), device=DEVICE)
    check(*losses(targets), [torch.randn(2, 50, 24), torch.randn(101, 24)], dtype)


def test_chunks_take_turns_in_the_same_memory(monkeypatch):
    class Places(TorchDispatchMode):
        """Where tensors of a chunk's logits, [16, 101], begin."""

        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            out = function(*arguments, **(options or {}))
            if isinstance(out, Tensor) and out.shape == (16, 101):
                found.add(out.data_ptr())
            return out

    monkeypatch.setattr(sys.modules["kernels.linear_cross_entropy"], "CHUNK_ELEMENTS", 101 * 16)
    x, weight = (torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((1, 64, 24), (101, 24)))
    found: set[int] = set()
    with Places():
        linear_cross_entropy(x, weight, torch.zeros(1, 64, dtype=torch.long, device=DEVICE))
    assert len(found) == 1


@pytest.mark.parametrize("tokens", [16, 32], ids=["a chunk", "two chunks"])
def test_a_sum_over_tokens_may_exceed_float16(monkeypatch, tokens):
    """Autocast must not round it on its way: 7,936 for each of 16 tokens is 126,976, float16 ends at 65,504."""
    monkeypatch.setattr(sys.modules["kernels.linear_cross_entropy"], "CHUNK_ELEMENTS", 16 * 32)
    x = torch.full((1, tokens, 16), 8192.0, device=DEVICE)
    weight = torch.zeros(32, 16, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE, torch.float16):
        linear_cross_entropy(x, weight, torch.zeros(1, tokens, dtype=torch.long, device=DEVICE)).backward()
    expected = torch.full((32, 16), 8192 / 32, device=DEVICE)
    expected[0] -= 8192
    torch.testing.assert_close(weight.grad, expected, rtol=1e-3, atol=0)


def test_parts_of_tensors():
    """Strided targets, hidden states and norm weights."""
    x, weight, targets = torch.randn(3, 5, 16), torch.randn(31, 16), torch.randint(31, (3, 5))
    inputs = x[:, -1:].to(DEVICE), weight.to(DEVICE), targets.to(DEVICE)[:, -1:]
    torch.testing.assert_close(linear_cross_entropy(*inputs), tiny_llama_v1.linear_cross_entropy(*inputs))
    strided = torch.randn(16, 2, device=DEVICE)[:, 0]
    torch.testing.assert_close(rms_norm(inputs[0], strided, 1e-5), rmsnorm.rms_norm(inputs[0], strided, 1e-5))


def test_large_logits_and_a_small_loss_scale():
    """exp would overflow without the maximum; 1 / N would underflow in float16 if it came first."""
    x, weight = 100 * torch.randn(2, 512, 16), 3 * torch.randn(31, 16)
    targets = torch.randint(31, (2, 512))
    inputs = [tensor.to(DEVICE) for tensor in (x, weight, targets)]
    assert linear_cross_entropy(*inputs).isfinite()
    half = [inputs[0].div(100).half().requires_grad_(), inputs[1].half().requires_grad_(), inputs[2]]
    (linear_cross_entropy(*half) * 2.0**10).backward()
    exact = [inputs[0].div(100).double().requires_grad_(), inputs[1].double().requires_grad_(), inputs[2]]
    (tiny_llama_v1.linear_cross_entropy(*exact) * 2.0**10).backward()
    for got, right in zip(half[:2], exact[:2], strict=True):
        assert (got.grad - right.grad).abs().max() < 0.01 * right.grad.abs().max()


def test_what_the_kernels_do_not_take():
    def tensors(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.randn(shape, device=DEVICE) for shape in shapes)

    with pytest.raises(ValueError, match="head dimensions to 128, not 160"):
        attention(*tensors((1, 1, 4, 160), (1, 1, 4, 160), (1, 1, 4, 160)))
    for k in ((1, 3, 8, 16), (1, 2, 7, 16), (1, 2, 8, 32), (2, 2, 8, 16)):
        with pytest.raises(ValueError, match=r"q \[1, 4, 8, 16\] takes k and v alike but for fewer heads"):
            attention(*tensors((1, 4, 8, 16), k, k))
    with pytest.raises(ValueError, match="at most 65536 numbers, not 70000"):
        rms_norm(*tensors((1, 70000), (70000,)), 1e-5)
    with pytest.raises(ValueError, match="tables hold 4 positions, not 5"):
        apply_rope(*tensors((1, 2, 5, 8), (1, 2, 5, 8), (4, 8), (4, 8)))
    for shapes in (((1, 2, 5, 8), (1, 2, 3, 8), (9, 8), (9, 8)), ((1, 2, 5, 8), (1, 2, 5, 8), (9, 16), (9, 16))):
        with pytest.raises(ValueError, match="RoPE takes q and k alike"):
            apply_rope(*tensors(*shapes))
    with pytest.raises(ValueError, match=r"one shape and type, not \[4, 8\] torch.float32 and \[1, 8\]"):
        swiglu(*tensors((4, 8), (1, 8)))
    gate, up = tensors((4, 8), (4, 8))
    with pytest.raises(ValueError, match=r"not \[4, 8\] torch.float16 and \[4, 8\] torch.float32"):
        swiglu(gate.half(), up)
    q, k, v = tensors((1, 2, 4, 16), (1, 2, 4, 16), (1, 2, 4, 16))
    for wrong in ((q.half(), k, v), (q.double(), k.double(), v.double())):
        with pytest.raises(ValueError, match="in one type of 16 or 32 bits"):
            attention(*wrong)
    with pytest.raises(ValueError, match=r"a weight \[D\], not \[\[2, 8\], \[4\]\]"):
        rms_norm(*tensors((2, 8), (4,)), 1e-5)
    with pytest.raises(ValueError, match=r"in the same shape"):
        add_rms_norm(*tensors((2, 3, 8), (1, 3, 8), (8,)), 1e-5)
    with pytest.raises(ValueError, match="there are none"):
        linear_cross_entropy(*tensors((2, 0, 8), (5, 8)), torch.zeros(2, 0, dtype=torch.long, device=DEVICE))


def test_a_norm_whose_outputs_get_no_gradient():
    """What follows may hand back None for its input."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, gradient: Tensor) -> None:
            return None

    x, weight = torch.randn(2, 8, device=DEVICE, requires_grad=True), torch.ones(8, device=DEVICE, requires_grad=True)
    for outputs in ([rms_norm(x, weight, 1e-5)], add_rms_norm(x, x.detach(), weight, 1e-5)):
        (sum(Nothing.apply(output).sum() for output in outputs) + 0 * weight.sum()).backward()
    assert x.grad is None and not weight.grad.any()


def test_gradients_of_gradients_are_refused():
    """They would miss what goes through a kernel's backward pass."""
    x, weight, cos = torch.randn(1, 4, 16), torch.ones(16), torch.ones(4, 16)
    heads = torch.randn(1, 1, 4, 16)
    calls = [
        (lambda x: rms_norm(x, weight.to(DEVICE), 1e-5), x),
        (lambda x: swiglu(x, x), x),
        (lambda x: linear_cross_entropy(x, x[0], torch.zeros(1, 4, dtype=torch.long, device=DEVICE)), x),
        (lambda x: apply_rope(x, x, cos.to(DEVICE), cos.to(DEVICE))[0], heads),
        (lambda x: attention(x, x, x), heads),
    ]
    for operation, tensor in calls:
        leaf = tensor.to(DEVICE).requires_grad_()
        (gradient,) = torch.autograd.grad(operation(leaf).square().sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


@pytest.mark.parametrize("parts", [4, 70])
def test_a_norm_has_more_tiles_than_programs_and_more_parts_than_the_sum_takes_at_once(monkeypatch, parts):
    monkeypatch.setattr(sys.modules["kernels.rms_norm"], "tile", lambda kernel, size, device: Tile(8, 32, 1, parts))
    check(
        lambda x, w: rms_norm(x, w, 1e-5),
        lambda x, w: rmsnorm.rms_norm(x, w, 1e-5),
        [torch.randn(700, 24), torch.randn(24)],
        torch.float32,
    )


@pytest.mark.parametrize("m, n", [(32, 16), (16, 32)])
def test_attention_in_tiles_that_are_not_square(monkeypatch, m, n):
    monkeypatch.setattr(sys.modules["kernels.flash_attention"], "attention_blocks", lambda *_: Blocks(m, n, 4, 1))
    inputs = [torch.randn(1, heads, 70, 16) for heads in (2, 1, 1)]
    check(attention, tiny_llama_v1.attention, inputs, torch.float32)
