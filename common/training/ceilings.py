"""Measures the highest rates of this device: matrix product, copy, and the cost of one small
operation.
"""

from collections.abc import Callable

from common import device as devices
from common.precision import Precision
from common.timing import benchmark, summarize
from tracepage.records.fields import Ceilings

import torch


def measure(device: torch.device, precision: Precision) -> Ceilings:
    """Times a large square GEMM in the run's precision, a large copy, and an addition of two single
    numbers.

    Returns:
        flops_per_second: 2 n^3 / time of an n x n x n product (n = 8192 on a GPU, 1024 or in 16
            bits 512 on a CPU), of a matrix with one that is stored transposed, as a linear layer's
            weight is: the fast order where 16 bits are emulated.
        bytes_per_second: bytes read plus bytes written, over the time of a copy of 1 GiB on a GPU,
            128 MiB on a CPU.
        operation_seconds: time per small operation when many follow each other: what it costs to
            launch one.
        precision: of the product: fp32, tf32, bf16 or fp16.
    """
    on_gpu = devices.is_gpu(device)
    fp32 = precision.name == "fp32"

    def seconds(function: Callable[[], object], warmup: int) -> float:
        times = benchmark(function, device, warmup=warmup, iterations=10)
        return summarize(times)["median"] / 1e3

    size = 8192
    if not on_gpu:
        size = 1024 if fp32 else 512  # some CPUs emulate 16 bits
    a, b = (torch.randn(size, size, device=device, dtype=precision.dtype) for _ in range(2))
    gemm = seconds(lambda: a @ b.T, warmup=3)

    source = torch.randn(2**28 if on_gpu else 2**25, device=device)  # 1 GiB or 128 MiB
    target = torch.empty_like(source)
    copy = seconds(lambda: target.copy_(source), warmup=2)

    one = torch.ones(1, device=device)
    repeats = 200

    def many_small() -> None:
        for _ in range(repeats):
            one.add(one)

    small = seconds(many_small, warmup=2)
    rounded = on_gpu and fp32 and torch.backends.cuda.matmul.allow_tf32
    return {
        "flops_per_second": 2 * size**3 / gemm,
        "bytes_per_second": 2 * source.numel() * source.element_size() / copy,
        "operation_seconds": small / repeats,
        "precision": "tf32" if rounded else precision.name,
    }
