"""NVML's counter of energy, from a stand-in for its library."""

from types import SimpleNamespace

from common import nvml
from tracepage.errors import RunError

import pytest


def test_the_reading_is_in_joules_and_an_error_is_a_line(monkeypatch):
    codes = iter([0, 3])

    def nvmlDeviceGetTotalEnergyConsumption(handle, number):
        number._obj.value = 5_000_000_000
        return next(codes)

    library = SimpleNamespace(
        nvmlDeviceGetTotalEnergyConsumption=nvmlDeviceGetTotalEnergyConsumption
    )
    monkeypatch.setattr(nvml, "_gpu", lambda: (library, None))
    assert nvml.joules() == 5e6
    with pytest.raises(
        RunError, match="NVML: nvmlDeviceGetTotalEnergyConsumption ends with code 3"
    ):
        nvml.joules()


@pytest.mark.gpu
def test_a_gpu_has_drawn_energy():
    assert nvml.joules() > 0
