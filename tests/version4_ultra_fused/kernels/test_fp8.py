"""Products in FP8: kernels against PyTorch, gradients against float64, and scales that are state."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import NamedTuple

from common.device import stream_before_capture
from common.precision import Precision
from common.training import capture, ending, preparation
from common.training.capture import CapturedStep
from tests.conftest import runs_kernels
from tests.models import FP8 as CONFIG
from tests.oracle import DEVICE
from tracepage.errors import RunError, UsageError

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
from version4_ultra_fused import tiny_llama_v4
from version4_ultra_fused.functions import ends, fp8_block
from version4_ultra_fused.kernels import KERNELS, REFERENCE, available, reference
from version4_ultra_fused.kernels.fp8 import scales as fp8_scales
from version4_ultra_fused.kernels.fp8.scales import ASSUMED, GRADIENT, HISTORY, MARGIN, Scales, X
from version4_ultra_fused.kernels.reference import SUM_SCALE, Slot
from version4_ultra_fused.memory.optimizer import MasterAdamW

if DEVICE.type == "cuda" and not fp8_scales.multiplies(DEVICE):
    pytest.skip("needs a CPU, or a GPU that multiplies in FP8", allow_module_level=True)
# The interpreter rounds FP8 wrong, so there the kernels write another format that clamps.
FORMATS = [*fp8_scales.formats()] if DEVICE.type == "cuda" else [torch.float16]
BF16 = Precision(DEVICE, torch.bfloat16)
# Steps on one batch after which every tensor and its scale repeat, so that nothing is clipped.
FOUND = 5


def slot(dtype: torch.dtype, scale: float) -> Slot:
    return Slot(torch.tensor(scale, device=DEVICE), torch.zeros((), device=DEVICE), dtype)


def numbers(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)


@runs_kernels
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("scale", [1e-2, 1e-6], ids=["fits", "clamped"])
@pytest.mark.parametrize("tokens, columns", [(16, 48), (65, 130), (1, 2)])
@pytest.mark.parametrize("name", ["quantize", "swiglu_quantized", "swiglu_backward_quantized"])
def test_a_kernel_stores_what_pytorch_does_by_rows_and_transposed(
    name, tokens, columns, scale, dtype
):
    arguments = {
        # a view whose rows are not together
        "quantize": (numbers(tokens, columns + 3)[:, :columns],),
        "swiglu_quantized": (numbers(tokens, columns),),
        "swiglu_backward_quantized": (numbers(tokens, columns // 2), numbers(tokens, columns)),
    }[name]
    ours, right = slot(dtype, scale), slot(dtype, scale)
    rows, transposed = getattr(KERNELS, name)(
        *(x.clone() if x.is_contiguous() else x for x in arguments), ours
    )
    expected, _ = getattr(reference, name)(*(x.clone() for x in arguments), right)
    # where a sum is rounded differently, the stored numbers are neighbours
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(
        rows.float(), expected.float(), rtol=step, atol=2 * torch.finfo(dtype).smallest_normal
    )
    assert torch.equal(transposed.float(), rows.float().T)
    torch.testing.assert_close(ours.largest, right.largest)
    assert scale == 1e-2 or rows.float().abs().max() == torch.finfo(dtype).max


@runs_kernels
@pytest.mark.parametrize(
    "operation", [reference.quantize, KERNELS.quantize], ids=["pytorch", "kernel"]
)
def test_what_is_not_a_number_stays_so(operation):
    x = numbers(16, 16)
    x[3, 5] = torch.nan
    rows, _ = operation(x, slot(FORMATS[0], 1.0))
    assert rows.float().isnan().nonzero().tolist() == [[3, 5]]


def logits_and_targets(tokens: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every second row of the targets' tensor; the second token does not count."""
    targets = torch.arange(2 * tokens, device=DEVICE) * 5 % vocabulary
    targets[2] = -100
    return numbers(tokens, vocabulary) * 4, targets[::2]


