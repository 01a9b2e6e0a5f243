"""Version 3's switches, in another script too, and its gradients under autocast; test_kernel_versions.py has the rest."""

from common.options import RunOptions
from common.precision import Precision
from tests import models
from tests.conftest import ROOT, TINY, V1, run_options, runs_kernels
from tests.oracle import DEVICE, interpreted

import pytest
import torch

pytest.importorskip("triton")
from version3_triton import tiny_llama_v3

V3 = ROOT / "version3_triton"
SCRIPT = V3 / "tiny_llama_v3.py"
QUICK = (*TINY, "--data", "synthetic", "--num-steps", "3", "--warmup-steps", "1")
ALL_ON = tiny_llama_v3.SWITCHES


@interpreted
def test_another_script_validates_it_with_its_kernels(execute, tmp_path):
    (tmp_path / "small.yaml").write_text(
        "model: {hidden_size: 16, num_layers: 1, num_attention_heads: 2, intermediate_size: 16, vocab_size: 16}"
    )
    script = ROOT / "version2_pytorch_fused/validate_numerical_accuracy.py"
    small = ("--config", "small.yaml", "--batch-size", "1", "--seq-len", "4")
    execute(script, "--baseline", V1 / "tiny_llama_v1.py", "--optimized", SCRIPT, *small)


def options(*flags: str) -> RunOptions:
    return run_options(tiny_llama_v3, *TINY, *flags)


@runs_kernels
@pytest.mark.parametrize("flags, off", [
    ([], set()),
    (["--disable-triton-norm", "--disable-triton-loss"], {"triton-norm", "triton-loss"}),
    (["--disable-all-fusion", "--enable-triton-rope"], ALL_ON.keys() - {"triton-rope"}),
    (["--enable-all-fusion", "--disable-triton-swiglu"], {"triton-swiglu"}),
])  # fmt: skip
def test_flags_switch_what_they_name(flags, off):
    switches = tiny_llama_v3.make_model(options(*flags)).switches
    assert switches.keys() == ALL_ON.keys() and {name for name, on in switches.items() if not on} == off


@interpreted
def test_a_head_that_the_kernel_does_not_take_is_one_line(refused):
    wide = (*QUICK, "--num-layers", "1", "--hidden-dim", "272", "--num-heads", "2", "--seq-len", "2", "--vocab-size", "16")
    assert "head dimensions to 128, not 136: switch it off" in refused(SCRIPT, *wide)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_every_parameter_gets_a_gradient_under_autocast(dtype):
    third, precision = models.build(tiny_llama_v3, device=DEVICE), Precision(DEVICE, dtype)
    with precision.autocast():
        loss = third.loss(*models.batch(DEVICE))
    precision.scale(loss).backward()
    assert all(parameter.grad.isfinite().all() and parameter.grad.any() for parameter in third.parameters())
