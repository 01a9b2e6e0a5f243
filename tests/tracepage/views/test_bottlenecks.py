"""The bottleneck report and its bounds, from a profile of a small Version 1 and from a GPU's."""

import contextlib
import csv
import json
from dataclasses import replace
from pathlib import Path

from tests.conftest import ROOT, V1
from tests.small_traces import BATCH, CEILINGS, CONFIG, LENGTH, event, rank_trace, write_profile
from tracepage.errors import UsageError
from tracepage.records import step_profile
from tracepage.views import bandwidth, bottlenecks

import pytest

SCRIPT, RESULTS = V1 / "analyze_bottlenecks.py", ROOT / "results/cpu"
FLOAT = "float"
TOKENS = BATCH * LENGTH


@pytest.fixture
def analyze(tmp_path, monkeypatch):
    """What the script does, in tmp_path; gives the printed text."""
    monkeypatch.chdir(tmp_path)
    return lambda profile, report="bottlenecks_v1.md": bottlenecks.write_bottlenecks(
        Path(profile), Path(report), "v1"
    )


@contextlib.contextmanager
def changed(profile):
    """The profile's content, which is written back."""
    content = json.loads(profile.read_text())
    yield content
    profile.write_text(json.dumps(content))


def read_step(path):
    return bottlenecks.mean_step(step_profile.read(path))


def by_name(step):
    return {target["name"]: target for target in bottlenecks.targets(step)}


def test_operator_times_add_up_to_the_step_and_amdahl_bounds_the_targets(
    analyze, cpu_profile, tmp_path
):
    analyze(cpu_profile)
    with (tmp_path / "bottleneck_analysis/operator_timing.csv").open() as file:
        rows = list(csv.DictReader(file))
    step = read_step(cpu_profile)
    assert sum(float(row["us_per_step"]) for row in rows) + step.outside_us == pytest.approx(
        step.us
    )
    assert sum(float(row["percent_of_step"]) for row in rows) < 100
    product = next(row for row in rows if row["operator"] == "aten::mm")
    calls, us = float(product["calls_per_step"]), float(product["us_per_step"])
    rate = float(product["flops_per_call"]) * calls / us * 1e6
    assert float(product["flops_per_second"]) == pytest.approx(rate)
    if product["bound_by"] == "compute":
        assert float(product["percent_of_ceiling"]) == pytest.approx(
            100 * rate / CEILINGS["flops_per_second"]
        )

    content = json.loads((tmp_path / "bottleneck_analysis/optimization_targets.json").read_text())
    assert content["schema"] == "tiny-llama-targets/1"
    *bounded, last = content["targets"]
    assert (
        [target["name"] for target in content["targets"] if target["bound"] is None]
        == [last["name"]]
        == ["mixed precision"]
    )
    assert {target["name"] for target in bounded} == {
        "QKV fusion",
        "SwiGLU fusion",
        "flash attention",
        "elementwise fusion",
        "fused optimizer",
    }
    for target in bounded:
        assert 0 <= target["floor_us"] <= target["time_us"] < content["step_us"]
        assert target["share"] == pytest.approx(
            (target["time_us"] - target["floor_us"]) / content["step_us"]
        )
        assert target["bound"] == pytest.approx(1 / (1 - target["share"]))
    assert [target["bound"] for target in bounded] == sorted(
        (target["bound"] for target in bounded), reverse=True
    )


def test_the_overhead_at_the_calls_is_that_of_the_step(cpu_profile):
    step = read_step(cpu_profile)
    working = [row for row in step.rows if row.works]  # the overhead of the others is theirs
    spans = {row.span for row in working}
    elsewhere = sum(row.us for row in step.rows if row.span not in spans)
    assert sum(
        row.us + row.calls * step.overhead(row.span) for row in working
    ) + elsewhere == pytest.approx(step.us)


