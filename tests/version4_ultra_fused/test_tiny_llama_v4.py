"""Version 4's step and its flags, with PyTorch's operations; test_kernel_versions.py compares it
with Version 1.
"""

from types import SimpleNamespace

from common.precision import Precision
from tests import models
from tests.conftest import ROOT, TINY, runs_kernels
from tests.oracle import DEVICE
from tracepage.errors import UsageError
from tracepage.readers import chrome_trace
from version1_pytorch_baseline import tiny_llama_v1
from version4_ultra_fused import tiny_llama_v4
from version4_ultra_fused.memory import memory_plan

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

V4 = ROOT / "version4_ultra_fused"
SCRIPT = V4 / "tiny_llama_v4.py"
QUICK = (*TINY, "--data", "synthetic", "--num-steps", "3", "--warmup-steps", "1")
FP32 = Precision(DEVICE, None)


# ------------------------------------------------------------------------------------------------------- the same model


def test_a_batch_that_is_a_strided_view(no_kernels):
    """As of tokens and targets that stand in one tensor, side by side."""
    wide = torch.stack(models.batch(), -1)[:1]
    views, copies = (
        (wide[..., 0], wide[..., 1]),
        (wide[..., 0].contiguous(), wide[..., 1].contiguous()),
    )
    found = [models.gradients(models.build(tiny_llama_v4), batch) for batch in (views, copies)]
    assert not views[1].flatten().is_contiguous() and all(
        torch.equal(found[0][name], found[1][name]) for name in found[0]
    )


def with_memory_plan():
    model = models.build(tiny_llama_v4)
    optimizer = tiny_llama_v4.make_optimizer(model, SimpleNamespace(learning_rate=1e-3))
    tiny_llama_v4.make_step(model, optimizer, Precision(DEVICE, torch.bfloat16))
    return model


def test_logits_leave_nothing_for_a_later_loss_to_do(no_kernels):
    model, (ids, targets) = with_memory_plan(), models.batch()
    for _ in range(3):
        model(ids)
    with torch.no_grad():
        model.loss(ids, targets)
    assert not model.plan.schedule.waiting


def test_a_gradient_of_float32_is_rounded_where_gradients_are_kept_in_bf16(monkeypatch, no_kernels):
    """As FLOPs are counted, without autocast. A GPU's products write float32 themselves, and
    nothing else.
    """
    model = with_memory_plan()
    monkeypatch.setattr(memory_plan, "adds_in_float32", lambda device: True)
    model.loss(*models.batch()).backward()
    weight = model.layers[0].mlp.down_proj.weight
    assert (
        model.plan.buffers.gradient[weight].dtype == torch.bfloat16
        and model.plan.buffers.gradient[weight].any()
    )


@pytest.mark.parametrize("wide", [False, True])
def test_the_residual_gradient_is_bf16_or_float32_between_layers(no_kernels, wide):
    """In float32 it holds more than bf16 can, and products are given it rounded."""
    model = models.build(tiny_llama_v4, tiny_llama_v4.SWITCHES | {"fp32-residual-gradient": wide})
    optimizer = tiny_llama_v4.make_optimizer(model, SimpleNamespace(learning_rate=1e-3))
    precision = Precision(torch.device("cpu"), torch.bfloat16)  # as the model
    step = tiny_llama_v4.make_step(model, optimizer, precision)
    streams, branches = [], []

    def watch(module, arguments, results):
        for tensor, grads in zip(results, (streams, branches), strict=True):
            if tensor.requires_grad:
                tensor.register_hook(grads.append)

    for layer in model.layers:
        layer.register_forward_hook(watch)
    step(models.batch())
    assert {grad.dtype for grad in branches} == {torch.bfloat16}
    assert len(branches) == len(model.layers) and len(streams) == wide * len(branches)
    for stream, branch in zip(streams, branches if wide else [], strict=True):
        assert stream.dtype == torch.float32 and not torch.equal(stream, branch.float())
        assert torch.equal(stream.bfloat16(), branch)


def test_gradients_are_linear_in_the_loss_and_add_up_without_its_optimizer(no_kernels):
    batch, gradients = models.batch(), []
    for factors in ((1.0,), (3.0,), (1.0, 2.0)):
        model = models.build(tiny_llama_v4)
        for factor in factors:
            (factor * model.loss(*batch)).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for once, thrice, added in zip(*gradients, strict=True):
        torch.testing.assert_close(thrice, 3 * once)
        torch.testing.assert_close(added, 3 * once)


