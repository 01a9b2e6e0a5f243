"""The tools that `profiling.py` may use: constants, checks, inputs, the memory of a call, and what can run on this machine."""

import functools
import importlib.util
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from common import device as devices
from common.analysis.profiles import chrome_trace
from common.errors import UsageError
from common.precision import Precision
from common.records.fields import Ceilings
from common.training import ceilings

import torch
from torch import Tensor

LAB = Path(__file__).resolve().parent
FOLDERS = {"starter": LAB / "src", "solution": LAB / "solution"}  # of the two profiling.py
COMPONENTS = ("qkv_projection", "score_computation", "softmax", "weighted_sum", "output_projection")
CORE = COMPONENTS[1:4]  # the components that write or read a [B, H, S, S] matrix
OPTIMIZATIONS = {"baseline": 0, "compiled": 1, "sdpa": 2, "flash": 3}  # name: optimization level
WARMUP, ITERATIONS = 3, 20  # calls in every measurement of profiling.py
UNEXPLAINED = 0.1  # below this share of the measured time, neither FLOPs nor bytes explain it
MIB = 2**20

Shape = Sequence[int]
Shapes = Sequence[Shape] | Mapping[str, Shape] | Shape


@dataclass(frozen=True)
class ProfileResult:
    """The measured time and memory of one operation, and its work.

    Attributes:
        time_ms: time of one call.
        memory_mb: memory in MB (2^20 bytes) that a call adds at its peak; 0 where it is not known.
        flops: floating-point operations of one call.
        bytes_moved: minimum bytes that a call moves: it reads every input once and writes every output once.
    """

    name: str
    time_ms: float
    memory_mb: float = 0.0
    flops: int = 0
    bytes_moved: int = 0


# ------------------------------------------------------------------------------------------------------------------ checks


def select_device(name: str) -> torch.device:
    """The device of a name; `auto` is the GPU if there is one.

    Raises:
        ValueError: the name is unknown, or the device does not exist.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device must be auto, cpu or cuda (which is also AMD's ROCm), not {name!r}")
    return devices.select(name)


def check_arguments(args: object) -> None:
    """Raises ValueError unless the arguments of a call are a tuple or a list."""
    if not isinstance(args, tuple | list):
        raise UsageError(f"args must be a tuple, such as (x,), not a {type(args).__name__}")


def check_positive(**sizes: int) -> None:
    """Raises ValueError for the first size below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")


def head_dim(batch_size: int, seq_len: int, d_model: int, num_heads: int) -> int:
    """D / H.

    Raises:
        ValueError: a size is not positive, or d_model is not divisible by num_heads.
    """
    check_positive(batch_size=batch_size, seq_len=seq_len, d_model=d_model, num_heads=num_heads)
    if d_model % num_heads:
        raise UsageError(f"d_model {d_model} is not divisible by num_heads {num_heads}")
    return d_model // num_heads


def shape_list(shapes: Shapes) -> list[tuple[int, ...]]:
    """The shapes of a list, the values of a mapping from names to shapes, or one shape, as a list.

    Raises:
        ValueError: there is no shape, or a size is not a positive whole number.
    """
    found = list(shapes.values()) if isinstance(shapes, Mapping) else [shapes] if _is_shape(shapes) else shapes
    if not isinstance(found, tuple | list) or not found or not all(map(_is_shape, found)):
        raise UsageError(f"shapes must be positive sizes, such as (8, 16), [(8, 16), (16, 4)] or {{'A': (8, 16)}}, not {shapes}")
    return [tuple(map(int, shape)) for shape in found]


def _is_shape(value: object) -> bool:
    if not isinstance(value, tuple | list):
        return False
    return len(value) > 0 and all(isinstance(size, Integral) and int(size) > 0 for size in value)


# ------------------------------------------------------------------------------------------------------------------ inputs


def projection_inputs(device: torch.device, batch_size: int, seq_len: int, d_model: int) -> list[Tensor]:
    """x [B, S, D], and the weights [3 D, D] and [D, D], divided by sqrt(D) so that float16 does not overflow."""
    x, *weights = _random(device, (batch_size, seq_len, d_model), (3 * d_model, d_model), (d_model, d_model))
    return [x, *(weight / math.sqrt(d_model) for weight in weights)]


