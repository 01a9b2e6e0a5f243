"""The Triton kernels of a profile: times of a mean step, and shares of the ceilings by given bytes and FLOPs."""

from types import SimpleNamespace

from common.analysis.reports import triton_kernels
from tests.records import profile, record

import pytest

CEILINGS = {"flops_per_second": 1e14, "bytes_per_second": 1e12, "operation_seconds": 1e-6, "precision": "bf16"}
COSTS = {
    ("_rope_forward", "forward"): SimpleNamespace(operation="rope", bytes=4_000_000, flops=None),
    ("_rope_forward", "backward"): SimpleNamespace(operation="rope", bytes=4_000_000, flops=None),
    ("_attention", "forward"): SimpleNamespace(operation="attention", bytes=1_000_000, flops=2_500_000_000),
    ("_dweight", "backward"): SimpleNamespace(operation="norm", bytes=None, flops=None),
    ("_not_launched", "forward"): SimpleNamespace(operation="loss", bytes=1, flops=None),
}
KERNELS = [
    {"name": "_rope_forward", "device_us": 20.0, "calls": 8},
    {"name": "_rope_forward", "device_us": 40.0, "calls": 8, "phase": "backward"},
    {"name": "_attention", "device_us": 60.0, "calls": 8}, {"name": "_attention", "device_us": 40.0, "calls": 2},
    {"name": "_dweight", "device_us": 4.0, "calls": 8, "phase": "backward"},
    {"name": "sm90_gemm", "device_us": 236.0, "calls": 8},
]  # fmt: skip


def gpu_profile(kernels: list[dict], **changes) -> dict:
    """Two profiled steps."""
    two = {"profiled_steps": 2, "step_us": [1000.0, 1000.0]}
    return profile(record(ceilings=CEILINGS), [{"name": "aten::mm"}], kernels, **two | changes)


def test_a_row_for_each_kernel_and_phase_the_longest_first():
    header, rows = triton_kernels.table(gpu_profile(KERNELS), COSTS)
    assert [row[:4] for row in rows] == [
        ["attention", "forward", "attention", 5.0], ["rope_forward", "backward", "rope", 4.0],
        ["rope_forward", "forward", "rope", 4.0], ["dweight", "backward", "norm", 4.0],
    ]  # fmt: skip
    attention, _, forward, dweight = (dict(zip(header, row, strict=True)) for row in rows)
    assert forward["us"] == 10 and forward["% of kernels"] == 5, "of all that ran, libraries included"
    assert forward["MB"] == 4 and forward["GB/s"] == pytest.approx(400) and forward["% of copy"] == pytest.approx(40)
    assert forward["TFLOP/s"] is None
    assert attention["TFLOP/s"] == pytest.approx(50) and attention["% of GEMM"] == pytest.approx(50)
    assert dweight["us"] == 2 and all(dweight[name] is None for name in ("MB", "GB/s", "% of copy", "TFLOP/s", "% of GEMM"))


@pytest.mark.parametrize("attention_only, whole", [(False, "all kernels"), (True, "attention's kernels")])
def test_the_report_has_their_share_of_the_time(tmp_path, attention_only, whole):
    report = triton_kernels.report(tmp_path / "profile_1.json", gpu_profile(KERNELS, attention_only=attention_only), COSTS)
    text = report.terminal()
    assert f"82 us of a step, 41.0 % of the time of {whole}" in text and "rope_forward" in text and "sm90_gemm" not in text


def test_without_such_kernels_the_operators_are_shown(tmp_path):
    text = triton_kernels.report(tmp_path / "profile_1.json", gpu_profile([]), COSTS).terminal()
    assert "No Triton kernel ran in this profile." in text and "aten::mm" in text
