"""Every kernel of a step of Versions 3 and 4, and of a decode step, compiles for GPUs of both
vendors, spills nothing, and fits into shared memory.
"""

import json

from tests.conftest import PATHS

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
from version3_triton.kernels import launch_sizes

SHARED_KIB = {"gfx90a": 64, "gfx942": 64, "gfx950": 64, "sm_75": 64, "sm_90": 227}
# the bytes that kernels spill at most, by the hidden size: at head dimension 80, and one register of
# the down projection of several texts, which Triton 3.6 does not spill
KNOWN = {
    "sm_90": {
        ("_flash_attention_backward_queries", 240): 16,
        ("_flash_attention_backward_keys", 240): 8,
        ("_batch_product", 2048): 8,
    }
}
BOTH_VENDORS = {
    "_adamw",
    "_attend",
    "_batch_product",
    "_combine",
    "_cross_entropy",
    "_cross_entropy_mean",
    "_embed",
    "_embedding_backward",
    "_flash_attention_backward_keys",
    "_flash_attention_backward_queries",
    "_flash_attention_forward",
    "_linear_cross_entropy_loss_and_gradient",
    "_product",
    "_rms_norm_backward",
    "_rms_norm_dweight",
    "_rms_norm_forward",
    "_rope_forward",
    "_rotate",
    "_swiglu_backward",
    "_swiglu_forward",
    "_write",
}
FP8 = {"_logits_gradient", "_quantize", "_swiglu_quantized"}
# what `tiles.LARGEST` and `attention.form` choose on Hopper and elsewhere; gfx90a has no FP8
ONLY = {
    "gfx90a": {"_swiglu"},
    "gfx942": {"_swiglu"} | FP8,
    "gfx950": {"_swiglu"} | FP8,
    "sm_90": {"_matmul", "_matmul_norm_backward", "_short_attention_backward"} | FP8,
}


def compiled(run_script, target: str, dtypes: str, *which: str) -> list[dict]:
    variables = {"PYTHONPATH": PATHS, "CUDA_VISIBLE_DEVICES": "-1"}
    rows = json.loads(
        run_script("-m", "tests.offline", target, dtypes, *which, seconds=1800, **variables).stdout
    )
    known = KNOWN.get(target, {})
    for row in rows:
        assert row["spills"] <= known.get((row["kernel"], row["hidden_size"]), 0), row
    assert max(row["shared_bytes"] for row in rows) <= SHARED_KIB[target] << 10
    return rows


# On a GPU the tests of the kernels compile them for sm_90.
TARGETS = ["gfx90a", "gfx942", "gfx950", pytest.param("sm_90", marks=pytest.mark.slow)]


@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_of_a_step_in_bf16(run_script, target):
    assert {row["kernel"] for row in compiled(run_script, target, "bf16")} == BOTH_VENDORS | ONLY[
        target
    ]


@pytest.mark.slow
@pytest.mark.parametrize("target", [*ONLY, "sm_75"])
def test_all_sizes_and_number_formats(run_script, target):
    compiled(run_script, target, "fp32,fp16" if target == "sm_75" else "fp32,fp16,bf16", "all")


@pytest.mark.parametrize(
    "hip, gpu, capability, family",
    [
        (None, True, (9, 0), "sm_90"),
        (None, True, (10, 0), "sm_90"),
        (None, True, (8, 9), "sm_80"),
        (None, True, (7, 5), "sm_75"),
        ("7.2", True, (9, 4), "hip"),
        (None, False, (9, 0), "hip"),
    ],
    ids=["H100", "B200", "L40", "T4", "MI300X", "no GPU"],
)
def test_block_sizes_by_what_gpu_there_is(monkeypatch, hip, gpu, capability, family):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert launch_sizes.family.__wrapped__() == family  # without its cache