@pytest.mark.parametrize(
    "triton", [False, pytest.param(True, marks=runs_kernels)], ids=["plain", "triton"]
)
def test_what_pytorch_allows_or_refuses_is_allowed_or_refused(request, triton):
    if not triton:
        request.getfixturevalue("no_kernels")
    model, (ids, targets) = models.build(tiny_llama_v4, device=DEVICE), models.batch(DEVICE)
    with torch.inference_mode():
        assert torch.equal(model(ids), model(ids)) and model.loss(ids, targets).isfinite()
    assert model(ids[:0]).shape == (0, 17, 61)

    loss = model.loss(ids, targets)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()

    long = torch.zeros(1, model.cos.shape[0] + 1, dtype=torch.long, device=DEVICE)
    with pytest.raises(UsageError, match="the rotary tables hold 128 positions, not 129"):
        model(long)


@runs_kernels
def test_a_loss_of_no_tokens_is_refused():
    model, (ids, targets) = models.build(tiny_llama_v4, device=DEVICE), models.batch(DEVICE)
    with pytest.raises(UsageError, match="a mean over tokens, and there are none"):
        model.loss(ids[:0], targets[:0])


def test_logits_are_version_1s(no_kernels):
    ids, _ = models.batch()
    first, fourth = (models.build(version)(ids) for version in (tiny_llama_v1, tiny_llama_v4))
    torch.testing.assert_close(fourth, first.detach())
    assert not fourth.requires_grad


# ------------------------------------------------------------------------------------------------------------ its step


def test_batches_of_another_shape_and_evaluation_between_steps(no_kernels):
    """An eager step takes any shape, and an evaluation between steps changes nothing."""
    ids, targets = models.batch()
    short = ids[:1, :9].contiguous(), targets[:1, :9].contiguous()

    def losses(version, evaluated: bool) -> list[float]:
        model = models.build(version)
        optimizer = version.make_optimizer(model, models.Namespace(learning_rate=1e-2))
        step, found = version.make_step(model, optimizer, FP32), []
        for batch in ((ids, targets), short, (ids, targets)):
            found.append(step(batch).item())
            if evaluated:
                with torch.no_grad():
                    model.loss(*short)
                    model(ids)
        return found

    assert losses(tiny_llama_v4, True) == pytest.approx(losses(tiny_llama_v1, False), abs=1e-5)


def test_loaded_weights_are_those_that_train(no_kernels):
    """The copies in bf16 that products read follow a state dict, as when a run is resumed."""
    model, precision, batch = (
        models.build(tiny_llama_v4),
        Precision(torch.device("cpu"), torch.bfloat16),
        models.batch(),
    )
    optimizer = tiny_llama_v4.make_optimizer(model, models.Namespace(learning_rate=1e-2))
    step = tiny_llama_v4.make_step(model, optimizer, precision)
    initial = {name: weight.clone() for name, weight in model.state_dict().items()}
    first = [step(batch).item() for _ in range(2)]
    model.load_state_dict(initial)
    assert step(batch).item() == first[0] != first[1]


def test_float16_and_capture_where_there_is_no_gpu_are_refused(refused):
    model = models.build(tiny_llama_v4)
    optimizer = tiny_llama_v4.make_optimizer(model, models.Namespace(learning_rate=1e-2))
    with pytest.raises(UsageError, match="does not scale the loss"):
        tiny_llama_v4.make_step(model, optimizer, Precision(torch.device("cpu"), torch.float16))

    assert "needs a GPU" in refused(SCRIPT, *QUICK, "--capture-step", "--device", "cpu")


def test_moments_in_bf16_without_the_memory_plan_are_refused(refused):
    flags = ("--enable-bf16-moments", "--disable-memory-plan")
    assert "--enable-bf16-moments needs the memory plan" in refused(SCRIPT, *QUICK, *flags)


# ------------------------------------------------------------------------------------------------------ on the command line


@pytest.mark.parametrize(
    "flags",
    [
        ("--use-amp",),
        ("--no-capture-step", "--disable-all-fusion"),
        ("--time-phases",),
        ("--disable-memory-plan",),
        ("--enable-bf16-moments", "--use-amp"),
    ],
)
def test_its_flags_run(execute, no_kernels, known_ceilings, flags):
    assert "completed, 3 of 3 steps" in execute(SCRIPT, *QUICK, *flags).out


def test_products_of_both_passes_have_the_spans_of_their_layer(
    execute, no_kernels, known_ceilings, tmp_path
):
    """The backward pass is written by hand, so it opens its spans itself."""
    execute(
        SCRIPT,
        *TINY,
        "--num-steps",
        5,
        "--enable-pytorch-profiler",
        "--profile-dir",
        "profiles",
        "--profile-steps",
        1,
    )
    (path,) = (tmp_path / "profiles").glob("trace_*.json*")
    operators = chrome_trace.load(path).operators
    products = operators[operators.name.isin(["aten::mm", "aten::bmm", "aten::addmm"])]
    assert (
        {*products[products.phase == "forward"].span}
        == {*products[products.phase == "backward"].span}
        == {"attention", "mlp", "loss"}
    )
    assert {"norm", "embed"} <= {*operators[operators.phase == "backward"].span}
