"""The measured pictures: what they show, and when they are out of date."""

import json
import xml.etree.ElementTree as ElementTree

from common.config import ModelConfig
from documents import pictures, rewrite
from tests import records
from tests.conftest import texts
from tests.small_traces import gpu_trace
from tracepage.cost import footprint
from tracepage.errors import UsageError
from tracepage.files import write_json

import pytest

SHOWN = {
    marked[3].split()[0]: marked[3]
    for path in rewrite.documents()
    for marked in rewrite.MARKED.finditer(path.read_text())
    if marked[2] == "picture"
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_picture_of_the_documents_is_drawn_for_who_can_see_it_and_who_cannot(name):
    picture = rewrite.draw_picture(SHOWN[name])
    svg = picture.svg()
    assert (
        ElementTree.fromstring(svg).findtext("{*}title") == picture.description
        and len(texts(svg)) > 5
    )


def test_a_picture_is_out_of_date_when_its_numbers_have_changed(tmp_path):
    file = tmp_path / "ladder.svg"
    study = tmp_path / "versions_tiny_bf16.json"
    records.peers(study, v1=20.0, v4=1.0)
    before = pictures.ladder(study)
    assert not before.is_current(file)
    file.write_text(before.svg())
    records.peers(study, v1=21.0, v4=1.0)
    assert before.is_current(file) and not pictures.ladder(study).is_current(file)


def test_a_ladder_says_what_1x_is_in_each_panel(tmp_path):
    """Version 1 waits for its host at tiny, and at small was not captured; FP8 is another mode."""
    tiny = tmp_path / "versions_tiny_bf16.json"
    small = tmp_path / "versions_small_bf16.json"
    records.peers(tiny, v1=20.0, v1_captured=4.0, v4=1.0)
    records.peers(small, v1=20.0, v4=5.0, v4_fp8=1.0)
    picture = pictures.ladder(tiny, small)
    assert [reference for reference, _ in picture.numbers.values()] == ["v1-captured", "v1"]
    assert "The fastest: tiny: v4 4x v1-captured, small: v4 4x v1" in picture.description
    shown = texts(picture.svg())
    assert "1x: v1-captured" in shown and "1x: v1" in shown and "0.2x" in shown


def test_memory_agrees_with_the_formulas_at_its_four_moments():
    config, shape = ModelConfig(num_layers=3), (8, 128)
    stays, kept = footprint.states(config), footprint.activations(config, *shape, "cuda")
    totals = [sum(sizes) for sizes in zip(*pictures.held(config, *shape).values(), strict=True)]
    constant = stays["weights"] + stays["adamw"]
    expected = [constant, constant + kept["total"], stays["total"], constant]
    assert [pictures.GIB * total for total in totals] == pytest.approx(expected)


def test_a_roofline_has_measured_operators_and_needs_a_data_sheet(tmp_path):
    """A step of 10 ms: a product of 2 GFLOP and 12 MB in 1 ms, and an addition of 12 MB in 0.5 ms."""
    inputs = {
        "input_shapes": json.dumps([[1000, 1000], [1000, 1000]]),
        "input_types": '["float", "float"]',
    }
    rows = [
        inputs | {"name": f"aten::{name}", "self_device_us": us}
        for name, us in (("mm", 1000.0), ("add", 500.0))
    ]
    path = tmp_path / "v1_medium_profile.json"
    for device in ("NVIDIA H200", "A GPU"):
        run = records.record(device__name=device, training__preset="medium")
        write_json(path, records.profile(run, rows, [{"name": "k"}]))
        if device == "A GPU":
            with pytest.raises(UsageError, match="data sheet of A GPU"):
                pictures.roofline(path)
            continue
        peak, rate, points = pictures.roofline(path).numbers
        assert (peak, rate) == (67.0, 4.8)
        assert points["mm (attention)"] == pytest.approx((2e9 / 12e6, 2.0))
        assert points["add (attention)"] == pytest.approx((1 / 12, 0.002))


def test_a_timeline_has_launches_and_kernels_from_the_first_one_on(tmp_path):
    (tmp_path / "a_gpu").mkdir()
    path = tmp_path / "a_gpu" / "v1_small.json"
    path.write_text(json.dumps(gpu_trace()))
    panel = pictures.timeline(path).numbers["v1, small"]
    # ms; the first one comes before the window
    assert panel["launches"] == [0.013, 0.034, 0.038, 0.065, 0.092]
    assert panel["gpu"][0] == [0.0, 0.03]
    # the kernel before ends at 5 us
    assert panel["step"][-1] == pytest.approx(100 * 159 / (125 + 60), abs=0.1)
