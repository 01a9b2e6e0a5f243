"""Problem 1 (bandwidth) of ../README.md: latency and bandwidth of a collective over the size of its message.

Replace each line that names its problem, and run `pytest test_exercises.py -k problem1` in the folder above. `benchmark` times a
function after a warm-up, in ms; `summarize` takes the median.
"""

from common.timing import benchmark, summarize  # noqa: F401  (for your code)

import numpy as np  # noqa: F401
import torch
import torch.distributed as dist  # noqa: F401


def bandwidths(collective: str, size: int, seconds: float, ranks: int) -> tuple[float, float]:
    """Algorithm and bus bandwidth in bytes/s of a collective over `size` bytes.

    Args:
        collective: all_reduce, reduce_scatter, all_gather or broadcast.
        size: bytes of the whole array: of the input of a reduce-scatter, of the output of an all-gather.
    """
    raise NotImplementedError("bandwidths: problem 1 of README.md")


def fit(sizes: list[int], seconds: list[float]) -> tuple[float, float]:
    """Latency in seconds and algorithm bandwidth in bytes/s of the line seconds = latency + size / bandwidth.

    The sum of the squared relative errors is smallest. With absolute errors the largest sizes would decide alone.
    """
    raise NotImplementedError("fit: problem 1 of README.md")


def all_reduce_seconds(size: int, device: torch.device, repeats: int) -> float:
    """Median seconds of an all-reduce of `size` bytes in float32, on the slowest rank; the same number on all ranks."""
    raise NotImplementedError("all_reduce_seconds: problem 1 of README.md")
