"""The profiling lab, to be filled in: README.md has the problems, in the order of this file.

Replace each `raise NotImplementedError` and run `pytest tests/` in the lab's folder. What stands below "given" is there for you
to use, and so are the imports: what they name measures in the rest of this repository. The attention here has no mask: every
position reads all others.

Shapes: B batch, S sequence, D model dimension (`d_model`), H heads, dk = D / H head dimension. One MB is 2^20 bytes.
Formats: float16 on a GPU (its matrix units and flash attention want 16 bits), float32 on a CPU.
"""

# ruff: noqa: F401  (imports for what is still to be written)

import functools
import importlib.util
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import device as devices
from common.analysis.formulas import operators
from common.analysis.output import tables
from common.analysis.profiles import chrome_trace
from common.errors import UsageError
from common.timing import benchmark, summarize

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

COMPONENTS = ("qkv_projection", "score_computation", "softmax", "weighted_sum", "output_projection")
CORE = COMPONENTS[1:4]  # what makes, reads or writes a [B, H, S, S] matrix
OPTIMIZATIONS = {"baseline": 0, "sdpa": 1, "compiled": 2, "flash": 3}  # name: optimization level
WARMUP, ITERATIONS = 3, 20  # calls of every measurement in this file
UNEXPLAINED = 0.1  # below this share of both roofs, neither computing nor moving data explains the time
MIB = 2**20


# ---------------------------------------------------------------------------------------------------------------- problem 1: time


@dataclass(frozen=True)
class ProfileResult:
    """What was measured of one operation, and what it has to do.

    Attributes:
        time_ms: of one call.
        memory_mb: that a call needs at its peak on top of what was allocated before; 0 where that is not known.
        flops: floating-point operations of one call.
        bytes_moved: the least that a call has to move: every input read once, every output written once.
    """

    name: str
    time_ms: float
    memory_mb: float = 0.0
    flops: int = 0
    bytes_moved: int = 0


def benchmark_function(
    fn: Callable[..., object], args: Sequence[Any] = (), warmup: int = WARMUP, iterations: int = ITERATIONS, sync: bool = True
) -> float:
    """Seconds that a call `fn(*args)` takes: the median of `iterations` calls, after `warmup` calls that do not count.

    On a GPU a call lies between two device events, and nothing waits inside the timed region. An idle GPU reaches an event
    when it is made, so the time of work on the CPU comes out right too. A JAX result is waited for.

    Args:
        sync: False takes the host's time alone: on a GPU, how long it takes to ask for the work.

    Raises:
        ValueError: `args` is no tuple or list, iterations is not positive, or warmup is negative.
    """
    raise NotImplementedError("benchmark_function: problem 1 in README.md")


# -------------------------------------------------------------------------------------------------------------- problem 2: memory


def measure_memory_usage(fn: Callable[..., object], args: Sequence[Any] = (), device: str = "auto") -> dict[str, float]:
    """Memory of one call, in MB.

    Returns:
        peak_memory_mb: most that was allocated at once during the call, with what was there before.
        current_memory_mb: allocated when the call is over and its result still held.
        cached_memory_mb: what the allocator has reserved from the device, in use or not.

        These are of the GPU's allocator, and 0 on a CPU. There is then one key more, resident_peak_mb: peak of the process's
        resident set, with the interpreter, libraries and whatever the C library has not given back.

    Raises:
        ValueError: `args` is no tuple or list, or the device is not there.
    """
    raise NotImplementedError("measure_memory_usage: problem 2 in README.md")


# ----------------------------------------------------------------------------------------- problem 3: the components of attention


def profile_attention_components(
    seq_len: int, d_model: int, num_heads: int, batch_size: int = 8, device: str = "auto"
) -> list[ProfileResult]:
    """Attention in five parts, each timed alone, in the order of COMPONENTS.

        qkv_projection      x [B, S, D] @ W^T, W [3 D, D], then split into q, k, v [B, H, S, dk], contiguous
        score_computation   q k^T / sqrt(dk) [B, H, S, S]
        softmax             over the last dimension
        weighted_sum        weights @ v [B, H, S, dk]
        output_projection   heads merged to [B, S, D], @ W^T, W [D, D]

    FLOPs and bytes are those of `component_work`, memory is that of `added_memory`.

    Raises:
        ValueError: a size is not positive, d_model is not divisible by num_heads, or the device is not there.
    """
    raise NotImplementedError("profile_attention_components: problem 3 in README.md")


