"""NVML's counter of energy, from a stand-in for its binding."""

import sys
from types import SimpleNamespace

from common import nvml
from tracepage.errors import RunError, UsageError

import pytest


class NVMLError(Exception):
    """The binding's own error."""


def test_the_reading_is_in_joules_and_an_error_is_a_line(monkeypatch):
    readings = [5_000_000_000]

    def nvmlDeviceGetTotalEnergyConsumption(handle):
        assert handle == "the GPU"
        if not readings:
            raise NVMLError("Not Supported")
        return readings.pop()

    binding = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlDeviceGetTotalEnergyConsumption=nvmlDeviceGetTotalEnergyConsumption,
    )
    monkeypatch.setitem(sys.modules, "pynvml", binding)
    monkeypatch.setattr(nvml, "_gpu", lambda: "the GPU")
    assert nvml.joules() == 5e6
    with pytest.raises(RunError, match="NVML: Not Supported"):
        nvml.joules()


def test_a_missing_binding_is_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UsageError, match="nvidia-ml-py is not installed: run `make setup`"):
        nvml.joules()


@pytest.mark.gpu
def test_a_gpu_has_drawn_energy():
    assert nvml.joules() > 0
