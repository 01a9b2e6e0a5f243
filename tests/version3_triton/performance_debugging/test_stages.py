"""Every stage shows its symptom, and its fix removes it."""

import importlib
from collections.abc import Callable

import stages
from common import device as devices
from common import spans, timing
from tests.conftest import runs_kernels
from tests.oracle import DEVICE, results
from tests.version3_triton.performance_debugging.conftest import FOLDER, NAMES, SMALL, stage_of
from tracepage.errors import RunError

import compare_stages
import pytest
import torch
import torch.nn.functional as F

if stages.kernels.HAS_TRITON:  # imported while the interpreter is asked for
    import swiglu_kernel
needs_triton = pytest.mark.skipif(not stages.kernels.HAS_TRITON, reason="needs Triton")


def test_fixed_stages_train_as_version_3_does(train):
    real = train("stage5")
    assert (
        real["stage"]["updated"] == real["stage"]["parameters"] and real["stage"]["caveat"] is None
    )
    for name in ("stage1", "stage2", "stage4", "stage6"):
        fixed = train(name, "--fixed")
        assert fixed["stage"]["fixed"] and fixed["stage"]["updated"] == fixed["stage"]["parameters"]
        assert fixed["loss"]["all"] == pytest.approx(real["loss"]["all"], abs=1e-5), name


def test_without_initialization_the_loss_starts_near_the_hidden_size(train):
    record = train("stage1", "--num-layers", "1")
    assert record["loss"]["all"][0] > record["loss"]["uniform"] + 10
    assert (
        train("stage1", "--num-layers", "1", "--fixed")["loss"]["all"][0]
        < record["loss"]["uniform"] + 1
    )


# Stage 2


def operators(function: Callable) -> set[str]:
    with torch.profiler.profile() as profile:
        function()
    return {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("fixed", (False, True), ids=("broken", "fixed"))
def test_slow_strides_take_pytorchs_plain_attention(fixed):
    stage2 = importlib.import_module(NAMES["stage2"])
    q, k, v = (
        torch.randn(1, heads, 64, 16, device=DEVICE, requires_grad=True) for heads in (4, 2, 2)
    )
    attention = stage2.attention_of_copies if fixed else stage2.attention
    called = operators(lambda: attention(q, k, v))
    assert ("aten::_scaled_dot_product_attention_math" in called) is not fixed
    reference = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v), reference, atol=1e-5, rtol=1e-4)


# Stage 3


class AsynchronousDevice:
    """The host needs 1 ms to ask for a phase, the device 10 ms to do it; a wait lets the host catch
    up.
    """

    def __init__(self) -> None:
        self.host = self.done = 0.0

    def launch(self) -> None:
        self.host += 1e-3
        self.done = max(self.host, self.done) + 10e-3

    def synchronize(self, device: torch.device) -> None:
        self.host = max(self.host, self.done)

    def step(self, index: int) -> None:
        self.launch()
        for name in ("backward", "optimizer"):
            with spans.span(name):
                self.launch()


@pytest.mark.parametrize(
    ("flags", "expected"), [((), 1.0), (("--fixed",), 11.0)], ids=("broken", "fixed")
)
def test_phases_without_synchronization_are_the_hosts(monkeypatch, flags, expected):
    device, stage = AsynchronousDevice(), stage_of("stage3")
    clock = stage.chosen(stage.options([*SMALL, *flags])).phase_clock
    monkeypatch.setattr(devices, "synchronize", device.synchronize)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: device.host)
    times = timing.phase_times(device.step, torch.device("cpu"), clock)
    assert {name: values[-1] for name, values in times.items()} == pytest.approx(
        {"forward": expected, "backward": expected, "optimizer": expected}
    )


# Stage 4


def swiglu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    return F.silu(gate) * up


