"""The roofline: points under it, its figure, and the commands that show it."""

from common.config import ModelConfig
from tests import records
from tests.conftest import ROOT, TINY
from tracepage.cost import flops, operators
from tracepage.errors import UsageError
from tracepage.records import step_profile
from tracepage.views import roofline
from tracepage.views.roofline import Point

import pytest

V2 = ROOT / "version2_pytorch_fused"
H100 = ROOT / "results/h100/v1_tiny_profile.json.gz"
CEILINGS = {
    "flops_per_second": 4e12,
    "bytes_per_second": 1e12,
    "operation_seconds": 1e-6,
    "precision": "fp32",
}


def test_a_point_is_held_against_the_ceiling_of_its_side():
    points = [
        Point("copy", 0, 2e9, 4e-3, "operator"),
        Point("add", 1e9, 1e9, 2e-3, "operator"),
        Point("gemm", 8e9, 1e9, 4e-3, "operator"),
        Point("compiled", None, None, 1e-3, "span"),
    ]
    header, rows = roofline.table(points, CEILINGS)
    cells = [dict(zip(header, row, strict=True)) for row in rows]
    assert {cell["ridge"] for cell in cells} == {4}
    assert [cell["FLOP/byte"] for cell in cells] == [0, 1, 8, None]
    assert [cell["side"] for cell in cells] == ["memory", "memory", "compute", None]
    assert [cell["% of bound"] for cell in cells] == [
        pytest.approx(50),
        pytest.approx(50),
        pytest.approx(50),
        None,
    ]
    assert [cell["TFLOP/s"] for cell in cells] == [0, pytest.approx(0.5), pytest.approx(2), None]
    assert [cell["GB/s"] for cell in cells] == [
        pytest.approx(500),
        pytest.approx(500),
        pytest.approx(250),
        None,
    ]
    assert [cell["ms"] for cell in cells] == pytest.approx([4, 2, 4, 1])


def test_without_measured_ceilings_nothing_is_compared():
    point = Point("gemm", 8e9, 1e9, 4e-3)
    with pytest.raises(UsageError, match="profile again with --measure-peak"):
        roofline.roofline_report([point], None, "a step")


def test_points_of_a_gpu_profile_add_up_to_its_time_and_work():
    profile = step_profile.read(H100)
    points = roofline.from_profile(profile, top=5)
    spans, named = (
        [point for point in points if point.group == group] for group in ("span", "operator")
    )
    steps, us = (
        profile["profiled_steps"],
        sum(row["self_device_us"] for row in profile["operators"]),
    )
    assert sum(point.seconds for point in spans) == pytest.approx(us / steps / 1e6)
    expected = [row for row in operators.rows(profile) if row.bytes]
    assert sum(point.flops or 0 for point in spans) == pytest.approx(
        sum(row.flops * row.calls for row in expected)
    )
    assert sum(point.bytes or 0 for point in spans) == pytest.approx(
        sum(row.bytes * row.calls for row in expected)
    )
    assert len(named) == 5 and named[0].name == "aten::mm"
    assert [point.seconds for point in named] == sorted(
        (point.seconds for point in named), reverse=True
    )
    unknown = {point.name for point in spans if point.flops is None}
    assert "optimizer, cost not known" in unknown and all(
        name.endswith(", cost not known") for name in unknown
    )


def test_work_is_not_known_where_that_of_one_call_is_not():
    known = {"input_shapes": "[[2, 2], [2, 2]]", "input_types": '["float", "float"]'}
    calls = [{"name": "aten::mm"} | shapes for shapes in (known, {"phase": "backward"})]
    points = roofline.from_profile(records.profile(records.record(), calls))
    [point] = [point for point in points if point.group == "operator"]
    assert (point.name, point.flops, point.bytes, point.calls) == ("aten::mm", None, None, 2)


def test_the_command_of_version_2_counts_profiles_and_draws(run_script, tmp_path):
    arguments = (
        *TINY,
        "--seq-len",
        192,
        "--num-kv-heads",
        2,
        "--num-steps",
        5,
        "--data",
        "synthetic",
    )
    shown = run_script(
        V2 / "run_deepspeed_flops.py",
        *arguments,
        "--computational-intensity",
        "--generate-roofline",
    ).stdout
    assert "FlopCounterMode" in shown and "% of bound" in shown
    assert {"roofline.png", "roofline.csv"} <= {
        path.name for path in (tmp_path / "flops_analysis").iterdir()
    }
    (path,) = (tmp_path / "flops_analysis").glob("profile_*.json")
    profile = step_profile.read(path)
    shape = (ModelConfig(**profile["run"]["model"]), 2, 192)
    known = [row for row in operators.rows(profile) if row.flops is not None]
    assert {row.name for row in operators.rows(profile) if row.flops is None} <= {"aten::index"}, (
        "the batch is cut from the data"
    )
    work = sum(
        row.flops * row.calls
        for row in known
        if "flash_attention" in row.name or row.name in ("aten::mm", "aten::bmm")
    )
    scores_again = flops.forward(*shape)["attention"] / 2
    assert work == pytest.approx(flops.training_step(*shape)["total"] + scores_again)
    points = {
        point.name: point.flops
        for point in roofline.from_profile(profile, top=100)
        if point.group == "operator"
    }
    assert points["aten::_scaled_dot_product_flash_attention_for_cpu"] == pytest.approx(
        flops.forward(*shape)["attention"]
    )
