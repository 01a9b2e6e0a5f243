"""The energy, clock, power and temperature of an NVIDIA GPU, by NVML, whose binding is the package
nvidia-ml-py.
"""

import contextlib
import functools
import importlib.util
import threading
from collections.abc import Iterator
from statistics import median
from typing import Any

from tracepage.errors import RunError, UsageError

import torch

SAMPLE_SECONDS = 0.25
Reading = dict[str, float]  # clock_mhz (of the multiprocessors), watts, celsius


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


def reading() -> Reading | None:
    """The state of the GPU now; None where NVML does not tell it, as of a part of a GPU."""
    import pynvml

    try:
        return {
            "clock_mhz": pynvml.nvmlDeviceGetClockInfo(_gpu(), pynvml.NVML_CLOCK_SM),
            "watts": pynvml.nvmlDeviceGetPowerUsage(_gpu()) / 1e3,
            "celsius": pynvml.nvmlDeviceGetTemperature(_gpu(), pynvml.NVML_TEMPERATURE_GPU),
        }
    except pynvml.NVMLError:
        return None


@contextlib.contextmanager
def sampled(device: torch.device) -> Iterator[dict[str, float | None]]:
    """Reads the GPU's state four times a second while the code inside it runs, and once at its end;
    the result has the medians afterwards, or None where there is no NVML.
    """
    medians: dict[str, float | None] = dict.fromkeys(("clock_mhz", "watts", "celsius"))
    if device.type != "cuda" or torch.version.hip or not importlib.util.find_spec("pynvml"):
        yield medians
        return
    reading()  # The first call also starts NVML.
    readings: list[Reading | None] = []
    ended = threading.Event()

    def read_on() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            readings.append(reading())

    thread = threading.Thread(target=read_on)
    thread.start()
    try:
        yield medians
    finally:
        ended.set()
        thread.join()
    readings.append(reading())
    known = [state for state in readings if state]
    for name in medians:
        if known:
            medians[name] = median(state[name] for state in known)
