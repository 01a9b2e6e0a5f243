"""The roofline, costs of Version 2's operators, its FLOPs by three counters, and the commands that show them."""

import csv
import json
import math
from pathlib import Path

from common.analysis.formulas import flops, footprint, operators
from common.analysis.output import plots
from common.analysis.reports import roofline
from common.analysis.reports.roofline import Point
from common.config import ModelConfig
from common.errors import UsageError
from common.files import read_json
from common.training import flop_counters
from tests.conftest import ROOT, TINY, V1
from version2_pytorch_fused import tiny_llama_v2

import pytest
import torch

V2 = ROOT / "version2_pytorch_fused"

CEILINGS = {"flops_per_second": 4e12, "bytes_per_second": 1e12, "operation_seconds": 1e-6, "precision": "fp32"}
H100 = ROOT / "results/h100/v1_tiny_profile.json"
GROUPED = dict(vocab_size=53, hidden_size=48, num_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=80)
BATCH, LENGTH = 3, 17
CONFIGS = {"GQA": ModelConfig(**GROUPED), "MHA": ModelConfig(**GROUPED | {"num_key_value_heads": 4})}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


# ------------------------------------------------------------------------------------------------------------------ cost

HEADS_FIRST = ("_scaled_dot_product_flash_attention_for_cpu", "_cudnn_attention_forward")
SEQUENCE_FIRST = ("_flash_attention_forward", "_efficient_attention_forward")


def attention_cost(name: str, config: ModelConfig, kind: str = "float") -> tuple[int, int]:
    """Of one layer's call, with the arguments in the order of PyTorch's schema."""
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q, k = ([BATCH, count, LENGTH, size] for count in (heads, groups))
    if name.removesuffix("_backward") not in HEADS_FIRST and not name.startswith("_cudnn"):
        q, k = ([BATCH, LENGTH, count, size] for count in (heads, groups))
    statistic = [BATCH, heads, LENGTH]
    tensors = [q, q, k, k, q, statistic] if name.endswith("_backward") else [q, k, k]
    return operators.cost(f"aten::{name}", [*tensors, [], []], [*[kind] * len(tensors), "Scalar", ""])


@each_config
@pytest.mark.parametrize("name", [*HEADS_FIRST, *SEQUENCE_FIRST])
def test_fused_attention_needs_the_causal_flops_and_the_bytes_of_one_kernel(name, config):
    counted, moved = attention_cost(name, config)
    assert config.num_layers * counted == flops.forward(config, BATCH, LENGTH)["attention"]
    assert config.num_layers * moved == footprint.one_kernel_bytes(config, BATCH, LENGTH)["attention core"]


@each_config
@pytest.mark.parametrize("name", [HEADS_FIRST[0], "_cudnn_attention", "_flash_attention", "_efficient_attention"])
def test_its_backward_is_five_products_and_moves_every_tensor_and_gradient_once(name, config):
    counted, moved = attention_cost(f"{name}_backward", config, "c10::BFloat16")
    assert config.num_layers * counted == 2.5 * flops.forward(config, BATCH, LENGTH)["attention"]
    q = BATCH * LENGTH * config.hidden_size
    k = BATCH * LENGTH * config.num_key_value_heads * config.head_dim
    inputs, gradients = (q, q, k, k, q), (q, k, k)  # the output's gradient, q, k, v and the output; those of q, k and v
    assert moved == 2 * (sum(inputs) + sum(gradients)) + 4 * BATCH * config.num_attention_heads * LENGTH


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("suffix", ["", "_backward"])
def test_what_only_calls_an_attention_kernel_costs_nothing(kernel, suffix):
    assert attention_cost(f"_scaled_dot_product_{kernel}_attention{suffix}", CONFIGS["GQA"]) == (0, 0)
    assert hasattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention{suffix}")
    assert hasattr(torch.ops.aten, f"_{kernel}_attention{suffix or '_forward'}"), "the names that have the cost"


def test_attention_over_packed_sequences_is_not_known():
    assert operators.cost("aten::_flash_attention_forward", [[51, 4, 12]] * 3, ["float"] * 3) is None


@each_config
def test_a_fused_adamw_step_moves_the_bytes_of_the_formula(config):
    with torch.device("meta"):
        shapes = [list(parameter.shape) for parameter in tiny_llama_v2.TinyLlama(config).parameters()]
    _, moved = operators.cost("aten::_fused_adamw_", [shapes] * 4, ["TensorList"] * 4)
    assert moved == footprint.optimizer_bytes(config)


# -------------------------------------------------------------------------------------------------------------- counters


@each_config
def test_flop_counters_see_the_full_attention_of_version_2(config, tmp_path):
    model, batch = tiny_llama_v2.TinyLlama(config), torch.randint(53, (2, BATCH, LENGTH))
    counted = flop_counters.count(model, (batch[0], batch[1]), tmp_path / "modules.txt")
    full = flops.training_step(config, BATCH, LENGTH, causal=False)
    scores_again = flops.forward(config, BATCH, LENGTH, causal=False)["attention"] // 2
    assert counted["FlopCounterMode"] == {"forward": full["forward"], "backward": full["backward"] + scores_again}
    if "DeepSpeed" in counted:
        assert counted["DeepSpeed"]["forward"] == pytest.approx(full["forward"], rel=0.01)
        assert counted["DeepSpeed"]["forward"] > full["forward"], "it adds silu"


# -------------------------------------------------------------------------------------------------------------- roofline


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
    assert [cell["% of bound"] for cell in cells] == [pytest.approx(50), pytest.approx(50), pytest.approx(50), None]
    assert [cell["TFLOP/s"] for cell in cells] == [0, pytest.approx(0.5), pytest.approx(2), None]
    assert [cell["GB/s"] for cell in cells] == [pytest.approx(500), pytest.approx(500), pytest.approx(250), None]
    assert [cell["ms"] for cell in cells] == pytest.approx([4, 2, 4, 1])


