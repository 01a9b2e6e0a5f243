"""The operations of Version 4: each kernel against PyTorch's form of it in float64, and which of
the two runs.

Without a GPU the kernels run in Triton's interpreter.
"""

from collections.abc import Callable

from common.rope import rope_tables
from tests.conftest import runs_kernels
from tests.oracle import DEVICE, DTYPES, as_accurate, confident, for_hopper, stacked
from tracepage.errors import UsageError

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")
from version4_ultra_fused import kernels
from version4_ultra_fused.kernels import elementwise, matmul, reference, tiles
from version4_ultra_fused.kernels.reference import Norm, Rope

# of the largest element: a few units of rounding
WIDTH = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


in_16_bits = pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.itemsize == 2])
with_and_without_epilogue = pytest.mark.parametrize(
    "fused", [True, False], ids=["epilogue", "beside"], indirect=True
)


def allow(monkeypatch, most: int) -> None:
    """Products of so many elements have their epilogues, on any GPU."""
    for module in (elementwise, matmul):
        monkeypatch.setattr(module, "largest", lambda epilogue, depth=1: most)


@pytest.fixture
def fused(request, monkeypatch) -> bool:
    allow(monkeypatch, 1 << 40 if request.param else 0)
    return request.param


@pytest.fixture
def epilogues(monkeypatch) -> None:
    allow(monkeypatch, 1 << 40)


