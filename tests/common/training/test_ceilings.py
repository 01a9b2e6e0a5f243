"""The ceilings of a device: work over time."""

from common.precision import Precision
from common.training import ceilings

import torch

CPU = torch.device("cpu")


def test_ceilings_are_work_over_time(monkeypatch):
    # a second each
    monkeypatch.setattr(ceilings, "benchmark", lambda function, device, **_: [1000.0])
    assert ceilings.measure(CPU, Precision(CPU, None)) == {
        "flops_per_second": 2 * 1024**3,
        "bytes_per_second": 2 * 2**27,
        "operation_seconds": 1 / 200,
        "precision": "fp32",
        "load_seconds": 0.0,
    }


def test_a_gpu_is_timed_under_load(monkeypatch):
    """Product and copy run for three seconds, and then for two that count; small operations need no
    load.
    """
    durations = []

    def benchmark(function, device, seconds, **_):
        durations.append(seconds)
        return [1000.0]

    monkeypatch.setattr(ceilings, "benchmark", benchmark)
    monkeypatch.setattr(ceilings.devices, "is_gpu", lambda device: True)
    monkeypatch.setattr(ceilings.torch, "randn", lambda *sizes, **_: torch.empty(1, 1))
    assert ceilings.measure(CPU, Precision(CPU, None))["load_seconds"] == 3
    assert durations == [3, 2, 3, 2, 0]


def test_the_cost_of_a_call_is_the_median_of_the_host_s_times(monkeypatch):
    """On a clock by which a call takes 5 us, but each fourth one a second."""
    now = [0.0]
    calls = [0]

    def perf_counter() -> float:
        calls[0] += 1
        now[0] += 1.0 if calls[0] % 8 == 0 else 5e-6
        return now[0]

    monkeypatch.setattr(ceilings.time, "perf_counter", perf_counter)
    cost = ceilings.host_cost(CPU)
    assert round(cost["mm"], 3) == round(cost["launch"], 3) == 5
    assert calls[0] == 4 * ceilings.HOST_CALLS
