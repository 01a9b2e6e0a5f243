"""Version 2: the same model as Version 1 in every combination of its fusions, and its switches."""

import itertools
import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from types import ModuleType

from common import device as devices
from common.precision import Precision
from tests import models
from tests.conftest import ROOT, TINY, run_options
from version1_pytorch_baseline import tiny_llama_v1
from version2_pytorch_fused import tiny_llama_v2

import pytest
import torch

SCRIPT = ROOT / "version2_pytorch_fused/tiny_llama_v2.py"
QUICK = (*TINY, "--num-layers", "1", "--data", "synthetic", "--num-steps", "6")
CPU = torch.device("cpu")
FUSIONS = ("qkv-fusion", "flash-attention", "swiglu-fusion")  # those that change the model


def only(*on: str) -> dict[str, bool]:
    """These switches on, all others off."""
    return {name: name in on for name in tiny_llama_v2.SWITCHES}


COMBINATIONS = [
    only(*on) for count in range(len(FUSIONS) + 1) for on in itertools.combinations(FUSIONS, count)
]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    "switches",
    COMBINATIONS,
    ids=lambda switches: " ".join(name for name, on in switches.items() if on) or "none",
)
def test_same_logits_and_gradients_as_version_1(kv_heads, switches):
    first, second = (
        models.build(tiny_llama_v1, kv_heads=kv_heads),
        models.build(tiny_llama_v2, switches, kv_heads=kv_heads),
    )
    batch = models.batch()
    torch.testing.assert_close(second(batch[0]), first(batch[0]), rtol=0, atol=1e-5)
    expected = models.gradients(first, batch)
    for name, gradient in models.gradients(second, batch).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.fixture
def losses_and_settings(monkeypatch, tmp_path) -> Callable[..., tuple[list[float], dict]]:
    """losses_and_settings(version, *flags): of the record of a run in this process."""
    monkeypatch.delenv("PYTORCH_FALLBACK_ATTENTION", raising=False)
    monkeypatch.chdir(tmp_path)

    def train(version: ModuleType, *flags: str) -> tuple[list[float], dict]:
        record = version.train(run_options(version, *QUICK, "--device", "cpu", *flags)).record
        return record["loss"]["all"], record["settings"]

    return train


ALL_OFF = {name.replace("-", "_"): False for name in tiny_llama_v2.SWITCHES}


def test_the_flags_leave_losses_as_they_are_and_the_record_has_the_flags(
    losses_and_settings, monkeypatch
):
    expected, settings = losses_and_settings(tiny_llama_v1)
    assert settings == {}
    assert losses_and_settings(tiny_llama_v2, "--disable-all-fusion") == (expected, ALL_OFF)
    fused, settings = losses_and_settings(tiny_llama_v2)
    assert fused == pytest.approx(expected, abs=1e-5)
    assert settings == dict.fromkeys(ALL_OFF, True) | {"torch_compile": False}
    monkeypatch.setenv("PYTORCH_FALLBACK_ATTENTION", "1")
    unfused = ("--disable-qkv-fusion", "--disable-swiglu-fusion", "--disable-fused-adamw")
    assert losses_and_settings(tiny_llama_v2, *unfused) == (expected, ALL_OFF)


def test_a_compiled_run_trains_alike(losses_and_settings, run_script, tmp_path):
    run_script(
        SCRIPT,
        *QUICK,
        "--enable-all-fusion",
        "--enable-deepspeed-flops",
        "--metrics-out",
        "compiled.json",
    )
    record = json.loads((tmp_path / "compiled.json").read_text())
    assert record["loss"]["all"] == pytest.approx(losses_and_settings(tiny_llama_v2)[0], abs=1e-5)
    assert record["settings"] == dict.fromkeys(ALL_OFF, True)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_fused_adamw_trains_alike_and_is_what_the_switch_says(dtype):
    found = {}
    for fused in (False, True):
        model = models.build(tiny_llama_v2, tiny_llama_v2.SWITCHES | {"fused-adamw": fused})
        optimizer = tiny_llama_v2.make_optimizer(model, Namespace(learning_rate=1e-2))
        assert optimizer.defaults["fused"] is (
            fused or None
        )  # None: PyTorch chooses, foreach on a GPU
        batches = [models.batch()] * 5
        found[fused] = models.losses(tiny_llama_v2, model, batches, Precision(CPU, dtype))
    assert found[True] == pytest.approx(found[False], rel=1e-6 if dtype is None else 2e-2)
    assert found[True][-1] < 0.9 * found[True][0]


@pytest.mark.parametrize(
    "flags, mode", [([], None), (["--torch-compile-mode", "max-autotune"], "max-autotune")]
)
def test_the_step_that_trains_is_compiled_in_the_mode_that_was_asked_for(monkeypatch, flags, mode):
    compiled = []

    def compile_(function, mode=None):
        compiled.append((function.__name__, mode))
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr("common.device.compile_problem", lambda device: None)
    chosen = run_options(
        tiny_llama_v2, "--enable-torch-compile", "--disable-flash-attention", *flags
    )
    model = tiny_llama_v2.make_model(chosen)
    models.losses(tiny_llama_v2, model, [models.batch()], Precision(CPU, None))
    assert compiled[-1] == ("loss", mode)
    models.losses(
        tiny_llama_v2,
        tiny_llama_v2.make_model(run_options(tiny_llama_v2)),
        [models.batch()],
        Precision(CPU, None),
    )
    assert compiled[-1] == ("loss", mode) and [name for name, _ in compiled].count("loss") == 1


def test_torch_compile_without_a_compiler_is_one_line(run_script, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    done = run_script(SCRIPT, *QUICK, "--enable-torch-compile", check=2)
    *_, last = done.stderr.splitlines()  # lines about slow work may come before
    assert (
        last.startswith("error: torch.compile does not work here: ")
        and "Traceback" not in done.stderr
    )


def test_the_mistake_of_exercise_1_fails_the_comparison(run_script, tmp_path):
    """In a copy of the clone, as the page says: without the mask the gradients are far off, and the
    loss is near.
    """
    for name in ("common", "version1_pytorch_baseline", "version2_pytorch_fused"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "exercises")
        )
    file, folder = tmp_path / "common/attention.py", tmp_path / "version2_pytorch_fused"
    file.write_text(file.read_text().replace("is_causal=True", "is_causal=False"))
    baseline = tmp_path / "version1_pytorch_baseline/tiny_llama_v1.py"
    flags = (
        "--baseline",
        baseline,
        "--optimized",
        folder / "tiny_llama_v2.py",
        "--batch-size",
        2,
        "--seq-len",
        16,
    )
    done = run_script(folder / "validate_numerical_accuracy.py", *flags, check=1)
    assert "FAIL" in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_fused_on_the_gpu(kv_heads, dtype):
    devices.configure(torch.device("cuda"), 0)
    first, second = (
        models.build(version, kv_heads=kv_heads, device="cuda")
        for version in (tiny_llama_v1, tiny_llama_v2)
    )
    precision, batch = Precision(torch.device("cuda"), dtype), models.batch("cuda")
    with precision.autocast():
        expected, got = first.loss(*batch), second.loss(*batch)
    assert abs(got.item() - expected.item()) < (1e-5 if dtype is None else 2e-2)
    got.backward()
    assert all(
        parameter.grad.isfinite().all() and parameter.grad.any()
        for parameter in second.parameters()
    )
