"""NVML's readings, from a stand-in for its library."""

from types import SimpleNamespace

from common import nvml
from common.errors import RunError

import pytest


def test_readings_have_their_units_and_an_error_is_a_line(monkeypatch):
    def fill(number, code=0):
        def nvmlFunction(handle, *arguments):
            arguments[-1]._obj.value = number
            return code if arguments[:-1] in ((), (1,)) else 2  # 1: the clock of the multiprocessors

        return nvmlFunction

    library = SimpleNamespace(
        nvmlDeviceGetTotalEnergyConsumption=fill(5_000_000_000),
        nvmlDeviceGetClockInfo=fill(1980),
        nvmlDeviceGetPowerUsage=fill(0, 3),
    )
    monkeypatch.setattr(nvml, "_gpu", lambda: (library, None))
    assert (nvml.joules(), nvml.sm_mhz()) == (5e6, 1980)
    with pytest.raises(RunError, match="NVML: nvmlDeviceGetPowerUsage ends with code 3"):
        nvml.watts()


@pytest.mark.gpu
def test_a_gpu_has_drawn_energy():
    assert nvml.joules() > 0 and nvml.watts() > 0 and nvml.sm_mhz() > 0
