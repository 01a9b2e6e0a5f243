"""The record of a run: rates and shares of a peak, worked out by hand."""

from dataclasses import replace

from common import data
from common.options import RunOptions
from common.precision import Precision
from common.training import record
from tests.conftest import run_options
from tracepage.cost import flops
from tracepage.show import run_facts
from version1_pytorch_baseline import tiny_llama_v1

import pytest
import torch

CPU = torch.device("cpu")
FP32 = Precision(CPU, None)


def options() -> RunOptions:
    flags = ("--num-steps", "6", "--data", "synthetic")
    return replace(run_options(tiny_llama_v1, *flags), name="v1")


def build(model: torch.nn.Module) -> dict:
    """The record of six steps, two of them under the profiler."""
    return record.build(
        options(),
        FP32,
        data.markov(1000, 0),
        model,
        status="completed",
        losses=[7.0] * 20 + [1.0] * 20,
        own_losses=0,
        step_ms=[10.0] * 4 + [100.0] * 2,
        profiled=2,
        first_step=1,
        memory={"peak_mib": 5.0, "kind": "process RSS"},
        ceilings={"flops_per_second": 1e12},
    )


def test_tokens_are_those_of_all_processes_and_flops_of_one(as_rank):
    alone = build(torch.nn.Linear(2, 3))
    as_rank(0, 4)
    one_of_four = build(torch.nn.Linear(2, 3))
    for name, times in {"tokens": 4, "samples": 4, "flops": 1}.items():
        rate = f"{name}_per_second"
        assert one_of_four[rate] == pytest.approx(times * alone[rate]), name


def test_rates_are_of_the_steps_without_the_profiler(monkeypatch):
    model = torch.nn.Linear(2, 3)
    made = build(model)
    step = made["step_ms"]
    assert (step["median"], step["count"], step["profiled"], len(step["all"])) == (10, 4, 2, 6)
    rate = flops.training_step(options().model, 8, 128)["total"] / 10e-3
    assert made["flops_per_second"] == pytest.approx(rate) and made[
        "tokens_per_second"
    ] == pytest.approx(8 * 128 / 10e-3)
    assert made["samples_per_second"] == pytest.approx(8 / 10e-3)
    assert made["mfu"] is None and run_facts.of_measured_gemm(made) == pytest.approx(
        100 * rate / 1e12
    )
    text = run_facts.summary(made)
    assert "  throughput   102,400 tokens/s, 800.0 samples (sequences)/s\n" in text
    assert "all under the profiler" not in text
    assert ", all under the profiler" in run_facts.summary(
        made | {"step_ms": step | {"profiled": 6}}
    )
    assert f"{rate / 1e12:.1%} of measured GEMM (1 TFLOP/s)" in text
    assert (
        "  MFU          not given" in text
        and "7.000 -> 1.000 (mean of the last 20; uniform guess 6.908" in text
    )
    monkeypatch.setattr(run_facts.peaks, "flops_per_second", lambda *_: 2e12)
    listed = build(model)
    assert listed["mfu"]["utilization"] == pytest.approx(rate / 2e12)
    model.switches = {"fp8": True}
    assert build(model)["mfu"] is None
