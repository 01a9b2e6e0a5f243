"""Version 3 as a version: the losses and gradients of Version 1, and its switches on the command line.

Without a GPU the kernels run in Triton's interpreter, about a second a training step.
"""

import json

from common import device as devices
from common.options import RunOptions
from common.precision import Precision
from tests import models
from tests.conftest import INTERPRETER_FAILS, ROOT, TINY, V1, needs_interpreter, run_options, runs_kernels
from tests.oracle import DEVICE
from version1_pytorch_baseline import tiny_llama_v1

import pytest
import torch

pytest.importorskip("triton")
from version3_triton import kernels, tiny_llama_v3

V3 = ROOT / "version3_triton"
SCRIPT = V3 / "tiny_llama_v3.py"
QUICK = (*TINY, "--data", "synthetic", "--num-steps", "3", "--warmup-steps", "1")
ALL_ON, ALL_OFF = tiny_llama_v3.SWITCHES, dict.fromkeys(tiny_llama_v3.SWITCHES, False)
interpreted = pytest.mark.skipif(
    INTERPRETER_FAILS or not kernels.INTERPRETED, reason="needs Triton's interpreter in this process"
)


@pytest.fixture
def no_kernels(monkeypatch) -> None:
    """As on a machine without a GPU where nobody asks for the interpreter."""
    monkeypatch.setattr(kernels, "INTERPRETED", False)


# ------------------------------------------------------------------------------------------------------- the same model


@pytest.mark.parametrize(
    "switches, steps, tolerance",
    [pytest.param(ALL_OFF, 5, 1e-6, id="plain"), pytest.param(ALL_ON, 2, 1e-5, id="triton", marks=runs_kernels)],
)
def test_losses_of_version_1(switches, steps, tolerance):
    first, third = models.build(tiny_llama_v1, device=DEVICE), models.build(tiny_llama_v3, switches, device=DEVICE)
    batches, precision = [models.batch(DEVICE)] * steps, Precision(DEVICE, None)
    expected = models.losses(tiny_llama_v1, first, batches, precision)
    assert models.losses(tiny_llama_v3, third, batches, precision) == pytest.approx(expected, abs=tolerance)
    assert all(parameter.grad is None for parameter in third.parameters())  # a step leaves none behind
    assert expected[-1] < expected[0]