def tensors(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Normally distributed numbers that float16 holds."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).half().to(DEVICE, dtype) for shape in shapes]


def changed(change: Callable[[Tensor], Tensor], x):
    """An argument of an operation whose tensors are changed."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, Rope):
        return Rope(change(x.cos), change(x.sin), x.length)
    return Norm(*map(change, x)) if isinstance(x, Norm) else x


def found(returned) -> list[Tensor]:
    """The tensors of floating-point numbers among results or arguments, those of a Norm included."""
    nested = [
        [*each] if isinstance(each, Norm) else [each]
        for each in (returned if isinstance(returned, tuple) else (returned,))
    ]
    return [x for each in nested for x in each if isinstance(x, Tensor) and x.is_floating_point()]


def double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def rope(head_dim: int, positions: int, length: int) -> Rope:
    return Rope(*(table.to(DEVICE) for table in rope_tables(head_dim, positions, 1e4)), length)


def check(name: str, *arguments) -> None:
    """The kernel's results against the same in float64, from the same arguments; a second call
    gives the same bits.

    What an operation writes into its arguments counts as a result. An argument that is a dtype
    becomes float64 as well.
    """

    def run(operation, arguments) -> list[Tensor]:
        arguments = [changed(Tensor.clone, x) for x in arguments]
        return [*found(operation(*arguments)), *found(tuple(arguments))]

    wide = [torch.float64 if isinstance(x, torch.dtype) else changed(double, x) for x in arguments]
    exact = run(getattr(reference, name), wide)
    ours, again = (run(getattr(kernels.KERNELS, name), arguments) for _ in range(2))
    for right, got, repeated in zip(exact, ours, again, strict=True):
        assert torch.equal(got, repeated)
        error = (got.double() - right).abs().max() / right.abs().max()
        assert error <= WIDTH[min((got.dtype, ours[0].dtype), key=lambda dtype: dtype.itemsize)], (
            name,
            error,
        )


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("branch", [True, False])
@pytest.mark.parametrize("shape", [(17, 48), (5, 130), (64, 256)])
def test_add_norm(shape, branch, dtype):
    (x,), (added,) = tensors(torch.float32, shape), tensors(dtype, shape)
    (weight,) = tensors(torch.float32, shape[1:])
    check("add_norm", x, added if branch else None, weight, 1e-6, dtype)


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("elsewhere", [True, False])
@pytest.mark.parametrize("shape", [(17, 48), (5, 130), (64, 256)])
def test_add_norm_backward(shape, elsewhere, wide, dtype):
    (x,), (dy,) = tensors(torch.float32, shape), tensors(dtype, shape)
    (dx,) = tensors(torch.float32 if wide else dtype, shape)
    (weight,) = tensors(torch.float32, shape[1:])
    rstd = (x.square().mean(-1) + 1e-6).rsqrt()
    arguments = (dy, dx if elsewhere else None, Norm(weight, x, rstd))
    exact = reference.add_norm_backward(
        *(changed(double, each) for each in arguments), torch.float64
    )
    dtypes = (x.dtype, dtype) if wide else (dtype,)
    ours, branch, parts = kernels.KERNELS.add_norm_backward(*arguments, *dtypes)
    assert ours.dtype == dtypes[0]
    assert branch.dtype == dtype and torch.equal(branch, ours.to(dtype))
    for right, got in zip(exact, (ours, branch, parts.sum(0, keepdim=True)), strict=True):
        assert (got.double() - right).abs().max() <= WIDTH[got.dtype] * right.abs().max()
    total = torch.empty_like(weight)
    kernels.KERNELS.sum_parts(parts, total)
    torch.testing.assert_close(total, parts.sum(0), rtol=1e-5, atol=1e-5)


@runs_kernels
@in_16_bits
@with_and_without_epilogue
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize(
    "tokens, hidden, size", [(48, 40, 24), (17, 136, 56), (133, 16, 520), (5, 16, 1032)]
)
def test_the_gradient_of_a_norm_in_the_product_before_it(tokens, hidden, size, wide, fused, dtype):
    """`dots` is that of SwiGLU's gradient; of rows of more than 1,024 pairs it has two parts."""
    x, gate_and_up, dhidden = tensors(dtype, (tokens, hidden), (2 * size, hidden), (tokens, size))
    (dx,) = tensors(torch.float32 if wide else dtype, (tokens, hidden))
    (weight,) = tensors(torch.float32, (hidden,))
    gate_and_up, rstd = gate_and_up / hidden**0.5, (x.float().square().mean(-1) + 1e-6).rsqrt()
    y = (x * rstd[:, None] * weight).to(dtype)
    dgates, dots = kernels.KERNELS.swiglu_backward(
        dhidden, kernels.KERNELS.gate_up_swiglu(y, gate_and_up)[0], x
    )
    assert (dots is not None) == fused
    arguments = (dgates, dots, gate_and_up, dx, Norm(weight, x, rstd))
    exact = reference.product_norm_backward(
        *(changed(double, each) for each in arguments), dtype=torch.float64
    )
    dtypes = {"dtype": torch.float32, "branch_dtype": dtype} if wide else {"dtype": dtype}
    ours, branch, parts = kernels.KERNELS.product_norm_backward(*arguments, **dtypes)
    assert ours.dtype == dtypes["dtype"]
    assert branch.dtype == dtype and torch.equal(branch, ours.to(dtype))
    for right, got in zip(exact, (ours, branch, parts.sum(0, keepdim=True)), strict=True):
        assert (got.double() - right).abs().max() <= WIDTH[dtype] * right.abs().max()
    assert torch.equal(parts, kernels.KERNELS.product_norm_backward(*arguments, **dtypes)[2])


@for_hopper
@runs_kernels
@in_16_bits
@pytest.mark.parametrize("tokens, hidden, rows", [(133, 72, 272), (9, 64, 528)])
def test_a_wide_tile_is_stored_in_halves(monkeypatch, epilogues, tokens, hidden, rows, dtype):
    monkeypatch.setattr(matmul, "product_tile", lambda *_: tiles.TILES["swiglu"][0])
    x, weight = tensors(dtype, (tokens, hidden), (rows, hidden))
    weight = weight / hidden**0.5
    both = matmul.gate_up_swiglu(x, weight)
    for got, right in zip(both, reference.gate_up_swiglu(x.double(), weight.double()), strict=True):
        assert (got.double() - right).abs().max() <= WIDTH[dtype] * right.abs().max()


@runs_kernels
@in_16_bits
@with_and_without_epilogue
@pytest.mark.parametrize("tokens, hidden, size", [(48, 40, 24), (17, 64, 56), (33, 16, 8)])
def test_swiglu(tokens, hidden, size, fused, dtype):
    x, weight, dhidden = tensors(dtype, (tokens, hidden), (2 * size, hidden), (tokens, size))
    check("gate_up_swiglu", x, weight)
    check("swiglu_backward", dhidden, kernels.KERNELS.gate_up_swiglu(x, weight)[0])


@runs_kernels
@pytest.mark.parametrize("pairs", [2**30 - 1, 2**30, 2**31 - 1, 2**31])
def test_swiglu_of_more_pairs_than_half_of_an_int32(pairs):
    """The first program, which reads and writes no more than a block."""
    (gate_up,), y = tensors(torch.float32, (2048,)), torch.full((1024,), 7.0, device=DEVICE)
    elementwise._swiglu[1,](gate_up, y, pairs, BLOCK=1024)
    torch.testing.assert_close(y, torch.nn.functional.silu(gate_up[::2]) * gate_up[1::2])


@runs_kernels
@in_16_bits
@with_and_without_epilogue
@pytest.mark.parametrize(
    "length, heads, kv_heads, head_dim", [(17, 4, 2, 16), (8, 2, 2, 24), (5, 4, 1, 64)]
)
def test_rope(length, heads, kv_heads, head_dim, fused, dtype):
    x, weight = tensors(dtype, (2 * length, 48), ((heads + 2 * kv_heads) * head_dim, 48))
    tables = rope(head_dim, length + 3, length)
    check("qkv_rope", x, weight, tables, (heads + kv_heads) * head_dim)
    dq, dk, dv = (
        each.transpose(1, 2)
        for each in tensors(dtype, *((2, length, n, head_dim) for n in (heads, kv_heads, kv_heads)))
    )
    check("rotate_back", dq, dk, dv, tables)


@runs_kernels
@pytest.mark.parametrize(
    "tokens, hidden, rows",
    [(9, 36, 28), (9, 16, 24)],
    ids=["factors of 72 bytes", "a result of 24 bytes"],
)
def test_products_whose_rows_no_descriptor_describes_are_computed_all_the_same(
    epilogues, tokens, hidden, rows
):
    """Rows are to be multiples of 16 bytes."""
    x, weight = tensors(torch.float16, (tokens, hidden), (rows, hidden))
    check("gate_up_swiglu", x, weight)
    if hidden == 36:
        assert not matmul.in_epilogue("swiglu", tokens, rows, x, weight)
        return
    (qkv,) = tensors(torch.float16, (60, 16))
    check("qkv_rope", x, qkv, rope(10, 9, 9), 50)  # of 120 bytes


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1000])
# the last is more than a program holds
@pytest.mark.parametrize("tokens, vocabulary", [(5, 61), (3, 1000), (2, 16385)])
def test_cross_entropy(tokens, vocabulary, offset, dtype):
    (logits,) = tensors(dtype, (tokens, vocabulary))
    targets = torch.arange(tokens, device=DEVICE) * 7 % vocabulary
    logits = logits + offset
    loss = kernels.KERNELS.cross_entropy(logits.clone(), targets, False)
    exact = reference.cross_entropy(logits.double(), targets, False)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-6)
    check("cross_entropy", logits, targets, True)


