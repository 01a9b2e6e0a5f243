"""Measures the highest rates of this device, which it holds under load: matrix product, copy; and
the cost of one small operation, on the device and on the host.
"""

import time
from collections.abc import Callable
from statistics import median

from common import device as devices
from common.precision import Precision
from common.timing import benchmark, summarize
from tracepage.records.fields import Ceilings, HostCost

import torch

# A GPU at its power limit lowers its clock within a second or two.
LOAD_SECONDS = 3.0
TIMED_SECONDS = 2.0
HOST_CALLS = 300  # fewer than a stream's queue holds, so that no call waits for the GPU


def measure(device: torch.device, precision: Precision) -> Ceilings:
    """Times a large square GEMM in the run's precision, a large copy, and an addition of two single
    numbers.

    On a GPU the product and the copy are timed for TIMED_SECONDS after LOAD_SECONDS of the same.

    Returns:
        flops_per_second: 2 n^3 / time of an n x n x n product (n = 8192 on a GPU, 1024 or in 16
            bits 512 on a CPU), of a matrix with one that is stored transposed, as a linear layer's
            weight is: the fast order where 16 bits are emulated.
        bytes_per_second: bytes read plus bytes written, over the time of a copy of 1 GiB on a GPU,
            128 MiB on a CPU.
        operation_seconds: time per small operation when many follow each other: what it costs to
            launch one.
        precision: of the product: fp32, tf32, bf16 or fp16.
        load_seconds: how long product and copy ran before they were timed.
    """
    on_gpu = devices.is_gpu(device)
    fp32 = precision.name == "fp32"

    load = LOAD_SECONDS if on_gpu else 0.0

    def seconds(function: Callable[[], object], warmup: int, load: float = 0.0) -> float:
        if load:
            benchmark(function, device, warmup=warmup, iterations=1, seconds=load)
        timed = TIMED_SECONDS if load else 0.0
        times = benchmark(function, device, warmup=warmup, iterations=10, seconds=timed)
        return summarize(times)["median"] / 1e3

    size = 8192
    if not on_gpu:
        size = 1024 if fp32 else 512  # some CPUs emulate 16 bits
    a, b = (torch.randn(size, size, device=device, dtype=precision.dtype) for _ in range(2))
    gemm = seconds(lambda: a @ b.T, 3, load)

    source = torch.randn(2**28 if on_gpu else 2**25, device=device)  # 1 GiB or 128 MiB
    target = torch.empty_like(source)
    copy = seconds(lambda: target.copy_(source), 2, load)

    one = torch.ones(1, device=device)
    repeats = 200

    def many_small() -> None:
        for _ in range(repeats):
            one.add(one)

    small = seconds(many_small, 2)
    rounded = on_gpu and fp32 and torch.backends.cuda.matmul.allow_tf32
    return {
        "flops_per_second": 2 * size**3 / gemm,
        "bytes_per_second": 2 * source.numel() * source.element_size() / copy,
        "operation_seconds": small / repeats,
        "precision": "tf32" if rounded else precision.name,
        "load_seconds": load,
    }


def host_cost(device: torch.device) -> HostCost:
    """Microseconds that the host spends on a call, the median of HOST_CALLS that wait for nothing:
    a matrix product, and an operation of one kernel.
    """
    a = torch.ones(8, 8, device=device)
    out = torch.empty_like(a)

    def microseconds(function: Callable[[], object]) -> float:
        times = []
        devices.synchronize(device)
        for _ in range(HOST_CALLS):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        devices.synchronize(device)
        return 1e6 * median(times)

    return {
        "mm": microseconds(lambda: torch.mm(a, a, out=out)),
        "launch": microseconds(lambda: out.add_(1.0)),
    }
