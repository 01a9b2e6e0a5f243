"""Version 4 as a version: the losses and gradients of Version 1, its switches, its optimizer, and how its step runs.

Without a GPU the kernels run in Triton's interpreter where a test asks for them, and PyTorch's operations elsewhere.
"""

import json

from common import device as devices
from common.analysis.profiles import chrome_trace
from common.errors import UsageError
from common.precision import Precision
from tests import models
from tests.conftest import ROOT, TINY, needs_interpreter, runs_kernels
from tests.oracle import DEVICE
from version1_pytorch_baseline import tiny_llama_v1
from version4_ultra_fused import tiny_llama_v4

import pytest
import torch

pytest.importorskip("triton")
from version3_triton import kernels as third_kernels

V4 = ROOT / "version4_ultra_fused"
SCRIPT = V4 / "tiny_llama_v4.py"
QUICK = (*TINY, "--data", "synthetic", "--num-steps", "3", "--warmup-steps", "1")
FP32 = Precision(DEVICE, None)
NO_PLAN = {"memory-plan": False, "side-stream": False, "early-update": False}


@pytest.fixture
def no_kernels(monkeypatch) -> None:
    """As on a machine without a GPU where nobody asks for the interpreter."""
    monkeypatch.setattr(third_kernels, "INTERPRETED", False)


