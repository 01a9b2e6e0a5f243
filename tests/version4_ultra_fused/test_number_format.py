"""The exercise on number formats: its arithmetic by hand, and scales that are wrong."""

from tests.conftest import ROOT
from tests.oracle import DEVICE

import pytest

pytest.importorskip("triton", reason="needs Triton")
from common.config import resolve
from version4_ultra_fused.exercises import number_format
from version4_ultra_fused.kernels.fp8 import scales

SCRIPT = ROOT / "version4_ultra_fused/exercises/number_format.py"


def test_a_layer_by_hand():
    """D 1024, H + 2 K = 16 heads of 128, F 4096, and 8,192 tokens."""
    weights = 2048 * 1024 + 1024 * 1024 + 3 * 1024 * 4096
    bytes_moved = 4 * (8192 * 5 * 1024 + 8192 * 2048 + weights)
    assert number_format.layer(resolve("medium").model, 16 * 512) == (
        6 * 8192 * weights,
        bytes_moved,
    )


def test_the_forecast_names_what_a_cast_costs(execute):
    rows = {
        line.split()[0]: line.split()[1:]
        for line in execute(SCRIPT, "--gpu", "NVIDIA H200").out.splitlines()[1:]
    }
    assert rows["medium"][1:3] == ["782", "391"] and rows["medium"][-2:] == ["329", "329"]
    assert float(rows["small"][-2]) > 0 > float(rows["small"][-1])


def test_a_gpu_without_fp8_is_refused(refused):
    assert "--gpu NVIDIA A100-SXM4-80GB: no peak of FP8 is listed" in refused(
        SCRIPT, "--gpu", "NVIDIA A100-SXM4-80GB"
    )


@pytest.mark.skipif(
    DEVICE.type == "cuda" and not scales.multiplies(DEVICE),
    reason="needs a CPU, or a GPU that multiplies in FP8",
)
def test_a_scale_that_cuts_off_or_rounds_away_keeps_the_model_from_learning(
    no_kernels, monkeypatch
):
    monkeypatch.setattr(number_format, "STEPS", 20)
    bf16, right, small, large = (
        number_format.losses(*case)[-1] for case in ((0, False), (0,), (-6,), (18,))
    )
    assert right == pytest.approx(bf16, abs=0.05)
    assert min(small, large) > bf16 + 0.1