def test_targets_concern_the_calls_that_the_model_makes(cpu_profile):
    step, layers = read_step(cpu_profile), CONFIG.num_layers
    found, mlp = by_name(step), [row for row in step.rows if row.works and row.span == "mlp"]
    assert (found["QKV fusion"]["calls"], found["QKV fusion"]["fused_calls"]) == (
        9 * layers,
        3 * layers,
    )
    assert found["flash attention"]["fused_calls"] == 2 * layers
    assert (
        "aten::bmm" in found["flash attention"]["operators"]
        and "aten::mm" not in found["flash attention"]["operators"]
    )
    assert found["elementwise fusion"]["fused_calls"] == 2 * layers + 2 * (2 * layers + 1)
    assert {"aten::cat", "aten::rsqrt", "aten::add"} <= set(
        found["elementwise fusion"]["operators"]
    )
    assert "aten::silu" in found["SwiGLU fusion"]["operators"]
    assert found["SwiGLU fusion"]["calls"] == sum(
        row.calls * (2 / 3 if row.name == "aten::mm" else 1) for row in mlp
    )
    assert found["mixed precision"]["calls"] == 3 * (1 + 9 * layers)


def test_the_fused_forms_move_and_compute_what_they_must(cpu_trace, tmp_path):
    """Bytes and FLOPs of each, from how its floor grows where one ceiling alone counts; by hand at
    B S = t, fp32.

    A launch of a second makes every floor the time of today; without any limit the overhead is
    left.
    """
    floors, rates = {}, {"bytes": {"bytes_per_second": 1e12}, "flops": {"flops_per_second": 1e12}}
    for what, ceiling in {"neither": {}, "launch": {"operation_seconds": 1.0}, **rates}.items():
        alone = {
            "flops_per_second": 1e18,
            "bytes_per_second": 1e18,
            "operation_seconds": 0.0,
        } | ceiling
        write_profile(tmp_path / "profile_1.json", cpu_trace, ceilings=CEILINGS | alone)
        found = by_name(step := read_step(tmp_path / "profile_1.json"))
        floors[what] = {
            name: target["floor_us"]
            for name, target in found.items()
            if target["floor_us"] is not None
        }
    t, d, f, layers = TOKENS, CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.num_layers
    kv, pairs = CONFIG.head_dim * CONFIG.num_key_value_heads, BATCH * LENGTH * (LENGTH + 1) // 2

    def products(width: int) -> tuple[int, int]:
        return 3 * layers * 4 * (t * d + d * width + t * width), 3 * layers * 2 * t * d * width

    (qkv_bytes, qkv), (gate_up_bytes, gate_up) = products(d + 2 * kv), products(2 * f)
    expected = {
        "QKV fusion": (qkv_bytes, qkv),
        "SwiGLU fusion": (gate_up_bytes + layers * 4 * t * f * 8, gate_up),
        "flash attention": (3 * layers * 4 * t * 2 * (d + kv), 14 * layers * pairs * d),
        "elementwise fusion": (
            2 * layers * 4 * t * 2 * (d + kv) + 4 * t * d * (5 + 16 * layers),
            0,
        ),
        "fused optimizer": (28 * 1000, 0),  # of the record's parameters
    }
    for name, (moved, computed) in expected.items():
        grown = [
            (floors[what][name] - floors["neither"][name]) * 1e6 for what in ("bytes", "flops")
        ]
        assert grown[0] == pytest.approx(moved, rel=1e-3), name
        assert grown[1] == pytest.approx(computed, rel=1e-3, abs=1), name
    assert floors["launch"] == {name: found[name]["time_us"] for name in floors["launch"]}
    assert floors["neither"]["fused optimizer"] == pytest.approx(step.overhead("optimizer"))


def test_a_fused_optimizer_is_no_target_where_the_optimizer_is_fused(cpu_profile):
    step = read_step(cpu_profile)
    others = [row for row in step.rows if row.span != "optimizer"]
    (fused, *_) = [row for row in step.rows if row.span == "optimizer"]
    fused = replace(step, rows=[*others, fused._replace(name="aten::_fused_adamw_")])
    assert by_name(step).keys() - by_name(fused).keys() == {"fused optimizer"}


def test_without_ceilings_nothing_is_classed_and_it_says_what_to_do(analyze, cpu_trace, tmp_path):
    write_profile(tmp_path / "profile_1.json", cpu_trace, ceilings=None)
    analyze(".")
    # a terminal may be too narrow for all columns
    (report,) = (tmp_path / "bottleneck_analysis").glob("bottlenecks_*.md")
    assert "not classed" in report.read_text() and "--measure-peak" in report.read_text()
    content = json.loads((tmp_path / "bottleneck_analysis/optimization_targets.json").read_text())
    assert content["targets"] and all(
        target["bound"] is target["floor_us"] is None for target in content["targets"]
    )


