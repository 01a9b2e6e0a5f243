"""The joules that an NVIDIA GPU has drawn, by NVML, whose binding is the package nvidia-ml-py."""

import functools
from typing import Any

from tracepage.errors import RunError, UsageError

import torch


@functools.cache
def _gpu() -> Any:
    """NVML's handle of PyTorch's current GPU."""
    import pynvml

    pynvml.nvmlInit()
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")


def joules() -> float:
    """Drawn since the driver was loaded; the counter is updated every 20 to 100 ms.

    UsageError: the binding is not installed. RunError: the driver has no such counter.
    """
    try:
        import pynvml
    except ImportError as error:
        raise UsageError("nvidia-ml-py is not installed: run `make setup`") from error
    try:
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(_gpu()) / 1e3
    except pynvml.NVMLError as error:
        raise RunError(f"NVML: {error}") from error