def component_work(batch_size: int, seq_len: int, d_model: int, num_heads: int, element_size: int) -> dict[str, tuple[int, int]]:
    """(FLOPs, bytes) of each component.

    A multiplication and an addition are two FLOPs, a division and an exponential one; a softmax has five for each element:
    maximum, subtraction, exponential, sum, division. Bytes: every input read once, every output written once.
    """
    raise NotImplementedError("component_work: problem 3 in README.md")


# ---------------------------------------------------------------------------------------- problem 4: what takes the time, and why


def identify_bottleneck(results: Sequence[ProfileResult]) -> tuple[str, float]:
    """Name of the result that takes longest, and its time in percent of the total.

    Raises:
        ValueError: there are no results, or their times add up to 0.
    """
    raise NotImplementedError("identify_bottleneck: problem 4 in README.md")


def classify_bound(result: ProfileResult, peak_flops: float, peak_bandwidth: float) -> str:
    """What sets the time of a result: `compute`, `memory` or `launch`.

    The larger of FLOPs / peak_flops and bytes / peak_bandwidth is the time that the operation takes at least, and names what
    binds it. Where that is less than a tenth of the measured time, neither does: the time went into launching, Python or
    waiting, or the operation is badly written.

    Args:
        peak_flops, peak_bandwidth: of the device, in FLOP/s and bytes/s; measured ones, from `common.training.ceilings`.

    Raises:
        ValueError: a peak is not positive.
    """
    raise NotImplementedError("classify_bound: problem 4 in README.md")


def generate_profile_report(seq_len: int, d_model: int, num_heads: int, device: str = "auto") -> str:
    """The components as a text table, then what takes longest and what could be done about it.

    Returns:
        A table with a row `name  ms  % of total` for each component, a line `Bottleneck: NAME, P % of T ms` and a line
        `Recommendation: ...` with the most that it can gain: where a share p of the time is touched, 1 / (1 - p) (Amdahl's law).

    Raises:
        ValueError: as profile_attention_components.
    """
    raise NotImplementedError("generate_profile_report: problem 4 in README.md")


# ------------------------------------------------------------------------------------------------ problem 5: arithmetic intensity


def compute_arithmetic_intensity(op: str, shapes: Sequence[Sequence[int]]) -> float:
    """FLOPs for each byte that has to move, with 2 bytes an element (float16 or bfloat16).

    Args:
        op: `matmul`, `softmax`, `layernorm` or `gelu`; the last three along the last dimension.
        shapes: of the inputs: [(m, k), (k, n)] or with the same leading dimensions for matmul, else [(..., n)].

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
    """The same result at every level.

        0   attention_baseline
        1   scaled_dot_product_attention: PyTorch chooses the kernel
        2   torch.compile of the baseline; the first call with new shapes compiles
        3   flash attention (Dao et al. 2022, arXiv:2205.14135) and no other kernel; where there is none for these inputs
            (on a GPU for float32), a warning, and level 1

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
        ValueError: a size is not positive, or the device is not there.
    """
    raise NotImplementedError("compare_optimizations: problem 6 in README.md")


# ----------------------------------------------------------------------------------------------------------------- problem 7: JAX


def attention_jax(Q: Any, K: Any, V: Any) -> Any:
    """attention_baseline as one jitted JAX function; JAX arrays [B, H, S, dk] in and out."""
    raise NotImplementedError("attention_jax: problem 7 in README.md")


def profile_attention_components_jax(
    seq_len: int, d_model: int, num_heads: int, batch_size: int = 8, device: str = "auto"
) -> list[ProfileResult]:
    """The same five components, each a jitted JAX function, on the same inputs and by the same clock.

    Raises:
        ValueError: as profile_attention_components, or JAX has no such device.
        ImportError: JAX is not installed.
    """
    raise NotImplementedError("profile_attention_components_jax: problem 7 in README.md")


def compare_frameworks(batch: int, heads: int, seq_len: int, d_k: int, device: str = "auto") -> dict[str, float]:
    """Milliseconds of the same attention on the same inputs: `PyTorch eager`, `PyTorch compiled`, `JAX jit`.

    What cannot run on this device is left out: torch.compile without a compiler, JAX where it is missing or has no such device.

    Raises:
        ValueError: a size is not positive, or the device is not there.
    """
    raise NotImplementedError("compare_frameworks: problem 7 in README.md")


# -------------------------------------------------------------------------------------------- problem 8: attention in less memory


def attention_chunked(Q: Tensor, K: Tensor, V: Tensor, chunk_size: int = 128) -> Tensor:
    """attention_baseline, exact, holding scores [B, H, S, C] for a chunk of C keys instead of [B, H, S, S].

    The softmax of a row is kept up to date from chunk to chunk (Milakov and Gimelshein 2018, arXiv:1805.02867; Rabe and Staats
    2021, arXiv:2112.05682). For the chunks so far let m be the largest score, l the sum of exp(score - m) and o the sum of
    exp(score - m) v. A chunk that raises m to m' scales l and o by exp(m - m') before its own terms are added; at the end the
    result is o / l.

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
    """What a call adds at its peak (`added_memory`), for each sequence length.

    Returns:
        A dictionary `seq_len`, `baseline`, `chunked`, `sdpa` for each length, the last three in MB.

    Raises:
        ValueError: a size is not positive, or the device is not there.
    """
    raise NotImplementedError("memory_curve: problem 8 in README.md")


