"""What the lab, `profiling.py` and the experiments share: how often an operation is called, and
whether torch.compile works.
"""

import functools

from common import device as devices

import torch

# calls in every measurement of profiling.py
WARMUP = 3
ITERATIONS = 20


@functools.cache
def compile_runs_on(device: str) -> bool:
    """Whether torch.compile works on the device."""
    return devices.compile_problem(torch.device(device)) is None