def test_own_dot_products_are_right_and_no_matrix_product(no_kernels):
    stage4 = importlib.import_module(NAMES["stage4"])
    x, weight = torch.randn(2, 64, 128, device=DEVICE), torch.randn(512, 128, device=DEVICE)
    ours, theirs = (
        results(function, [x, weight]) for function in (stage4.FusedSwiGLU.apply, swiglu)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-3)
    products = {"aten::mm", "aten::addmm", "aten::matmul", "aten::linear"}
    assert products & operators(lambda: swiglu(x, weight))
    if DEVICE.type == "cpu":
        assert not products & operators(lambda: stage4.FusedSwiGLU.apply(x, weight))


@needs_triton
@runs_kernels
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=("fp32", "fp16"))
def test_the_naive_kernel(dtype):
    x, weight = (
        torch.randn(1, 5, 150, device=DEVICE).to(dtype),
        torch.randn(6, 150, device=DEVICE).to(dtype),
    )
    expected = swiglu(x.double(), weight.double())
    assert (swiglu_kernel.swiglu(x, weight) - expected).abs().max() < 4 * torch.finfo(
        dtype
    ).eps * expected.abs().max()


# Stage 6


def test_the_harness_refuses_a_model_that_does_not_train(execute, no_kernels):
    printed = execute(FOLDER / f"{NAMES['stage6']}.py", *SMALL, check=1)
    assert (
        "error: this model does not train: 13 of 14 parameters" in printed.err and printed.out == ""
    )


def test_without_the_check_one_parameter_is_trained(train):
    record, fixed = train("stage6", "--skip-check"), train("stage6", "--fixed")
    assert (record["stage"]["updated"], record["stage"]["parameters"]) == (1, 14) and record[
        "status"
    ] == "completed"
    # two moments in fp32
    assert fixed["stage"]["state_mib"] == pytest.approx(
        2 * 4 * fixed["parameters"] / 2**20, rel=0.01
    )
    # the forward pass is right
    assert record["loss"]["all"][0] == pytest.approx(fixed["loss"]["all"][0], abs=1e-5)
    assert abs(record["loss"]["all"][2] - fixed["loss"]["all"][2]) > 1e-3


# On a GPU

WIDE = (
    *(
        "--preset",
        "medium",
        "--num-layers",
        "4",
        "--hidden-dim",
        "2048",
        "--num-heads",
        "16",
        "--intermediate-dim",
        "5632",
    ),
    *("--batch-size", "32", "--num-kv-heads", "2", "--use-amp", "--data", "synthetic"),
    *("--num-steps", "10", "--warmup-steps", "2", "--time-phases"),
)


def share(record: dict) -> float:
    """Of the step that its phases add up to."""
    return (
        sum(phase["median"] for phase in record["phases_ms"].values()) / record["step_ms"]["median"]
    )


@pytest.mark.gpu
def test_on_a_gpu_every_symptom_shows_and_the_fix_removes_it(train):
    real = train("stage5", *WIDE, gpu=True)
    step = real["step_ms"]["median"]
    slow_stages = {
        name: [train(name, *WIDE, *flags, gpu=True) for flags in ((), ("--fixed",))]
        for name in ("stage2", "stage4")
    }
    for name, (broken, fixed) in slow_stages.items():
        assert broken["step_ms"]["median"] > 1.1 * fixed["step_ms"]["median"], name
        assert broken["loss"]["all"] == pytest.approx(real["loss"]["all"], abs=0.1)
    assert share(train("stage3", *WIDE, gpu=True)) < compare_stages.CLOCK
    assert share(train("stage3", *WIDE, "--fixed", gpu=True)) > 0.9
    assert share(real) > 0.9
    wrong = train("stage6", *WIDE, "--skip-check", gpu=True)
    assert wrong["stage"]["updated"] == 1 and wrong["step_ms"]["median"] < 0.8 * step
    assert wrong["memory"]["peak_mib"] < real["memory"]["peak_mib"]
    with pytest.raises(RunError, match="does not train"):
        train("stage6", *WIDE, gpu=True)