# -------------------------------------------------------------------------------------------------------------------------- given


def _device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device must be auto, cpu or cuda (which is also AMD's ROCm), not {name!r}")
    return devices.select(name)


def _positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")


def _head_dim(batch_size: int, seq_len: int, d_model: int, num_heads: int) -> int:
    _positive(batch_size=batch_size, seq_len=seq_len, d_model=d_model, num_heads=num_heads)
    if d_model % num_heads:
        raise UsageError(f"d_model {d_model} is not divisible by num_heads {num_heads}")
    return d_model // num_heads


def _inputs(device: torch.device, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Standard normal tensors, the same on every device; in float16 on a GPU, in float32 on a CPU."""
    dtype = torch.float16 if devices.is_gpu(device) else torch.float32
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(*shape, generator=generator).to(device, dtype) for shape in shapes)


def added_memory(fn: Callable[..., object], args: Sequence[Any], device: str) -> float:
    """MB of tensors that a PyTorch function adds at its peak to those that were there before, exact on GPU and CPU.

    On a CPU the profiler's memory events say it: its resident set would also hold what the C library keeps of earlier calls.
    """
    where = _device(device)
    if devices.is_gpu(where):
        devices.synchronize(where)
        devices.reset_peak_memory(where)
        before = devices.peak_memory(where)["peak_mib"]  # right after a reset: what there is now
        fn(*args)
        devices.synchronize(where)
        return devices.peak_memory(where)["peak_mib"] - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or torch 2.12 and later print two lines for each profile
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        fn(*args)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        return float(chrome_trace.load(path).memory.total_bytes.max()) / MIB  # counted from the profile's beginning


def _flash_takes(Q: Tensor, K: Tensor, V: Tensor) -> bool:
    """Whether there is a flash kernel for these; PyTorch's kernel for the CPU takes every floating-point format."""
    if not Q.is_cuda:
        return True
    inputs = torch.backends.cuda.SDPAParams(Q, K, V, None, 0.0, False, False)  # no mask, no dropout, not causal, no groups
    return torch.backends.cuda.can_use_flash_attention(inputs)


@functools.cache
def _compile_problem(kind: str) -> str | None:
    """Why torch.compile does not work on a kind of device; None if it does."""
    from common.device import compile_problem

    return compile_problem(torch.device(kind))


def _jax_runs_on(device: torch.device) -> bool:
    """Whether JAX is installed and has this kind of device; it always has a CPU."""
    if importlib.util.find_spec("jax") is None:
        return False
    import jax

    return not devices.is_gpu(device) or jax.default_backend() == "gpu"


def _to_jax(tensor: Tensor) -> Any:
    """A copy on JAX's device of the tensor's kind."""
    import jax

    return jax.device_put(tensor.cpu().numpy(), jax.devices("gpu" if devices.is_gpu(tensor.device) else "cpu")[0])