def test_without_measured_ceilings_nothing_is_compared():
    point = Point("gemm", 8e9, 1e9, 4e-3)
    for function in (roofline.table, roofline.figure):
        with pytest.raises(UsageError, match="profile again with --measure-peak"):
            function([point], None)


def test_the_figure_shows_roof_points_and_where_the_ceilings_come_from(tmp_path):
    points = [
        Point("add", 1e9, 1e9, 2e-3, "span"),
        Point("gemm", 8e9, 1e9, 4e-3, "operator"),
        Point("copy", 0, 1e9, 1e-3, "span"),
    ]
    figure = roofline.figure([*points, Point("tiny", 1e3, 1e3, 1e-6, "span")], CEILINGS, "A step")
    (axes,) = figure.axes
    assert axes.get_xscale() == axes.get_yscale() == "log"
    title = " ".join(axes.get_title().split())
    assert "A step measured ceilings: fp32 GEMM 4 TFLOP/s, copy 1,000 GB/s; ridge point 4 FLOP/byte" in title
    roof, markers = axes.lines[0], [line for line in axes.lines if line.get_marker() in roofline.MARKERS]
    assert list(roof.get_xdata())[1] == 4 and list(roof.get_ydata())[1:] == [4, 4]
    slopes = [y / x for x, y in zip(roof.get_xdata(), roof.get_ydata(), strict=True)]
    assert slopes[0] == pytest.approx(slopes[1]), "TFLOP/s grow with FLOP/byte up to the ridge point"
    places = [(line.get_xdata()[0], line.get_ydata()[0]) for line in markers]
    assert places == [(1, pytest.approx(0.5)), (8, pytest.approx(2))], "no copy, and nothing below 1 % of its group"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["1 add: 50 %", "2 gemm: 50 %"]
    plots.save(figure, tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").read_bytes()[:4] == b"\x89PNG"


def test_points_of_a_gpu_profile_add_up_to_its_time_and_work():
    profile = read_json(H100)
    points = roofline.from_profile(profile, top=5)
    spans, named = ([point for point in points if point.group == group] for group in ("span", "operator"))
    steps, us = profile["profiled_steps"], sum(row["self_device_us"] for row in profile["operators"])
    assert sum(point.seconds for point in spans) == pytest.approx(us / steps / 1e6)
    expected = [row for row in operators.rows(profile) if row.bytes]
    assert sum(point.flops or 0 for point in spans) == pytest.approx(sum(row.flops * row.calls for row in expected))
    assert sum(point.bytes or 0 for point in spans) == pytest.approx(sum(row.bytes * row.calls for row in expected))
    assert len(named) == 5 and named[0].name == "aten::mm"
    assert [point.seconds for point in named] == sorted((point.seconds for point in named), reverse=True)
    unknown = {point.name for point in spans if point.flops is None}
    assert "optimizer, cost not known" in unknown and all(name.endswith(", cost not known") for name in unknown)


# -------------------------------------------------------------------------------------------------------------- commands


def test_the_command_of_version_2_counts_profiles_and_draws(run_script, tmp_path):
    arguments = (*TINY, "--seq-len", 192, "--num-kv-heads", 2, "--num-steps", 5, "--data", "synthetic")
    done = run_script(V2 / "run_deepspeed_flops.py", *arguments, "--computational-intensity", "--generate-roofline")
    for said in ("formula, full S x S", "FlopCounterMode", "ridge point", "aten::_scaled_dot_product_flash_attention_for_cpu"):
        assert said in done.stdout
    assert (tmp_path / "flops_analysis/roofline.png").stat().st_size > 1000
    rows = list(csv.DictReader((tmp_path / "flops_analysis/roofline.csv").open()))
    assert {"attention", "mlp", "norm", "loss"} <= {row["name"] for row in rows if row["group"] == "span"}

    (path,) = (tmp_path / "pytorch_profiles").glob("profile_*.json")
    profile = read_json(path)
    shape = (ModelConfig(**profile["run"]["model"]), 2, 192)
    known = [row for row in operators.rows(profile) if row.flops is not None]
    assert {row.name for row in operators.rows(profile) if row.flops is None} <= {"aten::index"}, "the batch is cut from the data"
    attention = [row for row in known if "flash_attention_for_cpu" in row.name]
    products = [row for row in known if row.name in ("aten::mm", "aten::bmm")]
    work = sum(row.flops * row.calls for row in attention + products)
    scores_again = flops.forward(*shape)["attention"] / 2
    assert work == pytest.approx(flops.training_step(*shape)["total"] + scores_again)
    listed = next(float(row["GFLOP"]) for row in rows if row["name"] == "aten::_scaled_dot_product_flash_attention_for_cpu")
    assert math.isclose(1e9 * listed, flops.forward(*shape)["attention"])


@pytest.mark.parametrize(
    ("folder", "flag"), [(V1, "--computational-intensity"), (V2, "--generate-roofline")], ids=["version 1", "version 2"]
)
def test_intensity_needs_a_run(refused, tmp_path, folder: Path, flag):
    (tmp_path / "flops_profile.json").write_text(json.dumps({"schema": "tiny-llama-flops/1"}))
    said = refused(folder / "run_deepspeed_flops.py", "--analyze-results", "flops_profile.json", flag)
    assert said == "error: --computational-intensity and --generate-roofline need a run: leave --analyze-results out\n"
    assert [path.name for path in tmp_path.iterdir()] == ["flops_profile.json"]