def loss_and_gradient(operation, logits: Tensor, targets: Tensor) -> list[Tensor]:
    logits = logits.clone()
    return [operation(logits, targets, True), logits]


def pytorchs(logits: Tensor, targets: Tensor) -> list[Tensor]:
    leaf = logits.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(leaf, targets)
    loss.backward()
    return [loss.detach(), leaf.grad]


@runs_kernels
@pytest.mark.parametrize("offset", [0, 1000])
def test_confident_tokens_and_offset_logits_are_as_accurate_as_pytorchs(offset):
    batches = [confident(32, 64, 200, offset, seed) for seed in range(8)]
    pairs = [((x @ weight.T)[0], targets[0]) for x, weight, targets in batches]
    ours = stacked(loss_and_gradient(kernels.KERNELS.cross_entropy, *pair) for pair in pairs)
    theirs = stacked(pytorchs(*pair) for pair in pairs)
    exact = stacked(
        loss_and_gradient(reference.cross_entropy, logits.double(), targets)
        for logits, targets in pairs
    )
    as_accurate(ours, theirs, exact, margin=2)


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ignored", [[0], [4, 8], range(1, 9)], ids=str)
def test_ignored_tokens_do_not_count(ignored, dtype):
    (logits,), targets = tensors(dtype, (9, 61)), torch.arange(9, device=DEVICE)
    targets[list(ignored)] = -100
    check("cross_entropy", logits, targets, True)
    _, gradient = loss_and_gradient(kernels.KERNELS.cross_entropy, logits, targets)
    assert (gradient != 0).any(1).tolist() == (targets >= 0).tolist()
    exact = logits.double()
    for plain, theirs in zip(
        loss_and_gradient(reference.cross_entropy, exact, targets),
        pytorchs(exact, targets),
        strict=True,
    ):
        torch.testing.assert_close(plain, theirs)


