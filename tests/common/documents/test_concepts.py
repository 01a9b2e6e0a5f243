"""The pictures of CONCEPTS.md, and its table of a GPU's sizes."""

import json
from pathlib import Path

from common.analysis.formulas import flops
from common.config import ModelConfig
from common.documents import concepts
from common.errors import UsageError
from tests import records
from tests.conftest import texts
from tests.small_traces import gpu_trace

import pytest
import torch


def trace(path: Path, content: dict) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"deviceProperties": [{"name": "A GPU"}]} | content))
    return path


def profile_of_a_product(path: Path, device: str) -> Path:
    """A step of 10 ms on a GPU: a product of 2 GFLOP and 12 MB in 1 ms, and an addition of 12 MB in 0.5 ms."""
    inputs = {"input_shapes": json.dumps([[1000, 1000], [1000, 1000]]), "input_types": '["float", "float"]'}
    rows = [inputs | {"name": f"aten::{name}", "self_device_us": us} for name, us in (("mm", 1000.0), ("add", 500.0))]
    run = records.record(device__name=device, version="v1", training__preset="medium")
    path.write_text(json.dumps(records.profile(run, rows, [{"name": "k"}])))
    return path


def test_the_roofline_has_measured_operators_and_the_mfu_of_the_versions_and_no_others(tmp_path):
    records.peers(tmp_path / "peers_tiny_bf16.json", "NVIDIA H200", v1=20.0, v4=0.5, captured=0.75)
    picture = concepts.roofline(tmp_path, profile_of_a_product(tmp_path / "v1_medium_profile.json", "NVIDIA H200"))
    work = flops.training_step(ModelConfig(), 8, 128)["total"]
    peak, bandwidth, points, shares = picture.numbers
    assert (peak, bandwidth) == (67.0, 4.8)
    assert points["mm (attention)"] == pytest.approx((2e9 / 12e6, 2.0))
    assert points["add (attention)"] == pytest.approx((1 / 12, 0.002))
    assert shares == {"tiny": {name: pytest.approx(work / ms / 989e7) for name, ms in (("v1", 20.0), ("v4", 0.5))}}
    assert "a step of v1 at medium, measured: mm (attention) 2 TFLOP/s at 167 FLOP/byte" in picture.description
    assert {"mm", "14 FLOP/byte", "v4", "v1 at medium in fp32: measured operators"} <= texts(picture.drawn())


def test_a_device_without_a_data_sheet_has_no_roofline(tmp_path):
    with pytest.raises(UsageError, match="data sheet of A GPU"):
        concepts.roofline(tmp_path, profile_of_a_product(tmp_path / "v1_medium_profile.json", "A GPU"))


def test_a_timeline_has_launches_and_the_intervals_of_the_kernels(tmp_path):
    """Times from the first kernel of the profiled steps, which starts at 20 us."""
    picture = concepts.timeline(trace(tmp_path / "traces" / "v1_small.json", gpu_trace()))
    panel = picture.numbers["v1, small"]
    assert panel["launches"] == [13, 34, 38, 65, 92]  # the first one comes before the window
    assert panel["gpu"] == [[0, 35], [40, 35], [80, 30], [111, 59]]
    assert panel["delay_us"] == 6
    assert panel["busy"] == pytest.approx(100 * 159 / (125 + 60), abs=0.1)  # the kernel before ends at 5 us
    assert "A GPU" in picture.description and "v1, small" in " ".join(texts(picture.drawn()))


def test_a_trace_without_a_gpu_is_refused(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(gpu_trace()))
    with pytest.raises(UsageError, match="not a trace of a GPU"):
        concepts.timeline(path)
    cpu = gpu_trace()
    cpu["traceEvents"] = [event for event in cpu["traceEvents"] if event["cat"] in ("cpu_op", "user_annotation")]
    with pytest.raises(UsageError, match="no kernels of a GPU"):
        concepts.timeline(trace(path, cpu))


def test_tiles_are_computed_where_the_mask_keeps_a_score():
    kept = torch.ones(concepts.LENGTH, concepts.LENGTH).tril().unfold(0, concepts.TILE, concepts.TILE)
    sums = kept.unfold(1, concepts.TILE, concepts.TILE).sum(dim=(-1, -2))
    whole, skipped = int((sums == concepts.TILE**2).sum()), int((sums == 0).sum())
    picture = concepts.causal_tiles()
    assert picture.numbers[2] == {"whole": whole, "masked": sums.numel() - whole - skipped, "skipped": skipped}
    assert f"{sums.numel() - skipped} of {sums.numel()} tiles" in " ".join(texts(picture.drawn()))
