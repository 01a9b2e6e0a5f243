"""NVML's counter of energy, from a stand-in for its binding."""

import sys
from types import SimpleNamespace

from common import nvml
from tracepage.errors import RunError, UsageError

import pytest
import torch

nvidia = pytest.mark.skipif(bool(torch.version.hip), reason="needs an NVIDIA GPU")


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


def test_the_state_of_a_gpu_is_the_median_of_its_readings(monkeypatch):
    """While a step runs the clock falls; a reading that NVML refuses does not count."""
    clocks = [1980, 1400, NVMLError("Not Supported"), 1500, 1500]

    def nvmlDeviceGetClockInfo(handle, kind):
        clock = clocks.pop(0) if len(clocks) > 1 else clocks[0]
        if isinstance(clock, NVMLError):
            raise clock
        return clock

    binding = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetClockInfo=nvmlDeviceGetClockInfo,
        nvmlDeviceGetPowerUsage=lambda handle: 700_000,
        nvmlDeviceGetTemperature=lambda handle, sensor: 60,
    )
    monkeypatch.setitem(sys.modules, "pynvml", binding)
    monkeypatch.setattr(nvml, "_gpu", lambda: "the GPU")
    monkeypatch.setattr(nvml.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(nvml.torch.version, "hip", None)
    monkeypatch.setattr(nvml, "SAMPLE_SECONDS", 1e-4)
    with nvml.sampled(torch.device("cuda")) as state:
        while len(clocks) > 1:
            pass
    assert state == {"clock_mhz": 1500, "watts": 700, "celsius": 60}


def test_without_nvml_the_state_is_not_known(monkeypatch):
    unknown = {"clock_mhz": None, "watts": None, "celsius": None}
    with nvml.sampled(torch.device("cpu")) as state:
        pass
    assert state == unknown
    monkeypatch.setattr(nvml.importlib.util, "find_spec", lambda name: None)
    with nvml.sampled(torch.device("cuda")) as state:
        pass
    assert state == unknown


@pytest.mark.gpu
@nvidia
def test_a_gpu_tells_its_state():
    with nvml.sampled(torch.device("cuda")) as state:
        torch.ones(1, device="cuda")
    assert all(value > 0 for value in state.values())


@pytest.mark.gpu
@nvidia
def test_a_gpu_has_drawn_energy():
    assert nvml.joules() > 0
