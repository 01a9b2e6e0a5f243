"""Version 3's switches, and its kernels in another script; test_kernel_versions.py has the rest."""

from tests.conftest import ROOT, V1, run_options, runs_kernels
from tests.oracle import interpreted

import pytest

pytest.importorskip("triton", reason="needs Triton")
from version3_triton import kernels, tiny_llama_v3

SWITCHES = tiny_llama_v3.SWITCHES.keys()


@interpreted
def test_another_script_validates_it_with_its_kernels(execute, tmp_path):
    (tmp_path / "small.yaml").write_text(
        "model: {hidden_size: 16, num_layers: 1, num_attention_heads: 2, intermediate_size: 16, vocab_size: 16}"
    )
    script = ROOT / "version2_pytorch_fused/validate_numerical_accuracy.py"
    small = ("--config", "small.yaml", "--batch-size", "1", "--seq-len", "4")
    execute(
        script,
        "--baseline",
        V1 / "tiny_llama_v1.py",
        "--optimized",
        ROOT / "version3_triton/tiny_llama_v3.py",
        *small,
    )


@runs_kernels
@pytest.mark.parametrize(
    "flags, off",
    [
        ([], set()),
        (["--disable-triton-norm", "--disable-triton-loss"], {"triton-norm", "triton-loss"}),
        (["--disable-all-fusion", "--enable-triton-rope"], SWITCHES - {"triton-rope"}),
        (["--enable-all-fusion", "--disable-triton-swiglu"], {"triton-swiglu"}),
    ],
)
def test_flags_switch_what_they_name(flags, off):
    switches = kernels.available(run_options(tiny_llama_v3, *flags))
    assert switches.keys() == SWITCHES and {name for name, on in switches.items() if not on} == off