def attention_inputs(device: torch.device, batch: int, heads: int, seq_len: int, d_k: int) -> list[Tensor]:
    """q, k and v [B, H, S, dk].

    Raises:
        ValueError: a size is not positive.
    """
    check_positive(batch=batch, heads=heads, seq_len=seq_len, d_k=d_k)
    return _random(device, *[(batch, heads, seq_len, d_k)] * 3)


def _random(device: torch.device, *shapes: Shape) -> list[Tensor]:
    """Standard normal tensors, the same on every device; in float16 on a GPU, in float32 on a CPU."""
    dtype = torch.float16 if devices.is_gpu(device) else torch.float32
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).to(device, dtype) for shape in shapes]


def to_jax(tensor: Tensor) -> Any:
    """A copy of the tensor on JAX's device of the same kind."""
    import jax

    return jax.device_put(tensor.cpu().numpy(), jax.devices("gpu" if devices.is_gpu(tensor.device) else "cpu")[0])


# ---------------------------------------------------------------------------------------------------------------- profiles


def added_memory(fn: Callable[..., object], args: Sequence[Any], device: str) -> float:
    """MB that a function adds at its peak to what existed before.

    Of a PyTorch function: tensors. On a CPU the profiler's memory events give them, because the resident set also holds memory
    that the C library keeps. Of a jitted JAX function: what XLA plans, its results and buffers without scratch memory of the
    library kernels that it calls.
    """
    where = select_device(device)
    if hasattr(fn, "lower"):
        planned = fn.lower(*args).compile().memory_analysis()
        return float(planned.output_size_in_bytes + planned.temp_size_in_bytes) / MIB
    if not devices.is_gpu(where):
        recorded = trace(lambda: fn(*args), where, profile_memory=True)
        return float(recorded.memory.total_bytes.max()) / MIB  # counted from the beginning of the profile
    devices.synchronize(where)
    devices.reset_peak_memory(where)
    before = devices.peak_memory(where)["peak_mib"]  # right after a reset: the current memory
    fn(*args)
    devices.synchronize(where)
    return devices.peak_memory(where)["peak_mib"] - before


def trace(call: Callable[[], object], device: torch.device, calls: int = 1, **options: Any) -> chrome_trace.Trace:
    """The profiler's trace of `calls` calls, after one call that warms it up; with options of `torch.profiler.profile`."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise torch 2.12 and later print two lines for each profile
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] * devices.is_gpu(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        with torch.profiler.profile(
            activities=activities, schedule=torch.profiler.schedule(wait=0, warmup=1, active=calls, repeat=1), acc_events=True,
            on_trace_ready=lambda profile: profile.export_chrome_trace(str(path)), **options,
        ) as profile:  # fmt: skip
            for _ in range(1 + calls):
                call()
                profile.step()
        return chrome_trace.load(path)


# ------------------------------------------------------------------------------------------------ what this device can


@functools.cache
def peaks(device: torch.device) -> Ceilings:
    """The measured ceilings of the device, such as `flops_per_second` and `bytes_per_second`, in the inputs' number format."""
    return ceilings.measure(device, Precision(device, torch.float16 if devices.is_gpu(device) else None))


def has_flash_kernel(Q: Tensor, K: Tensor, V: Tensor) -> bool:
    """Whether PyTorch has a flash attention kernel for these tensors; its kernel for the CPU takes every floating-point dtype."""
    if not Q.is_cuda:
        return True
    inputs = torch.backends.cuda.SDPAParams(Q, K, V, None, 0.0, False, False)  # no mask, no dropout, not causal, no groups
    return torch.backends.cuda.can_use_flash_attention(inputs)


@functools.cache
def compile_runs_on(device: torch.device) -> bool:
    """Whether torch.compile works on the device."""
    return devices.compile_problem(device) is None


def jax_runs_on(device: torch.device) -> bool:
    """Whether JAX is installed and has this kind of device; it always has a CPU."""
    if importlib.util.find_spec("jax") is None:
        return False
    import jax

    return not devices.is_gpu(device) or jax.default_backend() == "gpu"
