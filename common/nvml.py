"""What an NVIDIA GPU has drawn, draws, and at which clock: three readings of NVML, the library that comes with the driver."""

import ctypes
import functools
from typing import Any

from common.errors import RunError

import torch

SM = 1  # NVML_CLOCK_SM


@functools.cache
def _gpu() -> tuple[Any, ctypes.c_void_p]:
    """The library, and its handle of PyTorch's current GPU."""
    library, handle = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    library.nvmlInit_v2()
    library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle))
    return library, handle


def _read(function: str, value: Any, *arguments: int) -> int:
    library, handle = _gpu()
    if code := getattr(library, function)(handle, *arguments, ctypes.byref(value)):
        raise RunError(f"NVML: {function} ends with code {code}")
    return value.value


def joules() -> float:
    """Drawn since the driver was loaded. The counter is updated every 20 to 100 ms."""
    return _read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong()) / 1e3


def watts() -> float:
    return _read("nvmlDeviceGetPowerUsage", ctypes.c_uint()) / 1e3


def sm_mhz() -> int:
    return _read("nvmlDeviceGetClockInfo", ctypes.c_uint(), SM)