@runs_kernels
def test_the_mean_is_over_all_that_count_of_more_tokens_than_are_read_at_once():
    (logits,) = tensors(torch.float32, (2050, 3))
    targets = torch.arange(2050, device=DEVICE) % 3
    targets[100:2049] = -100
    loss = kernels.KERNELS.cross_entropy(logits, targets, False)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, targets))


@runs_kernels
@pytest.mark.parametrize("operation", [reference.cross_entropy, kernels.KERNELS.cross_entropy])
def test_without_a_token_that_counts_the_loss_is_nan_and_the_gradient_zero(operation):
    (logits,) = tensors(torch.float32, (3, 61))
    loss, gradient = loss_and_gradient(operation, logits, torch.full((3,), -100, device=DEVICE))
    assert loss.isnan() and not gradient.any()


@runs_kernels
@pytest.mark.parametrize("target", [-1, -99, 61, 2**40])
def test_other_targets_are_refused_on_a_cpu_and_make_the_loss_nan_on_a_gpu(target):
    (logits,), targets = tensors(torch.float32, (3, 61)), torch.arange(3, device=DEVICE)
    targets[1] = target
    if DEVICE.type == "cuda":
        loss, gradient = loss_and_gradient(kernels.KERNELS.cross_entropy, logits, targets)
        assert loss.isnan() and gradient.isnan().all(1).tolist() == [False, True, False]
        return
    for operation in (reference.cross_entropy, kernels.KERNELS.cross_entropy):
        with pytest.raises(IndexError, match=f"Target {target} is out of bounds"):
            operation(logits, targets, True)


@runs_kernels
@pytest.mark.parametrize(
    "ids", [[3, 1, 3, 3, 0], [2] * 40, list(range(7)) * 5], ids=["few", "one", "many"]
)
def test_the_gradient_of_the_embedding(ids):
    ids, order = torch.tensor(ids, device=DEVICE).sort(stable=True)
    dx, dweight = tensors(torch.float32, (len(ids), 300), (9, 300))
    check("add_embedding_gradient", dx, ids, order, dweight)


@runs_kernels
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_adamw_is_pytorchs(dtype):
    master, *gradients = tensors(torch.float32, *[(2, 777)] * 4)
    parameter = torch.nn.Parameter(master.clone())
    theirs = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.1)
    moments = torch.zeros_like(master), torch.zeros_like(master)
    rest = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    working = None if dtype is None else torch.empty_like(master, dtype=dtype)
    rate = torch.tensor(1e-2, device=DEVICE)
    for step, gradient in enumerate(gradients, 1):
        parameter.grad = gradient
        theirs.step()
        steps = torch.tensor(float(step), device=DEVICE)
        copy, first, second = (x.clone() for x in (master, *moments))
        adamw = kernels.KERNELS.adamw
        # a sum over two processes
        adamw(copy, (first, second), 2 * gradient, None, steps, lr=rate, scale=0.5, **rest)
        adamw(master, moments, gradient, working, steps, lr=1e-2, **rest)
        # the same bits with the rate on the device
        assert all(map(torch.equal, (copy, first, second), (master, *moments)))
    torch.testing.assert_close(master, parameter.data, rtol=1e-5, atol=1e-6)
    assert working is None or torch.equal(working, master.to(dtype))


