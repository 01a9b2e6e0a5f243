"""The benchmark of the kernels: its operations, shapes and contenders, and the flags that it
refuses.
"""

import json
import sys
from pathlib import Path

from common.config import ModelConfig
from common.options import RunOptions
from tests.conftest import ROOT, TINY, run_options, runs_kernels, without_gpu
from tests.oracle import DEVICE
from tracepage.errors import UsageError
from tracepage.files import read_json, schema_of
from tracepage.records.study_files import KernelBenchmark

import pytest

pytest.importorskip("triton", reason="needs Triton")
from version3_triton import benchmark_kernels, kernel_cases, kernels, tiny_llama_v3

V3 = ROOT / "version3_triton"
SCRIPT = V3 / "tiny_llama_v3.py"


@pytest.fixture
def one_round(monkeypatch, known_ceilings, tmp_path) -> Path:
    """The benchmark times every pass once; the folder that it runs in."""
    monkeypatch.setattr(kernel_cases, "ROUNDS", 1)
    monkeypatch.setattr(kernel_cases, "ITERATIONS", 1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options(*flags: str) -> RunOptions:
    return run_options(tiny_llama_v3, *TINY, *flags)


@runs_kernels
def test_the_benchmark_times_kernels_and_pytorch_at_the_models_shapes(one_round, capsys):
    benchmark_kernels.of_version(options("--disable-triton-attention", "--disable-triton-loss"))
    measured = read_json(one_round / "metrics_kernels.json", schema_of(KernelBenchmark))
    timed = [(row["operation"], row["contender"]) for row in measured["rows"]]
    assert timed == [
        (name, who)
        for name in ("rms_norm", "add_rms_norm", "apply_rope", "swiglu")
        for who in ("kernel", "eager")
    ]
    for row in measured["rows"]:
        assert (
            row["hidden_size"] == 32
            and row["host_ms"]["median"] > 0
            and row["host_ms"]["count"] == 1
        )
        if DEVICE.type == "cuda":
            assert row["gpu_ms"]["median"] > 0 and row["peak_mib"] > 0
        else:
            assert row["gpu_ms"] is None and row["peak_mib"] is None
    # B 2, S 16, D 32, F 64, fp32
    amounts = {row["operation"]: row["amount"] for row in measured["rows"]}
    assert amounts == {
        "rms_norm": 20480,
        "add_rms_norm": 32768,
        "apply_rope": 32768,
        "swiglu": 65536,
    }
    printed = capsys.readouterr()
    assert "swiglu" in printed.out and "kernel" in printed.out
    assert (
        DEVICE.type == "cuda" or "interpreted: their times say nothing about a GPU" in printed.err
    )
    assert [path.name for path in one_round.iterdir()] == ["metrics_kernels.json"]


@without_gpu
def test_without_a_gpu_the_benchmark_times_pytorch_alone(one_round, execute, monkeypatch, tmp_path):
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    said = execute(SCRIPT, *TINY, "--mode", "benchmark", "--metrics-out", "out.json").err
    assert (
        "need a GPU" in said
        and "PyTorch's operations are timed alone" in said
        and said.count("\n") == 1
    )
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["operation"] for row in rows] == list(benchmark_kernels.OPERATIONS)
    assert {row["contender"] for row in rows} == {"eager"}
    product = 2 * 32 * 2 * 16 * 17 // 2
    assert [row["amount"] for row in rows if row["unit"] == "TFLOP/s"] == [
        7 * product,
        3 * 2 * 2 * 16 * 32 * 1000,
    ]


def test_a_sweep_times_every_shape(one_round, monkeypatch, capsys):
    flags = (
        "--operations",
        "swiglu",
        "--sizes",
        "64x4",
        "128x2",
        "--batch-size",
        "1",
        "--metrics-out",
        "sweep.json",
    )
    monkeypatch.setattr(sys, "argv", ["benchmark_kernels.py", *flags])
    benchmark_kernels.main()
    rows = read_json(one_round / "sweep.json", schema_of(KernelBenchmark))["rows"]
    shapes = [
        (row["hidden_size"], row["sequence_length"]) for row in rows if row["contender"] == "eager"
    ]
    assert shapes == [(64, 4), (128, 2)]
    assert "sweep.json" in capsys.readouterr().out


def test_a_sweep_keeps_the_head_dimension_and_the_ratios():
    base = ModelConfig(
        hidden_size=512, num_attention_heads=8, num_key_value_heads=4, intermediate_size=2048
    )
    wide = benchmark_kernels.scaled(base, 4096)
    assert (wide.hidden_size, wide.head_dim, wide.intermediate_size) == (4096, 64, 16384)
    assert (wide.num_attention_heads, wide.num_key_value_heads) == (64, 32)
    with pytest.raises(UsageError, match="in steps of 128, not 192"):
        benchmark_kernels.scaled(base, 192)


def test_a_benchmark_of_nothing_is_refused(one_round):
    off = [f"--disable-{switch}" for switch in kernels.SWITCHES]
    with pytest.raises(UsageError, match="every operation is switched off"):
        benchmark_kernels.of_version(options(*off))
    assert not list(one_round.iterdir())


@pytest.mark.parametrize(
    "flags",
    [("--sizes", "512"), ("--sizes", "0x16"), ("--operations", "norm"), ("--capture-step",)],
)
def test_flags_that_it_does_not_take(refused, flags):
    assert flags[0] in refused(V3 / "benchmark_kernels.py", *flags)


@pytest.mark.parametrize("one_pass_ms, passes", [(0.25, 4), (3.0, 1), (0.001, 100)])
def test_a_replay_is_as_many_passes_as_fill_a_millisecond(monkeypatch, one_pass_ms, passes):
    """At most 100, so that its launch is small against it; all contenders have as many."""
    captured = []

    def capture_graph(step, times=1):
        captured.append(times)
        return lambda: times * step()

    monkeypatch.setattr(kernel_cases.devices, "capture_graph", capture_graph)
    monkeypatch.setattr(
        kernel_cases,
        "benchmark",
        lambda replay, device, warmup, iterations: [replay()] * iterations,
    )
    steps = {"fast": lambda: one_pass_ms, "slow": lambda: 8 * one_pass_ms}
    found = kernel_cases.replayed(steps, DEVICE)
    assert captured == [1, 1, passes, passes]
    for name, one in (("fast", one_pass_ms), ("slow", 8 * one_pass_ms)):
        assert found[name] == pytest.approx([one] * kernel_cases.ROUNDS * kernel_cases.ITERATIONS)
