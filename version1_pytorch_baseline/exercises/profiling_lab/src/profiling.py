"""The profiling lab, for you to fill in. README.md has the problems, in the order of this file.

Replace each `raise NotImplementedError` and run `pytest tests/` in the lab's folder. You may use everything that this file
imports: lab.py belongs to the lab, and `common` is what the rest of this repository measures with. The attention here has no
mask: every position reads all others.

Shapes: B batch, S sequence, D model dimension (`d_model`), H heads, dk = D / H head dimension. One MB is 2^20 bytes.
Dtypes: float16 on a GPU, because its matrix units and flash attention need 16 bits, and float32 on a CPU.
"""

# ruff: noqa: F401  (imports for your code)

import functools
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from common import device as devices
from common.analysis.formulas import operators
from common.analysis.output import tables
from common.timing import benchmark, summarize

import lab
import torch
import torch.nn.functional as F
from lab import ITERATIONS, WARMUP, ProfileResult
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# ---------------------------------------------------------------------------------------------------------------- problem 1: time


def benchmark_function(
    fn: Callable[..., object], args: Sequence[Any] = (), warmup: int = WARMUP, iterations: int = ITERATIONS, sync: bool = True
) -> float:
    """Seconds of a call `fn(*args)`: the median of `iterations` calls, after `warmup` calls that do not count.

    On a GPU, a device event before and after each call gives its time, and nothing waits inside the timed region. An idle GPU
    reaches an event immediately, so the time of work on the CPU is right too. The clock waits for the result of a JAX function.

    Args:
        sync: False measures the time of the host only: on a GPU, the time to launch the work.

    Raises:
        ValueError: iterations is not positive, or warmup is negative.
    """
    raise NotImplementedError("benchmark_function: problem 1 in README.md")


# -------------------------------------------------------------------------------------------------------------- problem 2: memory


def measure_memory_usage(fn: Callable[..., object], args: Sequence[Any] = (), device: str = "auto") -> dict[str, float]:
    """Memory of one call, in MB.

    Returns:
        peak_memory_mb: the most that was allocated at once during the call, including what was allocated before it.
        current_memory_mb: allocated after the call, while its result still exists.
        cached_memory_mb: reserved by the allocator from the device, in use or not.

        The GPU's allocator gives these; they are 0 on a CPU. There the dictionary also has resident_peak_mb: the peak of the
        process's resident set, which includes the interpreter, the libraries, and memory that the C library keeps.

    Raises:
        ValueError: the device does not exist.
    """
    raise NotImplementedError("measure_memory_usage: problem 2 in README.md")


# ----------------------------------------------------------------------------------------- problem 3: the components of attention


def profile_attention_components(
    seq_len: int, d_model: int, num_heads: int, batch_size: int = 8, device: str = "auto"
) -> list[ProfileResult]:
    """The five components of attention, each timed alone, in the order of `lab.COMPONENTS`.

        qkv_projection      x [B, S, D] @ W^T, W [3 D, D], then split into q, k, v [B, H, S, dk], contiguous
        score_computation   q k^T / sqrt(dk) [B, H, S, S]
        softmax             over the last dimension
        weighted_sum        weights @ v [B, H, S, dk]
        output_projection   heads merged to [B, S, D], @ W^T, W [D, D]

    `component_work` gives the FLOPs and bytes, `lab.added_memory` the memory.

    Raises:
        ValueError: a size is not positive, d_model is not divisible by num_heads, or the device does not exist.
    """
    raise NotImplementedError("profile_attention_components: problem 3 in README.md")


def component_work(batch_size: int, seq_len: int, d_model: int, num_heads: int, element_size: int) -> dict[str, tuple[int, int]]:
    """(FLOPs, bytes) of each component.

    A multiplication and an addition are two FLOPs, a division or an exponential is one. A softmax has five for each element:
    maximum, subtraction, exponential, sum, division. Bytes: every input is read once, every output is written once.

    Args:
        element_size: bytes of an element.
    """
    raise NotImplementedError("component_work: problem 3 in README.md")


# ------------------------------------------------------------------------------------------------------ problem 4: the bottleneck


def identify_bottleneck(results: Sequence[ProfileResult]) -> tuple[str, float]:
    """The name of the result with the longest time, and its share of the total time in percent.

    Raises:
        ValueError: there are no results, or their times add up to 0.
    """
    raise NotImplementedError("identify_bottleneck: problem 4 in README.md")


def classify_bound(result: ProfileResult, peak_flops: float, peak_bandwidth: float) -> str:
    """The limit on the time of a result: `compute`, `memory` or `launch`.

    The larger of FLOPs / peak_flops and bytes / peak_bandwidth is the minimum time of the operation, and names its bound. If that
    is less than a tenth of the measured time, the bound is `launch`: launches, Python or waiting took the time, or the operation
    is badly written.

    Args:
        peak_flops, peak_bandwidth: of the device, in FLOP/s and bytes/s; measured ones, from `common.training.ceilings`.

    Raises:
        ValueError: a peak is not positive.
    """
    raise NotImplementedError("classify_bound: problem 4 in README.md")


def generate_profile_report(seq_len: int, d_model: int, num_heads: int, device: str = "auto") -> str:
    """A title, a text table of the components with their total, the one with the longest time, and a recommendation.

    Returns:
        A title `Components of attention: S .., D .., H .., DEVICE`; a table with a row `name  ms  % of total  bound` for each
        component (classify_bound, with `lab.peaks`) and a last row `total`; a line `Bottleneck: NAME, P % of T ms,
        BOUND-bound`; and a line `Recommendation: ...` with the largest possible gain: 1 / (1 - p) for a change to a share p of
        the time (Amdahl's law).

    Raises:
        ValueError: as profile_attention_components.
    """
    raise NotImplementedError("generate_profile_report: problem 4 in README.md")