RATE = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
either_adamw = pytest.mark.parametrize(
    "adamw",
    [kernels.REFERENCE.adamw, pytest.param(kernels.KERNELS.adamw, marks=runs_kernels)],
    ids=["PyTorch", "kernel"],
)


def zeros_in_bf16(size: int) -> tuple[Tensor, Tensor]:
    first, second = torch.zeros(2, size, dtype=torch.bfloat16, device=DEVICE)
    return first, second


def test_random_bits_are_philoxs():
    """Its authors' known answer for a counter and a key of zeros; then one that needs 33 bits."""
    step = torch.tensor(0.0, device=DEVICE)
    known = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert reference.random_bits(step, 0, 4).tolist() == known
    assert reference.random_bits(step, 2**34, 4).tolist() != known


@runs_kernels
def test_adamw_rounds_moments_as_pytorchs_form():
    """With the same bits. The sums differ in the last place, which decides for few elements."""
    size = 2999
    (weight,) = tensors(torch.float32, (size,))
    results = []
    for adamw in (kernels.REFERENCE.adamw, kernels.KERNELS.adamw):
        master, moments = weight.clone(), zeros_in_bf16(size)
        for step, gradient in enumerate(tensors(torch.float32, *[(size,)] * 4), 1):
            steps = torch.tensor(float(step), device=DEVICE)
            adamw(master, moments, gradient, None, steps, **RATE, start=64)
        results.append((master, *moments))
    masters, *moments = zip(*results, strict=True)
    torch.testing.assert_close(*masters, rtol=1e-5, atol=1e-4)
    assert all((ours != theirs).sum() < 10 for ours, theirs in moments)


@either_adamw
def test_the_mean_of_rounded_moments_is_the_moment(adamw):
    """Within 4 standard errors, step after step; rounded to the nearest, neither would move."""
    size, steps = 1 << 14, 8
    weight, gradient = torch.zeros(2, size, device=DEVICE)
    exp_avg, exp_avg_sq = zeros_in_bf16(size)
    start = torch.tensor([-1.25, 1.5], dtype=torch.bfloat16)
    exp_avg += start[0]
    exp_avg_sq += start[1]
    kept = RATE | {"betas": (0.999, 0.999)}
    exact = start.double()
    for step in range(1, steps + 1):
        number = torch.tensor(float(step), device=DEVICE)
        adamw(weight, (exp_avg, exp_avg_sq), gradient, None, number, **kept)
        exact *= 0.999
        assert torch.equal((start.double() * 0.999).bfloat16(), start)
        for moment, value in zip((exp_avg, exp_avg_sq), exact, strict=True):
            found = moment.double()
            assert abs(found.mean() - value) < 4 * found.std() / size**0.5
    # The bits of one moment say nothing of the other's, nor of a neighbour's.
    pairs = torch.stack((exp_avg.float(), exp_avg_sq.float(), exp_avg_sq.float().roll(1)))
    assert (pairs.corrcoef() - torch.eye(3, device=DEVICE)).abs().max() < 4 / size**0.5


@either_adamw
def test_moments_in_bf16_depend_on_place_and_step_alone(adamw):
    """A buffer's shares draw the bits of their places in it."""
    weight, gradient = tensors(torch.float32, (2048,), (2048,))
    whole, shared, later = (zeros_in_bf16(2048) for _ in range(3))
    one, two = torch.tensor([1.0, 2.0], device=DEVICE)
    adamw(weight.clone(), whole, gradient, None, one, **RATE, start=128)
    for share in (slice(0, 704), slice(704, 2048)):
        parts = tuple(moment[share] for moment in shared)
        place = 128 + share.start
        adamw(weight[share].clone(), parts, gradient[share], None, one, **RATE, start=place)
    adamw(weight.clone(), later, gradient, None, two, **RATE, start=128)
    for moment, again, other in zip(whole, shared, later, strict=True):
        assert torch.equal(moment, again) and not torch.equal(moment, other)


