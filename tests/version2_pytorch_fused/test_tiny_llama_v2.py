"""Version 2: the same model as Version 1 in every combination of its fusions, and its switches."""

import itertools
import json
from pathlib import Path

from common import device as devices
from common.config import ModelConfig
from common.precision import Precision
from tests.conftest import ROOT, TINY, V1
from version1_pytorch_baseline import tiny_llama_v1
from version2_pytorch_fused import tiny_llama_v2

import pytest
import torch

V2 = ROOT / "version2_pytorch_fused"
SCRIPT = V2 / "tiny_llama_v2.py"
QUICK = (*TINY, "--data", "synthetic", "--num-steps", "6")


COMBINATIONS = list(itertools.product([False, True], repeat=3))


def config(kv_heads: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=61, hidden_size=48, num_layers=2, num_attention_heads=4, num_key_value_heads=kv_heads, intermediate_size=80
    )


def pair(kv_heads: int, fusions: tiny_llama_v2.Fusions, device: str = "cpu"):
    """Version 1 and Version 2 from the same seed, and a batch of odd length."""
    models = []
    for build in (lambda: tiny_llama_v1.TinyLlama(config(kv_heads)), lambda: tiny_llama_v2.TinyLlama(config(kv_heads), fusions)):
        torch.manual_seed(0)
        models.append(build().to(device))
    ids = torch.randint(61, (2, 2, 17), device=device)
    return *models, (ids[0], ids[1])


