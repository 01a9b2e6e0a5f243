"""The joules that an NVIDIA GPU has drawn: a reading of NVML, the library that comes with the
driver.
"""

import ctypes
import functools
from typing import Any

from tracepage.errors import RunError

import torch


@functools.cache
def _gpu() -> tuple[Any, ctypes.c_void_p]:
    """The library, and its handle of PyTorch's current GPU."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    handle = ctypes.c_void_p()
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    library.nvmlInit_v2()
    library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle))
    return library, handle


def joules() -> float:
    """Drawn since the driver was loaded. The counter is updated every 20 to 100 ms."""
    library, handle = _gpu()
    millijoules = ctypes.c_ulonglong()
    if code := library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
        raise RunError(f"NVML: nvmlDeviceGetTotalEnergyConsumption ends with code {code}")
    return millijoules.value / 1e3
