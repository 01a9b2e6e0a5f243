"""What a run's record, its clock and its ceilings are made of, worked out by hand."""

from types import ModuleType, SimpleNamespace

from common import cli, data, timing
from common.analysis.formulas import flops
from common.analysis.formulas.peaks import datasheet
from common.errors import RunError
from common.precision import Precision
from common.training import ceilings, record, run

import pytest
import torch

CPU = torch.device("cpu")
FP32 = Precision(CPU, None)


def parsed(*flags: str):
    return cli.parse(cli.parser(None).parse_args(list(flags)))


def test_rates_are_of_the_steps_without_the_profiler():
    options = parsed("--num-steps", "6", "--data", "synthetic")
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


def test_ceilings_are_work_over_time(monkeypatch):
    monkeypatch.setattr(ceilings, "benchmark", lambda function, device, **_: [1000.0])  # a second each
    assert ceilings.measure(CPU, FP32) == {
        "flops_per_second": 2 * 1024**3, "bytes_per_second": 2 * 2**27, "operation_seconds": 1 / 200, "precision": "fp32",
    }  # fmt: skip


def test_a_benchmark_leaves_out_its_warm_up_and_a_summary_has_the_percentiles():
    calls = []
    assert len(timing.benchmark(lambda: calls.append(1), CPU, warmup=3, iterations=5)) == 5 and len(calls) == 8
    assert timing.summarize([float(i) for i in range(11)]) == {"median": 5.0, "p20": 2.0, "p80": 8.0, "count": 11}


def test_each_profiling_flag_turns_the_profiler_on():
    assert not parsed().enable_pytorch_profiler
    for flags in (("--profile-dir", "x"), ("--profile-memory",), ("--profile-operators",), ("--profile-attention-only",)):
        assert parsed(*flags).enable_pytorch_profiler, flags


@pytest.mark.parametrize("error, code", [(KeyboardInterrupt(), 130), (OSError(28, "No space"), 1), (RunError("x"), 1)])
def test_exit_codes(error, code):
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        cli.command(main)
    assert ended.value.code == code


def test_an_overflow_in_float16_leaves_the_weights_and_halves_the_scale():
    precision, weight = Precision(CPU, torch.float16), torch.nn.Parameter(torch.ones(1))
    optimizer, before = torch.optim.SGD([weight], lr=1.0), precision.scaler.get_scale()
    precision.scale((weight * float("inf")).sum()).backward()
    precision.step(optimizer)
    assert weight.item() == 1 and precision.scaler.get_scale() == before / 2
    assert not Precision(CPU, torch.bfloat16).scaler.is_enabled()