# ------------------------------------------------------------------------------------------------------- the same model


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=runs_kernels)], ids=["plain", "triton"])
@pytest.mark.parametrize("kv_heads, switches", [(4, {}), (2, {}), (1, {}), (2, NO_PLAN)], ids=str)
def test_losses_of_version_1(request, kernels, kv_heads, switches):
    if not kernels:
        request.getfixturevalue("no_kernels")
    first = models.build(tiny_llama_v1, kv_heads=kv_heads, device=DEVICE)
    fourth = models.build(tiny_llama_v4, tiny_llama_v4.SWITCHES | switches, kv_heads=kv_heads, device=DEVICE)
    batches = [models.batch(DEVICE)] * (2 if kernels or DEVICE.type == "cuda" else 5)
    expected = models.losses(tiny_llama_v1, first, batches, FP32)
    assert models.losses(tiny_llama_v4, fourth, batches, FP32) == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[0]


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=runs_kernels)], ids=["plain", "triton"])
@pytest.mark.parametrize("ignored", [0, 5])
def test_every_parameter_gets_the_gradient_of_version_1(request, ignored, kernels):
    """Without Version 4's optimizer gradients stand in `.grad`. Targets of -100 do not count in any version."""
    if not kernels:
        request.getfixturevalue("no_kernels")
    batch = models.batch(DEVICE)
    batch[1][:, :ignored] = -100
    first, fourth = (models.gradients(models.build(version, device=DEVICE), batch) for version in (tiny_llama_v1, tiny_llama_v4))
    assert fourth.keys() == first.keys()
    for name, gradient in first.items():
        assert gradient.any()
        torch.testing.assert_close(fourth[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_a_batch_that_is_a_strided_view(no_kernels):
    """As of tokens and targets that stand in one tensor, side by side."""
    wide = torch.stack(models.batch(), -1)[:1]
    views, copies = (wide[..., 0], wide[..., 1]), (wide[..., 0].contiguous(), wide[..., 1].contiguous())
    found = [models.gradients(models.build(tiny_llama_v4), batch) for batch in (views, copies)]
    assert not views[1].flatten().is_contiguous() and all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_loss_that_is_scaled_scales_the_gradients(no_kernels):
    batch, gradients = models.batch(), []
    for factor in (1.0, 3.0):
        model = models.build(tiny_llama_v4)
        (factor * model.loss(*batch)).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for once, thrice in zip(*gradients, strict=True):
        torch.testing.assert_close(thrice, 3 * once)


def test_gradients_of_two_losses_add_up_without_its_optimizer(no_kernels):
    model, batch = models.build(tiny_llama_v4), models.batch()
    model.loss(*batch).backward()
    once = [parameter.grad.clone() for parameter in model.parameters()]
    model.loss(*batch).backward()
    for parameter, gradient in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient)


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
    model, precision, batch = models.build(tiny_llama_v4), Precision(torch.device("cpu"), torch.bfloat16), models.batch()
    optimizer = tiny_llama_v4.make_optimizer(model, models.Namespace(learning_rate=1e-2))
    step = tiny_llama_v4.make_step(model, optimizer, precision)
    initial = {name: weight.clone() for name, weight in model.state_dict().items()}
    first = [step(batch).item() for _ in range(2)]
    model.load_state_dict(initial)
    assert step(batch).item() == first[0] != first[1]


def test_float16_is_refused():
    model = models.build(tiny_llama_v4)
    optimizer = tiny_llama_v4.make_optimizer(model, models.Namespace(learning_rate=1e-2))
    with pytest.raises(UsageError, match="does not scale the loss"):
        tiny_llama_v4.make_step(model, optimizer, Precision(torch.device("cpu"), torch.float16))


# ------------------------------------------------------------------------------------------------------ on the command line


def test_without_a_gpu_a_line_says_so_and_the_step_is_not_captured(execute, no_kernels, tmp_path):
    said = execute(SCRIPT, *QUICK, "--metrics-out", "v4.json").err
    [line] = [line for line in said.splitlines() if "Triton" in line]
    assert line.startswith("no Triton kernels: they need a GPU")
    settings = json.loads((tmp_path / "v4.json").read_text())["settings"]
    assert "need a GPU" in settings.pop("no_kernels") and "capture_step" not in settings


def test_captured_where_there_is_no_gpu_is_refused(refused):
    assert "needs a GPU" in refused(SCRIPT, *QUICK, "--capture-step")


@pytest.mark.parametrize(
    "flags", [("--use-amp",), ("--no-capture-step", "--disable-all-fusion"), ("--time-phases",), ("--disable-memory-plan",)]
)
def test_its_flags_run(execute, no_kernels, flags):
    assert "completed, 3 of 3 steps" in execute(SCRIPT, *QUICK, *flags).out


def test_products_of_both_passes_have_the_spans_of_their_layer(execute, no_kernels, tmp_path):
    """The backward pass is written by hand, so it opens its spans itself."""
    execute(SCRIPT, *TINY, "--num-steps", 5, "--enable-pytorch-profiler", "--profile-dir", "profiles", "--profile-steps", 1)
    (path,) = (tmp_path / "profiles").glob("trace_*.json*")
    operators = chrome_trace.load(path).operators
    products = operators[operators.name.isin(["aten::mm", "aten::bmm", "aten::addmm"])]
    assert {*products[products.phase == "forward"].span} == {*products[products.phase == "backward"].span} == {
        "attention", "mlp", "loss"
    }  # fmt: skip
    forward = products[(products.phase == "forward") & (products.span != "loss")]
    assert {*zip(forward.span, forward.detail, strict=True)} == {
        ("attention", "qkv_projection"), ("attention", "output_projection"), ("mlp", "gate_up"), ("mlp", "down")
    }  # fmt: skip
    assert {"norm", "embed"} <= {*operators[operators.phase == "backward"].span}


@needs_interpreter
def test_it_runs_the_kernels_in_the_interpreter_when_asked(run_script, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    small = ("--num-layers", "1", "--num-steps", "1", "--vocab-size", "16", "--seq-len", "4", "--batch-size", "1")
    done = run_script(SCRIPT, *QUICK, *small, "--metrics-out", "v4.json")
    assert "no Triton kernels" not in done.stderr
    assert json.loads((tmp_path / "v4.json").read_text())["settings"]["side_stream"] is True


def test_what_it_saves_is_version_1s(execute, no_kernels, tmp_path):
    from safetensors.torch import load_file

    execute(SCRIPT, *QUICK, "--save-model", "saved")
    saved = load_file(tmp_path / "saved/model.safetensors")
    sizes = {name: [*weight.shape] for name, weight in saved.items()}
    assert sizes["model.layers.0.self_attn.q_proj.weight"] == [32, 32] and sizes["model.layers.1.mlp.up_proj.weight"] == [64, 32]


# ------------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "switches", [{}, {"side-stream": False}, NO_PLAN, {"early-update": False}, {"exact-attention": True}], ids=str
)
def test_it_trains_as_version_1_on_the_gpu(switches, dtype):
    devices.prepare(DEVICE, 0)
    batches, precision = [models.batch(DEVICE)] * 10, Precision(DEVICE, dtype)
    first = models.losses(tiny_llama_v1, models.build(tiny_llama_v1, device=DEVICE), batches, precision)
    fourth = models.build(tiny_llama_v4, tiny_llama_v4.SWITCHES | switches, device=DEVICE)
    assert models.losses(tiny_llama_v4, fourth, batches, precision) == pytest.approx(first, abs=1e-4 if dtype is None else 3e-2)


@pytest.mark.gpu
def test_the_same_seed_gives_the_same_bits():
    devices.prepare(DEVICE, 0)
    first, second = (
        models.losses(
            tiny_llama_v4,
            models.build(tiny_llama_v4, device=DEVICE),
            [models.batch(DEVICE)] * 5,
            Precision(DEVICE, torch.bfloat16),
        )
        for _ in range(2)
    )
    assert first == second
