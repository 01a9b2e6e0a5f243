"""The profiling lab, for you to fill in. README.md has the problems, in the order of this file.

Replace each `raise NotImplementedError` and run `pytest tests/` in the lab's folder. Python and
PyTorch are all that you need; lab.py makes the inputs. The attention here has no mask: every
position reads all others.

Shapes: B batch, S sequence, D model dimension (`d_model`), H heads, dk = D / H head dimension. One
MB is 2^20 bytes. Dtypes: float16 on a GPU, because its matrix units and flash attention need 16
bits, and float32 on a CPU.
"""

# ruff: noqa: F401  (imports for your code)

import functools
import itertools
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lab
import torch
import torch.nn.functional as F
from lab import DEVICE, ITERATIONS, WARMUP, MemoryUsage, ProfileResult
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def benchmark_function(
    fn: Callable[..., object],
    args: Sequence[Any] = (),
    warmup: int = WARMUP,
    iterations: int = ITERATIONS,
    sync: bool = True,
) -> float:
    """Seconds of a call `fn(*args)`: the median of `iterations` calls, after `warmup` calls that do
    not count.

    The time is that of the work: on a GPU the clock waits for the device, and it waits for the
    result of a JAX function.

    Args:
        sync: False waits for nothing: on a GPU this is the time to launch the work.
    """
    raise NotImplementedError("benchmark_function: problem 1 in README.md")


def measure_memory_usage(
    fn: Callable[..., object], args: Sequence[Any] = (), device: str = DEVICE
) -> MemoryUsage:
    """Peak, current and cached MB of a call `fn(*args)`. A first call is not measured.

    Peak and current memory are what the call adds to what is allocated before it: at its peak, and
    at its end while its result lives. Cached memory is all that the allocator holds of the device,
    and None on a CPU, whose memory it does not keep. `lab.jax_memory` measures a call with JAX
    arrays.

    Args:
        device: "cpu", where `lab.allocations` lists what a call allocates and frees, or "cuda".
    """
    raise NotImplementedError("measure_memory_usage: problem 2 in README.md")


def component_work(
    batch_size: int, seq_len: int, d_model: int, num_heads: int, element_size: int
) -> dict[str, tuple[int, int]]:
    """(FLOPs, bytes) of each component.

    A multiplication and an addition are two FLOPs, a division or an exponential is one. A softmax
    has five for each element: maximum, subtraction, exponential, sum, division. Bytes: every input
    is read once, every output is written once.

    Args:
        element_size: bytes of an element.
    """
    raise NotImplementedError("component_work: problem 3 in README.md")


def profile_attention_components(
    seq_len: int, d_model: int, num_heads: int, batch_size: int = 8, device: str = DEVICE
) -> list[ProfileResult]:
    """The five components of attention, each timed alone, in the order of `lab.COMPONENTS`, with
    memory and work.

    qkv_projection      x [B, S, D] @ W^T, W [3 D, D], split into contiguous q, k, v [B, H, S, dk]
    score_computation   q k^T / sqrt(dk) [B, H, S, S]
    softmax             over the last dimension
    weighted_sum        weights @ v [B, H, S, dk]
    output_projection   heads merged to [B, S, D], @ W^T, W [D, D]
    """
    raise NotImplementedError("profile_attention_components: problem 3 in README.md")


def identify_bottleneck(results: Sequence[ProfileResult]) -> tuple[str, float]:
    """The name of the result with the longest time, and its share of the total time in percent."""
    raise NotImplementedError("identify_bottleneck: problem 4 in README.md")


def classify_bound(result: ProfileResult, peak_flops: float, peak_bandwidth: float) -> str:
    """The limit on the time of a result: `compute`, `memory` or `launch`, which names the longest
    of three times.

    Args:
        peak_flops, peak_bandwidth: of the device, in FLOP/s and bytes/s.
    """
    raise NotImplementedError("classify_bound: problem 4 in README.md")


def generate_profile_report(
    results: Sequence[ProfileResult], peak_flops: float, peak_bandwidth: float
) -> str:
    """The report on the five components, as problem 4 shows it: a table with a total, the
    bottleneck, a recommendation.

    The recommendation depends on what limits the slowest component. `lab.CORE` are those that read
    or write scores.

    Args:
        peak_flops, peak_bandwidth: of the device, in FLOP/s and bytes/s.
    """
    raise NotImplementedError("generate_profile_report: problem 4 in README.md")


def attention_baseline(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(dk)) V, one operation after the other; all [B, H, S, dk]."""
    raise NotImplementedError("attention_baseline: problem 5 in README.md")


def optimize_attention(Q: Tensor, K: Tensor, V: Tensor, optimization_level: int) -> Tensor:
    """The same attention at every level.

    0   attention_baseline
    1   torch.compile of the baseline; the first call with new shapes compiles
    2   scaled_dot_product_attention: PyTorch chooses the kernel
    3   only flash attention (Dao et al. 2022, arXiv:2205.14135); if it has no kernel for these
        inputs (on a GPU for float32), a warning, and level 2
    """
    raise NotImplementedError("optimize_attention: problem 5 in README.md")


def compare_optimizations(
    batch: int, heads: int, seq_len: int, d_k: int, device: str = DEVICE
) -> dict[str, float]:
    """Milliseconds of one call without gradients: `baseline`, `sdpa`, and where they can run here
    `compiled` and `flash`.
    """
    raise NotImplementedError("compare_optimizations: problem 5 in README.md")


def attention_jax(Q: Any, K: Any, V: Any) -> Any:
    """attention_baseline as one jitted JAX function; JAX arrays [B, H, S, dk] in and out."""
    raise NotImplementedError("attention_jax: problem 6 in README.md")


def profile_attention_components_jax(
    seq_len: int, d_model: int, num_heads: int, batch_size: int = 8, device: str = DEVICE
) -> list[ProfileResult]:
    """The same five components, each a jitted JAX function, with the same inputs and the same
    clock; without memory.
    """
    raise NotImplementedError("profile_attention_components_jax: problem 6 in README.md")


def compare_frameworks(
    batch: int, heads: int, seq_len: int, d_k: int, device: str = DEVICE
) -> dict[str, float]:
    """Milliseconds of the same attention on the same inputs: `PyTorch eager`, `PyTorch compiled`,
    `JAX jit`.

    The dictionary leaves out what cannot run on this device: torch.compile without a compiler, JAX
    if it is not installed or has no such device.
    """
    raise NotImplementedError("compare_frameworks: problem 6 in README.md")


def attention_in_blocks(Q: Tensor, K: Tensor, V: Tensor, block_size: int = 128) -> Tensor:
    """attention_baseline for `block_size` queries at a time: the largest tensor has [B, H,
    block_size, S] scores.
    """
    raise NotImplementedError("attention_in_blocks: problem 7 in README.md")