@either_adamw
def test_moments_in_bf16_keep_what_is_not_finite(adamw):
    """The NaN is the one that NVIDIA's GPUs compute."""
    nan = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    gradient = torch.tensor([torch.inf, -torch.inf, 0.0, 0.0], device=DEVICE).repeat(64)
    gradient[2::4] = nan
    exp_avg, exp_avg_sq = zeros_in_bf16(256)
    step = torch.tensor(1.0, device=DEVICE)
    adamw(torch.ones(256, device=DEVICE), (exp_avg, exp_avg_sq), gradient, None, step, **RATE)
    assert torch.equal(exp_avg.isnan(), gradient.isnan())
    assert torch.equal(exp_avg.nan_to_num(7, 8, 9), gradient.nan_to_num(7, 8, 9).bfloat16())
    assert torch.equal(exp_avg_sq.nan_to_num(7, 8), gradient.square().nan_to_num(7, 8).bfloat16())


@runs_kernels
def test_what_kernels_read_may_have_any_strides():
    """Each second row of a tensor of twice the height gives the same bits as a copy of these rows."""
    x, branch, weight, big, table = tensors(
        torch.float32, (24, 64), (24, 64), (64,), (128, 64), (8, 16)
    )
    gates, logits = tensors(torch.float32, (12, 64), (12, 61))
    targets, (ids, order) = (
        torch.arange(24, device=DEVICE),
        (torch.arange(24, device=DEVICE) * 7 % 5).sort(stable=True),
    )
    rstd = torch.ones(12, device=DEVICE)
    heads = big[:24].view(2, 2, 12, 32)[..., ::2]  # Dh 16 with a stride of 2
    calls = {
        "add_norm": (x[::2], branch[::2], weight, 1e-6, torch.float32),
        "add_norm_backward": (x[::2], branch[::2], Norm(weight, x[1::2], rstd), torch.float32),
        "sum_parts": (x[::2], torch.zeros(64, device=DEVICE)),
        "qkv_rope": (x[::2], big[::2], Rope(table, table, 6), 48),
        "rotate_back": (heads, heads, heads, Rope(table.repeat(2, 1), table.repeat(2, 1), 12)),
        "gate_up_swiglu": (x[::2], big[::2]),
        "swiglu_backward": (x[::2, :32], gates),
        "product_norm_backward": (x[::2], None, big[:64], branch[::2], Norm(weight, x[1::2], rstd)),
        "cross_entropy": (logits, targets[::2], True),
        "add_embedding_gradient": (x, ids[::2], order[::2], torch.zeros(5, 64, device=DEVICE)),
    }
    # the tests of FP8 have strides of their own
    names = set(kernels.Operations._fields)
    fp8 = {name for name in names if "quantize" in name}
    # which write into contiguous buffers
    assert calls.keys() == names - fp8 - {"adamw", "rotate"}
    for name, strided in calls.items():
        results = []
        for copy in (False, True):
            written = [
                each.clone() if isinstance(each, Tensor) and each.is_contiguous() else each
                for each in strided
            ]
            arguments = [changed(Tensor.contiguous, each) if copy else each for each in written]
            named = {"dtype": torch.float32} if name == "product_norm_backward" else {}
            results.append(
                [
                    *found(getattr(kernels.KERNELS, name)(*arguments, **named)),
                    *found(tuple(written)),
                ]
            )
        for once, again in zip(*results, strict=True):
            assert torch.equal(once, again), name


def test_float64_is_left_to_pytorch():
    """The kernels compute in float32."""
    ids, order = torch.tensor([0, 1] * 50, device=DEVICE).sort(stable=True)
    (dx,) = tensors(torch.float64, (100, 8))
    dx, dweight = dx / 3, torch.zeros(2, 8, device=DEVICE, dtype=torch.float64)
    kernels.REFERENCE.add_embedding_gradient(dx, ids, order, dweight)
    torch.testing.assert_close(
        dweight, torch.stack((dx[0::2].sum(0), dx[1::2].sum(0))), rtol=1e-12, atol=1e-12
    )
    with pytest.raises(UsageError, match="compute in float32"):
        kernels.KERNELS.add_embedding_gradient(dx, ids, order, dweight)
