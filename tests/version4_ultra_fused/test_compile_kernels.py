"""Every kernel of Version 4 compiles for five GPUs of two vendors; what runs there spills next to nothing and fits into the LDS.

compile_kernels.py runs in a process of its own: here triton may have been imported for its interpreter.
"""

from common.files import read_json
from tests.conftest import ROOT

import pytest

pytest.importorskip("triton")
LDS_BYTES = 64 * 1024  # of gfx90a and gfx942
SHARED_BYTES = 227 * 1024  # of sm_90
ALL = ("gfx90a", "gfx942", "gfx950", "sm_80", "sm_90")
FP8 = {("fp8", kernel, form) for form, which in (("e4m3", "swiglu_quantized"), ("e5m2", "swiglu_quantized + backward"))
       for kernel in ("quantize", which)}  # fmt: skip


@pytest.mark.parametrize("flags, targets", [
    (("--targets", "gfx942", "--dtypes", "bf16"), ["gfx942"]),
    pytest.param((), ALL, marks=pytest.mark.slow),
    pytest.param(("--targets", "sm_89", "--dtypes", "bf16"), ["sm_89"], marks=pytest.mark.slow),
])  # fmt: skip
def test_all_kernels(run_script, tmp_path, flags, targets):
    run_script(ROOT / "version4_ultra_fused/compile_kernels.py", *flags, "--output", "kernels.json", seconds=900)
    rows = read_json(tmp_path / "kernels.json", "tiny-llama-compiled/1")["rows"]
    assert {row["target"] for row in rows} == {*targets}
    assert {(row["file"], row["kernel"].split(" + ")[0]) for row in rows} == {
        ("adamw", "adamw"), ("cross_entropy", "cross_entropy"), ("cross_entropy", "mean"), ("elementwise", "swiglu"),
        ("elementwise", "swiglu_backward"), ("elementwise", "rotate"), ("embedding", "backward"), ("matmul", "matmul"),
        ("matmul_norm_backward", "matmul_norm_backward"),
        ("rms_norm", "backward"), ("rms_norm", "forward"), ("short_attention", "backward"), ("fp8", "quantize"),
        ("fp8", "swiglu_quantized"),
    }  # fmt: skip
    for target in targets:
        made = {(row["file"], row["kernel"], row["size"]) for row in rows if row["target"] == target and row["file"] == "fp8"}
        assert made == (set() if target in ("gfx90a", "sm_80") else FP8), "these have no products in FP8"
    for row in rows:
        assert row["registers"] > 0
        assert row["shared_bytes"] <= (LDS_BYTES if row["target"].startswith("gfx") else SHARED_BYTES), row
        products = row["file"] in ("matmul", "matmul_norm_backward")
        if row["file"] != "short_attention" and (not products or row["target"] == "sm_90"):  # these run on Hopper only
            assert row["spills"] == 0, row


def test_a_choice_without_kernels_is_refused(run_script):
    script, chosen = (
        ROOT / "version4_ultra_fused/compile_kernels.py",
        ("--targets", "sm_80", "--dtypes", "bf16", "--sizes", "e4m3"),
    )
    assert "no kernel has such a --sizes in these --dtypes" in run_script(script, *chosen, check=2).stderr.splitlines()[-1]