@runs_kernels
@pytest.mark.parametrize("tokens, vocabulary", [(5, 33), (48, 1000), (3, 16400)])
def test_the_gradient_of_logits_is_pytorchs_and_float64s(tokens, vocabulary):
    logits, targets = logits_and_targets(tokens, vocabulary)
    dtype = FORMATS[-1]
    loss, scale, rows, transposed = KERNELS.cross_entropy_quantized(logits, targets, dtype)
    right = reference.cross_entropy_quantized(logits.clone(), targets, dtype)
    assert rows.dtype == transposed.dtype == dtype
    torch.testing.assert_close((loss, scale), right[:2], rtol=1e-5, atol=1e-6)
    # The stored numbers are neighbours where an exponential is rounded differently.
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(rows.float(), right[2].float(), rtol=step, atol=0.1)
    assert torch.equal(transposed.float(), rows.float().T)
    exact = logits.double().requires_grad_()
    torch.nn.functional.cross_entropy(exact, targets).backward()
    ours = rows.double() * scale
    torch.testing.assert_close(ours, exact.grad, rtol=0.51 * step, atol=3e-6 / tokens)


@runs_kernels
@pytest.mark.parametrize(
    "operation",
    [reference.cross_entropy_quantized, KERNELS.cross_entropy_quantized],
    ids=["pytorch", "kernel"],
)
def test_the_scale_of_the_gradient_of_logits_holds_whatever_they_are(operation):
    """Sure and wrong, sure and right, even, and a token that does not count."""
    logits = torch.zeros(4, 32, dtype=torch.float16, device=DEVICE)
    logits[0, 3] = logits[1, 1] = 6e4
    targets = torch.tensor([0, 1, 2, -100], device=DEVICE)
    _, scale, rows, _ = operation(logits, targets, FORMATS[-1])
    assert scale.item() == pytest.approx(SUM_SCALE / 3)
    stored = rows.float() * SUM_SCALE
    assert stored[0, :4].tolist() == [-1, 0, 0, 1] and not stored[1].any() and not stored[3].any()
    assert stored[2, [0, 2]].tolist() == pytest.approx([1 / 32, 1 / 32 - 1], abs=1 / 16)
    *_, rows, _ = operation(logits, torch.full_like(targets, -100), FORMATS[-1])
    assert not rows.float().any()


@pytest.mark.gpu
def test_a_target_that_is_none_makes_its_gradient_nan():
    logits, targets = logits_and_targets(16, 48)
    targets[3] = 48
    loss, _, rows, _ = KERNELS.cross_entropy_quantized(logits, targets, FORMATS[-1])
    assert loss.isnan() and rows.float().isnan().all(1).nonzero().tolist() == [[3]]