def test_a_profile_of_attention_alone_gives_shares_of_attention(analyze, cpu_trace, tmp_path):
    write_profile(tmp_path / "profile_1.json", cpu_trace, attention_only=True)
    text = analyze("profile_1.json")
    assert "shares are of attention" in text and "outside operators (Python" not in text
    step = read_step(tmp_path / "profile_1.json")
    assert {row.span for row in step.rows} == {"attention"} and sum(
        row.us for row in step.rows
    ) == step.us
    assert set(by_name(step)) == {
        "QKV fusion",
        "flash attention",
        "elementwise fusion",
        "mixed precision",
    }


def test_on_a_gpu_time_is_the_kernels_and_the_rest_is_idle(gpu_profile):
    step = read_step(gpu_profile)
    assert step.us == (125 + 60) / 2 and step.outside_us == step.us - 159 / 2
    assert [
        "GPU idle",
        step.outside_us,
        pytest.approx(100 * step.outside_us / step.us),
    ] in bottlenecks.by_limit(step)
    products = [row for row in step.rows if row.name == "aten::mm"]
    floors = (
        row.calls * (row.bytes / 2 / CEILINGS["bytes_per_second"] * 1e6 + step.overhead(row.span))
        for row in products
    )
    assert by_name(step)["mixed precision"]["floor_us"] == pytest.approx(sum(floors))
    assert all(row.us > 0 for row in step.rows), (
        "an operator without kernels takes no time on a GPU"
    )

    with changed(gpu_profile) as content:
        content["device_busy_us"] = 2 * sum(content["step_us"])
    step = read_step(gpu_profile)
    assert step.outside_us == 0


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"qkv_fusion": False, "swiglu_fusion": True, "flash_attention": True}, {"QKV fusion"}),
        ({"capture_step": True}, {"QKV fusion", "SwiGLU fusion"}),
        ({"memory_plan": True, "fp8": False}, set()),
    ],
    ids=["a switch that is off", "no switches", "always fused"],
)
def test_fusions_that_are_on_are_no_targets(cpu_profile, settings, left):
    with changed(cpu_profile) as content:
        content["run"]["settings"] = settings
    assert set(by_name(read_step(cpu_profile))) & {"QKV fusion", "SwiGLU fusion"} == left


def test_a_step_in_which_all_is_fused_has_a_report_without_targets(analyze, cpu_profile, tmp_path):
    fused = (
        "qkv_fusion swiglu_fusion flash_attention fused_adamw triton_norm triton_rope fused_loss"
    )
    with changed(cpu_profile) as content:
        content["run"]["settings"] = dict.fromkeys(fused.split(), True)
        content["operators"] = [row for row in content["operators"] if row["span"] == "embed"]
    assert by_name(read_step(cpu_profile)) == {}
    assert "None of the parts that can be fused is left in this step." in analyze(cpu_profile)
    written = json.loads((tmp_path / "bottleneck_analysis/optimization_targets.json").read_text())
    assert written["targets"] == []


def test_collectives_are_a_limit_and_no_target_and_overlap_is_named(tmp_path):
    trace = rank_trace(0)
    trace["traceEvents"] += [
        event("cpu_op", "record_param_comms", *times) for times in ((2.95, 4.95), (5.95, 7.05))
    ]
    (tmp_path / "trace_1.json").write_text(json.dumps(trace))
    write_profile(
        tmp_path / "profile_1.json", tmp_path / "trace_1.json", device__name="NVIDIA H100 80GB HBM3"
    )
    step = read_step(tmp_path / "profile_1.json")
    assert ["communication", 80, 40] in bottlenecks.by_limit(step)
    assert not any(
        "record_param_comms" in target["operators"] for target in bottlenecks.targets(step)
    )
    assert "left out: collectives, 80 us a step" in bandwidth.from_profile(step.profile)[1]
    assert "133 % of the time in which the GPU is busy" in bottlenecks.overlap(133, 100)[
        0
    ] and not bottlenecks.overlap(101, 100)


# -------------------------------------------------------------------------------------------------------------- bad input


def test_what_is_refused_leaves_nothing(analyze, cpu_profile, tmp_path):
    with changed(cpu_profile) as content:
        content["run"]["version"] = "v2"
    with pytest.raises(UsageError, match="is of v2: the targets are parts of v1"):
        analyze(cpu_profile)
    assert not (tmp_path / "bottleneck_analysis").exists()
