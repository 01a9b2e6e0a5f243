"""Every kernel of Version 4 compiles for five GPUs of two vendors; what runs there spills next to nothing and fits into the LDS.

compile_kernels.py runs in a process of its own: here triton may have been imported for its interpreter.
"""

import json

from common.files import read_json
from tests.conftest import ROOT

import pytest

pytest.importorskip("triton")
V4 = ROOT / "version4_ultra_fused"
LDS_BYTES = 64 * 1024  # of gfx90a and gfx942
SHARED_BYTES = 227 * 1024  # of sm_90
HOPPER_ONLY = ("_matmul", "_short_attention_backward")


def check(rows: list[dict]) -> None:
    for row in rows:
        assert row["registers"] > 0
        assert row["shared_bytes"] <= (LDS_BYTES if row["target"].startswith("gfx") else SHARED_BYTES), row
        if not row["kernel"].startswith(HOPPER_ONLY) or row["target"] == "sm_90" and row["kernel"].startswith("_matmul"):
            assert row["spills"] == 0, row


@pytest.mark.parametrize("target", ["gfx942", pytest.param("sm_90", marks=pytest.mark.slow)])
def test_all_kernels_in_16_bits(run_script, tmp_path, target):
    run_script(V4 / "compile_kernels.py", "--targets", target, "--dtypes", "bf16", "--output", "kernels.json", seconds=300)
    found = read_json(tmp_path / "kernels.json")["rows"]
    check(found)
    names = {row["kernel"].split(" ")[0] for row in found}
    assert names == {
        "_adamw", "_cross_entropy", "_cross_entropy_mean", "_embedding_backward", "_matmul", "_rms_norm_backward",
        "_rms_norm_forward", "_short_attention_backward", "_swiglu", "_swiglu_backward", "_rotate",
    }  # fmt: skip


@pytest.mark.slow
def test_all_of_them(run_script, tmp_path):
    run_script(V4 / "compile_kernels.py", "--output", "kernels.json", seconds=900)
    made = json.loads((tmp_path / "kernels.json").read_text())
    check(made["rows"])
    assert {row["target"] for row in made["rows"]} == {"gfx90a", "gfx942", "gfx950", "sm_80", "sm_90"}