def made(fp8: bool, dtype: torch.dtype = torch.bfloat16, vocabulary: int = CONFIG.vocab_size):
    torch.manual_seed(0)
    exact = dtype == torch.float64
    switches = tiny_llama_v4.SWITCHES | {"fp8": fp8}
    config = CONFIG.model_copy(update={"vocab_size": vocabulary})
    model = tiny_llama_v4.TinyLlama(config, switches, REFERENCE if exact else None).to(DEVICE)
    if exact:
        model.double()
    optimizer = MasterAdamW(model, lr=1e-3)
    precision = BF16 if dtype == torch.bfloat16 else Precision(DEVICE, None)
    return model, optimizer, tiny_llama_v4.make_step(model, optimizer, precision)


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(64, (4, 33), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def gradients(fp8: bool, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Of every parameter in the second step, whose scales come from the first; no weight has
    changed by then.
    """
    model, optimizer, step = made(fp8, dtype)
    optimizer.param_groups[0].update(lr=0.0)
    for _ in range(2):
        step(batch())
    return {
        name: model.plan.buffers.gradient[parameter].double()
        for name, parameter in model.named_parameters()
    }


@pytest.mark.usefixtures("no_kernels")
def test_gradients_are_those_of_float64_as_far_as_three_bits_can_tell():
    exact = gradients(False, torch.float64)
    for name, ours in gradients(True).items():
        error = (ours - exact[name]).norm() / exact[name].norm()
        assert error < 0.2, f"{name}: {error:.3f}"
    error = max(
        (ours - exact[name]).norm() / exact[name].norm() for name, ours in gradients(False).items()
    )
    assert error < 0.02  # bfloat16's, so the bound above could fail


def head(start: float | None, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """The loss of some tokens, and the gradients of x, the norm and the head for a backward pass
    from `start`; None: from `model.one`.
    """
    model, _, _ = made(dtype == torch.bfloat16, dtype)
    _, targets = logits_and_targets(64, 64)
    x = (0.02 * numbers(64, 64)).to(model.one.dtype).requires_grad_()
    with BF16.autocast() if dtype == torch.bfloat16 else nullcontext():
        loss = ends.loss(x, None, targets, model)
    loss.backward(model.one if start is None else start * torch.ones_like(model.one))
    buffers = model.plan.buffers.gradient
    gradients = x.grad, buffers[model.norm.weight], buffers[model.lm_head.weight]
    assert buffers[model.lm_head.weight].dtype == model.one.dtype
    return [value.detach().double() for value in (loss, *gradients)]


@pytest.mark.usefixtures("no_kernels")
def test_the_heads_gradients_are_those_of_float64_and_follow_the_losss_own():
    exact, ours = head(None, torch.float64), head(None)
    assert ours[0].item() == pytest.approx(exact[0].item(), abs=0.01)
    for result, right in zip(ours[1:], exact[1:], strict=True):
        error = (result - right).norm() / right.norm()
        assert 0.001 < error < 0.15
    for result, once in zip(head(-4.0)[1:], ours[1:], strict=True):
        assert torch.equal(result, -4 * once)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("vocabulary, in_fp8", [(64, True), (72, False)])
def test_the_head_is_in_fp8_where_tensor_cores_can_take_its_vocabulary(vocabulary, in_fp8):
    model, optimizer, step = made(True, vocabulary=vocabulary)
    weight = model.lm_head.weight
    for number in range(3):
        step(batch(number))
    scales = optimizer.scales
    assert (weight in scales.place) == in_fp8
    blocks = 4 * CONFIG.num_layers
    assert scales.largest[:blocks, :, :3].all()
    if in_fp8:
        x, matrix, gradient = scales.largest[scales.place[weight]]
        # The scale of its gradient has no history.
        assert x[:3].all() and matrix[:3].all() and not gradient.any()
    scales.begin(tokens=128)
    with BF16.autocast():
        model(batch()[0])
    # Without a loss its product is in bf16.
    assert scales.seen[:blocks, X].all() and not scales.seen[blocks:].any()


@pytest.mark.usefixtures("no_kernels")
def test_a_loss_without_a_backward_pass_computes_no_gradient():
    model, _, _ = made(True)
    x = numbers(64, 64).float().requires_grad_()
    _, targets = logits_and_targets(64, 64)
    with BF16.autocast():
        expected = ends.loss(x, None, targets, model)
        model.plan.operations = model.operations._replace(cross_entropy_quantized=None)
        with torch.no_grad():
            assert torch.equal(ends.loss(x.detach(), None, targets, model), expected)
        with pytest.raises(TypeError, match="not callable"):
            ends.loss(x, None, targets, model)


def test_a_scale_follows_the_largest_magnitude_of_the_last_steps():
    scales = Scales([torch.nn.Parameter(torch.ones(16, 16, device=DEVICE))])
    most = scales.most.cpu() / torch.tensor(MARGIN)
    torch.testing.assert_close(scales.scale[0].cpu() * most, torch.tensor(ASSUMED))
    for number in range(HISTORY + 1):
        scales.begin(tokens=8)
        largest = torch.tensor([50.0 if number == 0 else 2.0, 1.0, 0.5], device=DEVICE)
        scales.seen[0] = torch.maximum(scales.seen[0], largest)  # as kernels do
        scales.end()
        scales.begin(tokens=8)
        expected = 50.0 if number < HISTORY else 2.0
        torch.testing.assert_close(scales.scale[0].cpu() * most, torch.tensor([expected, 1.0, 0.5]))
    scales.begin(tokens=16)  # a mean over twice as many tokens
    assert scales.scale[0, GRADIENT].item() * most[GRADIENT] == pytest.approx(0.25)


def after(*magnitudes: float) -> Scales:
    """Scales of one product after steps in which its x has had these largest magnitudes."""
    scales = Scales([torch.nn.Parameter(torch.ones(16, 16, device=DEVICE))])
    for magnitude in magnitudes:
        scales.begin(tokens=8)
        scales.seen[0] = torch.tensor([magnitude, 1.0, 0.5], device=DEVICE)
        scales.end()
    scales.begin(tokens=8)
    return scales


@pytest.mark.parametrize("magnitude", [float("inf"), float("nan"), 0.0])
def test_a_magnitude_that_says_nothing_leaves_the_scale_as_it_is(magnitude):
    expected = after(2.0).scale
    assert torch.equal(after(2.0, magnitude).scale, expected)
    assert torch.equal(after(2.0, *[magnitude] * (HISTORY + 1)).scale, expected)
    assert torch.equal(after(magnitude).scale[0, 0], after().scale[0, 0])  # the assumed one


def test_a_step_whose_tensor_outgrows_its_scale_is_counted_once():
    assert after(2.0, 2.0, 2.0).saturated.tolist() == [0, 0, 0, 0]
    assert after(2.0, 2.02, 1.0).saturated.tolist() == [0, 0, 0, 0]  # rounding is as far off
    assert after(2.0, 2.2, 2.2).saturated.tolist() == [1, 0, 0, 1]
    assert after(2.0, float("inf"), 2.0).saturated.tolist() == [1, 0, 0, 1]
    assert after(2 * ASSUMED[0]).saturated.tolist() == [1, 0, 0, 1]
    several = Scales([torch.nn.Parameter(torch.ones(16, 16, device=DEVICE))] * 2)
    several.seen[:] = torch.tensor([1.0, 5.0, 40.0], device=DEVICE)  # W and gradient, in both
    several.end()
    assert several.saturated.tolist() == [0, 1, 1, 1]


def test_a_gradient_that_grows_to_five_times_is_not_clipped():
    scales = after(2.0)
    for gradient, count in ((5 * 0.5, 0), (9 * 5 * 0.5, 1)):
        scales.seen[0, GRADIENT] = gradient
        scales.end()
        assert scales.saturated[GRADIENT] == count
        scales.begin(tokens=8)


class Run(NamedTuple):
    losses: list[float]
    clipped: list[bool]  # whether the step was counted as one that clips a tensor
    scales: Scales


def run_with(monkeypatch, outlier: float | None, count: int) -> Run:
    """FOUND steps on one batch, without updates, and count steps more. In the first of these one
    element of the input of the first product is the outlier.
    """
    model, optimizer, step = made(True)
    optimizer.param_groups[0].update(lr=0.0)
    run = Run([], [], optimizer.scales)
    first = model.layers[0].self_attn.qkv_proj.weight

    class Product(fp8_block.Product):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if outlier and len(run.losses) == FOUND and self.parameter is first:
                x = x.clone()
                x[0, 0] = outlier
            return super().forward(x)

    with monkeypatch.context() as patch:
        patch.setattr(fp8_block, "Product", Product)
        for _ in range(FOUND + count):
            before = run.scales.saturated[3].item()
            run.losses.append(step(batch()).item())
            run.clipped.append(run.scales.saturated[3].item() == before + 1)
    return run


@pytest.mark.usefixtures("no_kernels")
def test_the_record_gets_what_the_optimizer_has_counted():
    _, optimizer, step = made(True)
    step(batch())
    optimizer.scales.saturated.copy_(torch.tensor([1.0, 0.0, 2.0, 3.0]))
    counted = {"saturated_steps": 3, "x": 1, "weight": 0, "gradient": 2}
    assert ending.fp8_saturation(optimizer) == counted


@pytest.mark.usefixtures("no_kernels")
def test_an_infinity_in_one_tensor_loses_at_most_that_step(monkeypatch):
    clean, run = (run_with(monkeypatch, outlier, 3) for outlier in (None, float("inf")))
    assert run.losses[FOUND] != clean.losses[FOUND] and torch.tensor(run.losses).isfinite().all()
    # Later steps have other scales where a tensor behind it was larger in that step, and none lost.
    assert run.losses[FOUND + 1 :] == pytest.approx(clean.losses[FOUND + 1 :], abs=0.02)
    assert torch.equal(run.scales.scale[0, 0], clean.scales.scale[0, 0])
    assert run.clipped[FOUND] and not clean.clipped[FOUND]


@pytest.mark.usefixtures("no_kernels")
def test_a_sudden_outlier_loses_no_step(monkeypatch):
    """It is clipped and counted in its step; the next ones could hold it, until it is forgotten."""
    outlier = 4096.0  # about 1,000 times as large as the rest
    clean, run = (run_with(monkeypatch, value, 2) for value in (None, outlier))
    assert run.losses == pytest.approx(clean.losses, abs=0.02)
    assert run.clipped[FOUND] and not clean.clipped[FOUND]
    scale, usual = run.scales.scale[0, 0].clone(), clean.scales.scale[0, 0]
    assert scale * run.scales.most[0] == outlier
    run = run_with(monkeypatch, outlier, HISTORY + 2)
    assert run.losses == pytest.approx(clean.losses[:1] * len(run.losses), abs=0.05)
    assert torch.equal(run.scales.scale[0, 0], usual) and usual < scale / 500


@pytest.mark.usefixtures("no_kernels")
def test_scales_are_forgotten_after_the_warm_up_and_resumed_exactly():
    model, optimizer, step = made(True)
    preparation.warm_up(preparation.Prepared(model, optimizer, step), BF16, batch(), passes=2)
    assert not optimizer.scales.largest.any() and not optimizer.scales.saturated.any()
    for number in range(3):
        step(batch(number))
    weights, state = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
    again, other, other_step = made(True)
    again.load_state_dict(weights)
    other.load_state_dict(state)
    assert (
        torch.equal(other.scales.largest, optimizer.scales.largest)
        and optimizer.scales.largest.any()
    )
    assert torch.equal(other.scales.saturated, optimizer.scales.saturated)
    assert torch.equal(other_step(batch(3)), step(batch(3)))
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(again.parameters(), model.parameters(), strict=True)
    )
    assert model.baseline_state_dict().keys() == made(False)[0].baseline_state_dict().keys()


@pytest.mark.gpu
def test_a_captured_step_is_the_eager_one():
    losses = {}
    for captured in (False, True):
        model, optimizer, step = made(True)
        with stream_before_capture():
            preparation.warm_up(
                preparation.Prepared(model, optimizer, step), BF16, batch(), passes=3
            )
        if captured:
            step = CapturedStep(step, batch())
        losses[captured] = [step(batch(number)).item() for number in range(6)]
    assert losses[True] == losses[False]


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(
    "fp8, nudge, number, refused",
    [
        (True, 1e-6, 0, False),
        (True, 0, 1, True),
        (False, 1e-6, 0, False),
        (False, 0.1, 0, True),
        (False, None, 0, True),
    ],
    ids=["other roundings", "another batch", "bf16", "bf16, other weights", "not a number"],
)
def test_a_captured_step_may_differ_from_the_eager_one_by_roundings(
    monkeypatch, fp8, nudge, number, refused
):
    model, optimizer, step = made(fp8)
    if nudge is None:
        model.layers[0].mlp.down_proj.weight.data[0, 0] = float("inf")
        model.load_state_dict(model.state_dict())
    initial = {name: value.cpu().clone() for name, value in model.state_dict().items()}

    def captured(step, *_):  # a capture needs a GPU
        def replay(_):
            change, generator = nudge or 0, torch.Generator().manual_seed(7)
            model.load_state_dict(
                {
                    k: v * (1 + change * torch.rand(v.shape, generator=generator))
                    for k, v in initial.items()
                }
            )
            return step(batch(number))

        replay.peak_bytes = 0
        return replay

    monkeypatch.setattr(capture, "CapturedStep", captured)
    monkeypatch.setattr(capture.devices, "stream_before_capture", nullcontext)
    with pytest.raises(RunError, match="the captured step differs") if refused else nullcontext():
        capture.captured_step(preparation.Prepared(model, optimizer, step), BF16, batch(0))
    kept = all(
        torch.equal(initial[name], value.cpu()) for name, value in model.state_dict().items()
    )
    assert kept or nudge is None  # an update by NaN is one, at any learning rate


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"device": "cpu"}, "products in FP8 need a GPU"),
        ({"memory-plan": False}, "and the memory plan"),
        ({"batch_size": 1, "seq_len": 8}, "must be multiples of 16"),
        ({"capability": (8, 6)}, "A6000 has no products in FP8"),
    ],
    ids=str,
)
def test_it_is_refused_with_a_reason(monkeypatch, options, reason):
    options = dict(options)
    capability = options.pop("capability", (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A6000")
    monkeypatch.setattr(fp8_scales.devices, "select", torch.device)
    switches = {"fp8": True, "fa4": False, "memory-plan": options.pop("memory-plan", True)}
    given = {
        "device": "cuda",
        "model": CONFIG,
        "batch_size": 4,
        "seq_len": 32,
        "use_amp": True,
        "amp_dtype": None,
    } | options
    options = SimpleNamespace(switches=switches, checkpoint_activations="none", **given)
    with pytest.raises(UsageError, match=reason):
        available(options)
