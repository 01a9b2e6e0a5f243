"""The summary of a run for a terminal."""

from tests import records
from tracepage.show import run_facts

import pytest


def test_utilization_is_of_the_data_sheets_peak_even_beside_a_measured_gemm():
    ceilings = {"flops_per_second": 50e12}
    run = records.record(
        device__name="NVIDIA H200", flops_per_second=6.7e12, ceilings=ceilings, settings={}
    )
    run["training"] |= {"first_step": 1, "world_size": 1, "parallel": None}
    assert run_facts.mfu(run) == pytest.approx(10) and run_facts.of_measured_gemm(
        run
    ) == pytest.approx(13.4)
    text = run_facts.summary(run)
    assert (
        "  MFU          10.0% of 67 TFLOP/s (data sheet); 13.4% of measured GEMM (50 TFLOP/s)"
        in text
    )
    run["settings"] = {"fp8": True}
    text = " ".join(run_facts.summary(run).split())
    assert "MFU not given, as products in two formats have two peaks; 0.3% of 1,979 TFLOP/s" in text
    assert run_facts.mfu(run) is None and run_facts.columns(run)["MFU %"] is None
    run["fp8"] = {"saturated_steps": 2, "x": 2, "weight": 0, "gradient": 1}
    clipped = "2 steps in which a tensor was clipped (x 2, weight 0, gradient 1)"
    assert clipped in " ".join(run_facts.summary(run).split())
    assert run_facts.mfu(
        records.record(device__name="NVIDIA H200", precision__tf32=True)
    ) == pytest.approx(100 * 25e3 / 495e12)


def test_a_summary_fits_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    run = records.record(
        device__name="AMD EPYC 9754 128-Core Processor, as a cloud names it",
        flops_per_second=12.3e9,
    )
    run["training"] |= {"num_steps": 5, "first_step": 3, "world_size": 1, "parallel": None}
    text = run_facts.summary(run)
    assert max(map(len, text.splitlines())) <= 100 and ", 12.3 GFLOP/s\n" in text
    assert " of 3 steps after step 2, " in text.replace("\n               ", " ")


def test_the_last_loss_is_the_mean_of_the_last_20_steps():
    losses = [9.0] * 5 + [2.0] * 10 + [1.0] * 10
    run = records.record(loss={"uniform": 6.9, "all": losses}, settings={})
    assert run_facts.last_loss(run) == 1.5
    assert "9.000 -> 1.500 (mean of the last 20; " in run_facts.summary(run)
    assert run_facts.columns(run)["loss"] == "9.00 to 1.50 in 25 steps"
