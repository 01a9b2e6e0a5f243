"""The record of a run: rates and shares of a peak, worked out by hand."""

from types import SimpleNamespace

from common import cli, data
from common.analysis.formulas import flops
from common.analysis.output import run_facts
from common.precision import Precision
from common.training import record, run
from tests import records

import pytest
import torch

CPU = torch.device("cpu")
FP32 = Precision(CPU, None)


def test_rates_are_of_the_steps_without_the_profiler(monkeypatch):
    options = cli.parse(cli.parser(None).parse_args(["--num-steps", "6", "--data", "synthetic"]))
    outcome = run.Outcome([7.0] * 20 + [1.0] * 20, [10.0] * 4 + [100.0] * 2, {"peak_mib": 5.0, "kind": "process RSS"})
    profiler, peaks = SimpleNamespace(slow_steps=lambda finished: 2), {"flops_per_second": 1e12}
    model = torch.nn.Linear(2, 3)
    model.optimizer_communicates = True
    made = record.build("v1", options, model, CPU, FP32, data.markov(1000, 0), outcome, profiler, peaks)
    assert made["training"]["optimizer_communicates"]
    step = made["step_ms"]
    assert (step["median"], step["count"], step["profiled"], len(step["all"])) == (10, 4, 2, 6)
    rate = flops.training_step(options.model, 8, 128)["total"] / 10e-3
    assert made["flops_per_second"] == pytest.approx(rate) and made["tokens_per_second"] == pytest.approx(8 * 128 / 10e-3)
    assert made["mfu"] is None and run_facts.of_measured_gemm(made) == pytest.approx(100 * rate / 1e12)
    text = record.summary(made)
    assert "all under the profiler" not in text
    assert ", all under the profiler" in record.summary(made | {"step_ms": step | {"profiled": 6}})
    assert f"{rate / 1e12:.1%} of measured GEMM (1 TFLOP/s)" in text
    assert "  MFU          not given" in text and "7.000 -> 1.000 (mean of the last 20; uniform guess 6.908" in text
    monkeypatch.setattr(record.run_facts, "peak_flops", lambda run: 2e12)
    listed = record.build("v1", options, model, CPU, FP32, data.markov(1000, 0), outcome, profiler, peaks)
    assert listed["mfu"]["utilization"] == pytest.approx(rate / 2e12)


def test_utilization_is_a_share_of_the_data_sheets_peak_even_beside_a_measured_gemm():
    ceilings = {"flops_per_second": 50e12}
    run = records.record(device__name="NVIDIA H200", flops_per_second=6.7e12, ceilings=ceilings, settings={})
    run["training"] |= {"first_step": 1, "world_size": 1, "parallel": None}
    assert run_facts.mfu(run) == pytest.approx(10) and run_facts.of_measured_gemm(run) == pytest.approx(13.4)
    text = record.summary(run)
    assert "  MFU          10.0% of 67 TFLOP/s (data sheet); 13.4% of measured GEMM (50 TFLOP/s)" in text
    run["settings"] = {"fp8": True}
    assert "(data sheet); 0.3% of 1,979 TFLOP/s in FP8; 13.4%" in record.summary(run)
    assert run_facts.mfu(records.record(device__name="NVIDIA H200", precision__tf32=True)) == pytest.approx(100 * 25e3 / 495e12)


@pytest.mark.parametrize("spread", [1, 90])
def test_a_summary_fits_a_terminal_and_noise_names_the_load(monkeypatch, spread):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(record.devices, "load", lambda: (10.24, 2))
    run = records.record(device__name="AMD EPYC 9754 128-Core Processor, as a cloud names it", flops_per_second=12.3e9)
    run["step_ms"] |= {"median": 100, "p20": 100 - spread, "p80": 100}
    run["training"] |= {"first_step": 1, "world_size": 1, "parallel": None}
    text = record.summary(run)
    assert max(map(len, text.splitlines())) <= 100 and ", 12.3 GFLOP/s\n" in text
    run["training"] |= {"num_steps": 5, "first_step": 3}
    assert " of 3 steps after step 2, " in record.summary(run).replace("\n               ", " ")
    assert ("10.2 processes, this run's included, shared 2 cores" in text) == (spread == 90)
