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
    }
