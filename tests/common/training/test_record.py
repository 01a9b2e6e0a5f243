"""The record of a run: rates and shares of a peak, worked out by hand."""

from types import ModuleType, SimpleNamespace

from common import cli, data
from common.analysis.formulas import flops
from common.analysis.formulas.peaks import datasheet
from common.precision import Precision
from common.training import record, run

import pytest
import torch

CPU = torch.device("cpu")
FP32 = Precision(CPU, None)


def test_rates_are_of_the_steps_without_the_profiler():
    options = cli.parse(cli.parser(None).parse_args(["--num-steps", "6", "--data", "synthetic"]))
    version = ModuleType("version")
    version.__file__ = "tiny_llama_v1.py"
    outcome = run.Outcome([7.0] * 3 + [1.0] * 3, [10.0] * 4 + [100.0] * 2, {"peak_mib": 5.0, "kind": "process RSS"})
    profiler, peaks = SimpleNamespace(slow_steps=lambda finished: 2), {"flops_per_second": 1e12}
    made = record.build(version, options, torch.nn.Linear(2, 3), CPU, FP32, data.markov(1000, 0), outcome, profiler, peaks)
    step = made["step_ms"]
    assert (step["median"], step["count"], step["profiled"], len(step["all"])) == (10, 4, 2, 6)
    rate = flops.training_step(options.model, 8, 128)["total"] / 10e-3
    assert made["flops_per_second"] == pytest.approx(rate) and made["tokens_per_second"] == pytest.approx(8 * 128 / 10e-3)
    assert made["mfu"] == {
        "utilization": pytest.approx(rate / 1e12), "peak_flops_per_second": 1e12, "peak_source": "measured GEMM",
    }  # fmt: skip
    text = record.summary(made)
    assert f"{rate / 1e12:.3f} TFLOP/s; MFU {rate / 1e12:.1%} of 1 TFLOP/s (measured GEMM)" in text and "7.000 -> 4.000" in text


def test_the_peak_is_that_of_the_number_format_and_of_the_whole_device():
    name = "NVIDIA H100 80GB HBM3"
    assert record.peak_flops(name, FP32, False, None) == (67e12, "data sheet")
    assert record.peak_flops(name, FP32, True, None) == (495e12, "data sheet")
    assert record.peak_flops(name, FP32, False, {"flops_per_second": 5.0}) == (5.0, "measured GEMM")
    assert datasheet(name) and not any(
        datasheet(other) for other in (f"{name} MIG 1g.10gb", "NVIDIA GH200 480GB", "NVIDIA H200 NVL", "NVIDIA A100-PCIE-80GB")
    )