# ------------------------------------------------------------------------------------------------ problem 5: arithmetic intensity


def compute_arithmetic_intensity(op: str, shapes: lab.Shapes) -> float:
    """FLOPs per byte that has to move, with 2 bytes per element (float16 or bfloat16).

    Args:
        op: `matmul`, `softmax`, `layernorm` or `gelu`; the last three along the last dimension.
        shapes: of the inputs, in their order: a list of shapes, a mapping of names to shapes, or the one shape itself. For matmul
            [(m, k), (k, n)], or with the same leading dimensions, such as {"A": (b, m, k), "B": (b, k, n)}; otherwise (..., n).

    Raises:
        ValueError: the operation is unknown, or the shapes do not fit it.
    """
    raise NotImplementedError("compute_arithmetic_intensity: problem 5 in README.md")


# ---------------------------------------------------------------------------------------------------- problem 6: faster attention


def attention_baseline(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(dk)) V, one operation after the other.

    Args:
        Q, K, V: [B, H, S, dk].

    Returns:
        [B, H, S, dk].
    """
    raise NotImplementedError("attention_baseline: problem 6 in README.md")


def optimize_attention(Q: Tensor, K: Tensor, V: Tensor, optimization_level: int) -> Tensor:
    """The same attention at every level.

        0   attention_baseline
        1   torch.compile of the baseline; the first call with new shapes compiles
        2   scaled_dot_product_attention: PyTorch chooses the kernel
        3   only flash attention (Dao et al. 2022, arXiv:2205.14135); if it has no kernel for these inputs (on a GPU for
            float32), a warning, and level 2

    Args:
        Q, K, V: [B, H, S, dk].

    Returns:
        [B, H, S, dk].

    Raises:
        ValueError: there is no such level.
    """
    raise NotImplementedError("optimize_attention: problem 6 in README.md")


attention_optimized = optimize_attention


def compare_optimizations(batch: int, heads: int, seq_len: int, d_k: int, device: str = "auto") -> dict[str, float]:
    """Milliseconds of one call without gradients: `baseline`, `sdpa`, and where they can run here `compiled` and `flash`.

    Raises:
        ValueError: a size is not positive, or the device does not exist.
    """
    raise NotImplementedError("compare_optimizations: problem 6 in README.md")


# ----------------------------------------------------------------------------------------------------------------- problem 7: JAX


def attention_jax(Q: Any, K: Any, V: Any) -> Any:
    """attention_baseline as one jitted JAX function; JAX arrays [B, H, S, dk] in and out."""
    raise NotImplementedError("attention_jax: problem 7 in README.md")


def profile_attention_components_jax(
    seq_len: int, d_model: int, num_heads: int, batch_size: int = 8, device: str = "auto"
) -> list[ProfileResult]:
    """The same five components, each a jitted JAX function, with the same inputs and the same clock.

    The memory is what XLA plans (`lab.added_memory`).

    Raises:
        ValueError: as profile_attention_components, or JAX has no such device.
        ImportError: JAX is not installed.
    """
    raise NotImplementedError("profile_attention_components_jax: problem 7 in README.md")


def compare_frameworks(batch: int, heads: int, seq_len: int, d_k: int, device: str = "auto") -> dict[str, float]:
    """Milliseconds of the same attention on the same inputs: `PyTorch eager`, `PyTorch compiled`, `JAX jit`.

    The dictionary leaves out what cannot run on this device: torch.compile without a compiler, JAX if it is not installed or has
    no such device.

    Raises:
        ValueError: a size is not positive, or the device does not exist.
    """
    raise NotImplementedError("compare_frameworks: problem 7 in README.md")


# -------------------------------------------------------------------------------------------- problem 8: attention in less memory


def attention_chunked(Q: Tensor, K: Tensor, V: Tensor, chunk_size: int = 128) -> Tensor:
    """attention_baseline, exact, with scores [B, H, S, C] for a chunk of C keys in memory instead of [B, H, S, S].

    An online softmax goes from chunk to chunk (Milakov and Gimelshein 2018, arXiv:1805.02867; Rabe and Staats 2021,
    arXiv:2112.05682). Over the chunks so far, m is the largest score, l the sum of exp(score - m), and o the sum of
    exp(score - m) v. A chunk that raises m to m' scales l and o by exp(m - m') before it adds its own terms. The result is o / l.

    Args:
        Q, K, V: [B, H, S, dk].
        chunk_size: C.

    Returns:
        [B, H, S, dk].

    Raises:
        ValueError: chunk_size is not positive.
    """
    raise NotImplementedError("attention_chunked: problem 8 in README.md")


def memory_curve(
    seq_lens: Sequence[int], batch: int = 1, heads: int = 8, d_k: int = 64, chunk_size: int = 128, device: str = "auto"
) -> list[dict[str, float]]:
    """The memory that a call adds at its peak (`lab.added_memory`), for each sequence length.

    Returns:
        A dictionary `seq_len`, `baseline`, `chunked`, `sdpa` for each length, the last three in MB.

    Raises:
        ValueError: a size is not positive, or the device does not exist.
    """
    raise NotImplementedError("memory_curve: problem 8 in README.md")
