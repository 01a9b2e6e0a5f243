"""Problem 1 (bandwidth) of ../README.md: latency and bandwidth of a collective over the size of its message."""

from common.timing import benchmark, summarize

import numpy as np
import torch
import torch.distributed as dist

# Bus bandwidth over algorithm bandwidth, for n ranks (NCCL-tests, doc/PERFORMANCE.md).
FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
}


def bandwidths(collective: str, size: int, seconds: float, ranks: int) -> tuple[float, float]:
    """Algorithm and bus bandwidth in bytes/s of a collective over `size` bytes."""
    algorithm = size / seconds
    return algorithm, algorithm * FACTORS[collective](ranks)


def fit(sizes: list[int], seconds: list[float]) -> tuple[float, float]:
    """Latency in seconds and algorithm bandwidth in bytes/s of the line seconds = latency + size / bandwidth."""
    measured = np.array(seconds)
    columns = np.stack([1 / measured, np.array(sizes) / measured], axis=1)
    latency, per_byte = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)[0]
    return latency, 1 / per_byte


def all_reduce_seconds(size: int, device: torch.device, repeats: int) -> float:
    """Median seconds of an all-reduce of `size` bytes in float32, on the slowest rank; the same number on all ranks."""
    message = torch.zeros(size // 4, device=device)
    dist.barrier()
    times = benchmark(lambda: dist.all_reduce(message), device, iterations=repeats)
    slowest = torch.tensor(summarize(times)["median"] / 1000, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()