@runs_kernels
@pytest.mark.parametrize("switches, ignored", [(ALL_ON, 0), (ALL_ON, 5), (ALL_OFF, 5)], ids=["all", "ignored", "plain, ignored"])
def test_every_parameter_gets_the_gradient_of_version_1(switches, ignored):
    """Targets of -100 count neither with kernels nor without."""
    batch = models.batch(DEVICE)
    batch[1][:, :ignored] = -100
    first = models.gradients(models.build(tiny_llama_v1, device=DEVICE), batch)
    third = models.gradients(models.build(tiny_llama_v3, switches, device=DEVICE), batch)
    assert third.keys() == first.keys()
    for name, gradient in first.items():
        assert gradient.any()
        torch.testing.assert_close(third[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@interpreted
def test_another_script_validates_it_with_its_kernels(execute, tmp_path):
    (tmp_path / "small.yaml").write_text(
        "model: {hidden_size: 16, num_layers: 1, num_attention_heads: 2, intermediate_size: 16, vocab_size: 16}"
    )
    script = ROOT / "version2_pytorch_fused/validate_numerical_accuracy.py"
    small = ("--config", "small.yaml", "--batch-size", "1", "--seq-len", "4")
    execute(script, "--baseline", V1 / "tiny_llama_v1.py", "--optimized", SCRIPT, *small)


# ------------------------------------------------------------------------------------------------------------- switches


def options(*flags: str) -> RunOptions:
    return run_options(tiny_llama_v3, *TINY, *flags)


@runs_kernels
@pytest.mark.parametrize(
    "flags, off",
    [
        ([], set()),
        (["--disable-triton-norm", "--disable-triton-loss"], {"triton-norm", "triton-loss"}),
        (["--disable-all-fusion", "--enable-triton-rope"], ALL_ON.keys() - {"triton-rope"}),
        (["--enable-all-fusion", "--disable-triton-swiglu"], {"triton-swiglu"}),
    ],
)
def test_flags_switch_what_they_name(flags, off):
    switches = tiny_llama_v3.make_model(options(*flags)).switches
    assert switches.keys() == ALL_ON.keys() and {name for name, on in switches.items() if not on} == off


@pytest.mark.parametrize("name", ["all-fusion", "triton-norm"])
def test_switches_that_contradict_each_other(refused, name):
    assert "not allowed with argument" in refused(SCRIPT, f"--enable-{name}", f"--disable-{name}")


def test_without_a_gpu_a_line_says_so_and_the_record_says_why(execute, no_kernels, tmp_path):
    said = execute(SCRIPT, *QUICK, "--metrics-out", "v3.json").err
    [line] = [line for line in said.splitlines() if "Triton" in line]
    assert line.startswith("no Triton kernels: they need a GPU")
    settings = json.loads((tmp_path / "v3.json").read_text())["settings"]
    assert "need a GPU" in settings.pop("no_kernels")
    assert settings == {name.replace("-", "_"): False for name in ALL_ON}


@needs_interpreter
def test_it_runs_the_kernels_in_the_interpreter_when_asked(run_script, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    small = ("--num-layers", "1", "--num-steps", "1", "--vocab-size", "16", "--seq-len", "4", "--batch-size", "1")
    done = run_script(SCRIPT, *QUICK, *small, "--disable-triton-loss", "--metrics-out", "v3.json")
    assert "no Triton kernels" not in done.stderr
    settings = json.loads((tmp_path / "v3.json").read_text())["settings"]
    assert settings == {name.replace("-", "_"): name != "triton-loss" for name in ALL_ON}


@interpreted
def test_a_head_that_the_kernel_does_not_take_is_one_line(refused):
    wide = (*QUICK, "--num-layers", "1", "--hidden-dim", "272", "--num-heads", "2", "--seq-len", "2", "--vocab-size", "16")
    assert "head dimensions to 128, not 136: switch it off" in refused(SCRIPT, *wide)


# ---------------------------------------------------------------------------------------------------------- other tools


@pytest.mark.parametrize("script", ["run_pytorch_profiler.py", "run_deepspeed_flops.py"])
def test_the_other_tools_run(execute, no_kernels, known_ceilings, tmp_path, script):
    execute(V3 / script, *QUICK)
    assert list(tmp_path.glob("pytorch_profiles/profile_*.json")) or (tmp_path / "flops_analysis/flops_profile.json").exists()


# ------------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_it_trains_as_version_1_on_the_gpu(dtype):
    devices.prepare(DEVICE, 0)
    batches = [models.batch(DEVICE)] * 10
    first, third = (
        models.losses(version, models.build(version, device=DEVICE), batches, Precision(DEVICE, dtype))
        for version in (tiny_llama_v1, tiny_llama_v3)
    )
    assert third == pytest.approx(first, abs=1e-4 if dtype is None else 3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_every_parameter_gets_a_gradient_under_autocast(dtype):
    third, precision = models.build(tiny_llama_v3, device=DEVICE), Precision(DEVICE, dtype)
    with precision.autocast():
        loss = third.loss(*models.batch(DEVICE))
    precision.scale(loss).backward()
    assert all(parameter.grad.isfinite().all() and parameter.grad.any() for parameter in third.parameters())


@pytest.mark.gpu
def test_the_same_seed_gives_the_same_bits():
    devices.prepare(DEVICE, 0)
    first, second = (
        models.losses(
            tiny_llama_v3,
            models.build(tiny_llama_v3, device=DEVICE),
            [models.batch(DEVICE)] * 5,
            Precision(DEVICE, torch.bfloat16),
        )
        for _ in range(2)
    )
    assert first == second