def gradients(model, batch) -> dict[str, torch.Tensor]:
    """Gradients under Version 1's names."""
    model.loss(*batch).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    return model.baseline_state_dict()


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("fusions", COMBINATIONS)
def test_same_weights_loss_and_gradients_as_version_1(kv_heads, fusions):
    first, second, batch = pair(kv_heads, tiny_llama_v2.Fusions(*fusions))
    for (name, weight), (other, fused) in zip(first.state_dict().items(), second.baseline_state_dict().items(), strict=True):
        assert name == other and torch.equal(weight, fused), name
    torch.testing.assert_close(second(batch[0]), first(batch[0]), rtol=0, atol=2e-6)
    expected = gradients(first, batch)
    for name, gradient in gradients(second, batch).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_with_all_off_it_is_version_1_bit_for_bit():
    devices.prepare(torch.device("cpu"), 0)
    first, second, batch = pair(2, tiny_llama_v2.Fusions(False, False, False, False))
    precision = Precision(torch.device("cpu"), None)
    for version, model in ((tiny_llama_v1, first), (tiny_llama_v2, second)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model.losses = [version.train_step(model, optimizer, batch, precision).item() for _ in range(5)]
    assert first.losses == second.losses
    for name, weight in second.baseline_state_dict().items():
        assert torch.equal(weight, first.state_dict()[name]), name


@pytest.mark.parametrize("fusions", COMBINATIONS)
def test_weights_of_version_1_load_and_come_back(fusions):
    first, second, batch = pair(2, tiny_llama_v2.Fusions(*fusions))
    with torch.no_grad():
        for weight in first.parameters():
            weight.add_(torch.randn_like(weight))
    assert second.load_state_dict(first.state_dict()) == ([], [])
    for name, weight in second.baseline_state_dict().items():
        assert torch.equal(weight, first.state_dict()[name]), name
    torch.testing.assert_close(second(batch[0]), first(batch[0]), rtol=1e-4, atol=1e-4)
    again = tiny_llama_v2.TinyLlama(config(2))
    again.load_state_dict(second.state_dict())
    assert torch.equal(again.layers[1].mlp.gate_up_proj.weight, second.layers[1].mlp.gate_up_proj.weight)


def losses(tmp_path: Path, name: str) -> list[float]:
    return json.loads((tmp_path / name).read_text())["loss"]["all"]


def test_the_same_losses_from_the_command_line(run_script, tmp_path, monkeypatch):
    run_script(V1 / "tiny_llama_v1.py", *QUICK, "--metrics-out", "v1.json")
    run_script(SCRIPT, *QUICK, "--disable-all-fusion", "--metrics-out", "off.json")
    run_script(SCRIPT, *QUICK, "--metrics-out", "fused.json")
    monkeypatch.setenv("PYTORCH_FALLBACK_ATTENTION", "1")
    run_script(SCRIPT, *QUICK, "--disable-qkv-fusion", "--disable-swiglu-fusion", "--metrics-out", "fallback.json")
    assert losses(tmp_path, "off.json") == losses(tmp_path, "v1.json") == losses(tmp_path, "fallback.json")
    assert losses(tmp_path, "fused.json") == pytest.approx(losses(tmp_path, "v1.json"), abs=1e-5)


@pytest.mark.parametrize(
    "flags, fallback, on",
    [
        ([], None, {"qkv", "flash_attention", "swiglu"}),
        (["--disable-flash-attention"], None, {"qkv", "swiglu"}),
        (["--disable-all-fusion", "--enable-flash-attention"], "1", set()),
    ],
)
def test_the_record_says_which_fusions_are_on(run_script, tmp_path, monkeypatch, flags, fallback, on):
    monkeypatch.delenv("PYTORCH_FALLBACK_ATTENTION", raising=False)
    if fallback:
        monkeypatch.setenv("PYTORCH_FALLBACK_ATTENTION", fallback)
    run_script(SCRIPT, *QUICK, *flags, "--metrics-out", "run.json")
    settings = json.loads((tmp_path / "run.json").read_text())["settings"]
    assert settings.keys() == {"qkv", "flash_attention", "swiglu", "torch_compile"}
    assert {name for name, value in settings.items() if value} == on


def test_the_record_of_version_1_has_no_settings(run_script, tmp_path):
    run_script(V1 / "tiny_llama_v1.py", *QUICK, "--metrics-out", "run.json")
    assert json.loads((tmp_path / "run.json").read_text())["settings"] == {}


def test_the_loss_curves_stay_together_for_200_steps(run_script, tmp_path):
    long = (*TINY, "--vocab-size", "64", "--data", "synthetic", "--num-steps", "200", "--learning-rate", "1e-2")
    run_script(V1 / "tiny_llama_v1.py", *long, "--metrics-out", "v1.json")
    run_script(SCRIPT, *long, "--metrics-out", "v2.json")
    first, second = losses(tmp_path, "v1.json"), losses(tmp_path, "v2.json")
    assert first[-1] < first[0] - 0.3  # it learns
    assert second == pytest.approx(first, abs=1e-3)


def test_a_compiled_run_trains_alike(run_script, tmp_path):
    run_script(SCRIPT, *QUICK, "--metrics-out", "eager.json")
    run_script(SCRIPT, *QUICK, "--enable-all-fusion", "--enable-deepspeed-flops", "--metrics-out", "compiled.json")
    assert losses(tmp_path, "compiled.json") == pytest.approx(losses(tmp_path, "eager.json"), abs=1e-5)


def test_torch_compile_without_a_compiler_is_one_line(run_script, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    done = run_script(SCRIPT, *QUICK, "--enable-torch-compile", check=2)
    assert done.stderr.startswith("error: torch.compile does not work here: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--enable-qkv-fusion", "--disable-qkv-fusion"], "not allowed with argument"),
        (["--enable-all-fusion", "--disable-all-fusion"], "not allowed with argument"),
        (["--torch-compile-mode", "max-autotune"], "needs --enable-torch-compile"),
        (["--torch-compile-mode", "fast"], "invalid choice"),
    ],
)
def test_switches_that_contradict_each_other(refused, tmp_path, arguments, named):
    assert named in refused(SCRIPT, *arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_fused_on_the_gpu(kv_heads, dtype):
    devices.prepare(torch.device("cuda"), 0)
    first, second, batch = pair(kv_heads, tiny_llama_v2.Fusions(), "cuda")
    precision = Precision(torch.device("cuda"), dtype)
    with precision.autocast():
        expected, got = first.loss(*batch), second.loss(*batch)
    assert abs(got.item() - expected.item()) < (1e-5 if dtype is None else 2e-2)
    got.backward()
    assert all(parameter.grad.isfinite().all() and parameter.grad.any() for parameter in second.parameters())
