"""The profiling lab, solved: how long, how much memory, what binds it, what helps.

Clock, memory and lower bounds are those of `common`, so that the lab and the versions measure alike. The attention here has
no mask: every position reads all others.

Shapes: B batch, S sequence, D model dimension (`d_model`), H heads, dk = D / H head dimension. One MB is 2^20 bytes.
Formats: float16 on a GPU (its matrix units and flash attention want 16 bits), float32 on a CPU.
"""

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
    _check_arguments(args)

    def call() -> None:
        result = fn(*args)
        if sync and "jax" in sys.modules and not isinstance(result, Tensor):  # who returns JAX arrays has imported it
            sys.modules["jax"].block_until_ready(result)

    device = devices.select("auto" if sync else "cpu")
    return summarize(benchmark(call, device, warmup, iterations))["median"] / 1e3


def _check_arguments(args: object) -> None:
    if not isinstance(args, tuple | list):
        raise UsageError(f"args must be a tuple, such as (x,), not a {type(args).__name__}")


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
    _check_arguments(args)
    where = _device(device)
    devices.synchronize(where)
    devices.reset_peak_memory(where)
    result = fn(*args)
    devices.synchronize(where)
    peak = devices.peak_memory(where)["peak_mib"]
    names = ("peak_memory_mb", "current_memory_mb", "cached_memory_mb")
    if not devices.is_gpu(where):
        return dict.fromkeys(names, 0.0) | {"resident_peak_mb": peak}
    current, cached = torch.cuda.memory_allocated(where) / MIB, torch.cuda.memory_reserved(where) / MIB
    del result  # held until here, so that it counts
    return dict(zip(names, (peak, current, cached), strict=True))


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
    where, d_k = _device(device), _head_dim(batch_size, seq_len, d_model, num_heads)
    x, w_qkv, w_out = _inputs(where, (batch_size, seq_len, d_model), (3 * d_model, d_model), (d_model, d_model))
    w_qkv, w_out = w_qkv / math.sqrt(d_model), w_out / math.sqrt(d_model)  # keeps float16 in its range

    def qkv_projection(x: Tensor) -> list[Tensor]:
        parts = F.linear(x, w_qkv).chunk(3, dim=-1)  # 3 x [B, S, D]
        return [part.unflatten(-1, (num_heads, d_k)).transpose(1, 2).contiguous() for part in parts]  # 3 x [B, H, S, dk]

    def scores_of(q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) / math.sqrt(d_k)

    def output_projection(context: Tensor) -> Tensor:
        return F.linear(context.transpose(1, 2).flatten(2), w_out)

    with torch.no_grad():
        q, k, v = qkv_projection(x)
        scores = scores_of(q, k)
        weights = scores.softmax(dim=-1)
        calls = [
            (qkv_projection, (x,)), (scores_of, (q, k)), (functools.partial(torch.softmax, dim=-1), (scores,)),
            (torch.matmul, (weights, v)), (output_projection, (weights @ v,)),
        ]  # fmt: skip
        work = component_work(batch_size, seq_len, d_model, num_heads, x.element_size())
        results = []
        for name, (fn, args) in zip(COMPONENTS, calls, strict=True):
            seconds = benchmark_function(fn, args)
            results.append(ProfileResult(name, 1e3 * seconds, added_memory(fn, args, where.type), *work[name]))
    return results


def component_work(batch_size: int, seq_len: int, d_model: int, num_heads: int, element_size: int) -> dict[str, tuple[int, int]]:
    """(FLOPs, bytes) of each component.

    A multiplication and an addition are two FLOPs, a division and an exponential one; a softmax has five for each element:
    maximum, subtraction, exponential, sum, division. Bytes: every input read once, every output written once.
    """
    tokens = batch_size * seq_len
    n, scores, square = tokens * d_model, num_heads * tokens * seq_len, d_model**2  # elements
    product = 2 * n * seq_len  # FLOPs of q k^T, and of weights @ v
    work = {
        "qkv_projection": (6 * n * d_model, n + 3 * square + 3 * n),
        "score_computation": (product + scores, 2 * n + scores),
        "softmax": (5 * scores, 2 * scores),
        "weighted_sum": (product, scores + 2 * n),
        "output_projection": (2 * n * d_model, n + square + n),
    }
    return {name: (flops, element_size * elements) for name, (flops, elements) in work.items()}


# ---------------------------------------------------------------------------------------- problem 4: what takes the time, and why


def identify_bottleneck(results: Sequence[ProfileResult]) -> tuple[str, float]:
    """Name of the result that takes longest, and its time in percent of the total.

    Raises:
        ValueError: there are no results, or their times add up to 0.
    """
    total = sum(result.time_ms for result in results)
    if total <= 0:
        raise UsageError("no bottleneck without measured times: results is empty, or its times add up to 0")
    longest = max(results, key=lambda result: result.time_ms)
    return longest.name, 100 * longest.time_ms / total


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
    if peak_flops <= 0 or peak_bandwidth <= 0:
        raise UsageError(f"peaks must be positive, in FLOP/s and bytes/s, not {peak_flops} and {peak_bandwidth}")
    least = UNEXPLAINED * result.time_ms / 1e3
    ceilings = {"flops_per_second": peak_flops, "bytes_per_second": peak_bandwidth, "operation_seconds": least}
    return operators.bound(result.flops, result.bytes_moved, ceilings)[1]


def generate_profile_report(seq_len: int, d_model: int, num_heads: int, device: str = "auto") -> str:
    """The components as a text table, then what takes longest and what could be done about it.

    Returns:
        A table with a row `name  ms  % of total` for each component, a line `Bottleneck: NAME, P % of T ms` and a line
        `Recommendation: ...` with the most that it can gain: where a share p of the time is touched, 1 / (1 - p) (Amdahl's law).

    Raises:
        ValueError: as profile_attention_components.
    """
    results = profile_attention_components(seq_len, d_model, num_heads, device=device)
    total = sum(result.time_ms for result in results)
    name, percent = identify_bottleneck(results)
    rows = [[result.name, result.time_ms, 100 * result.time_ms / total] for result in results]
    return "\n".join([
        tables.text(["component", "time ms", "% of total"], rows),
        "",
        f"Bottleneck: {name}, {percent:.1f} % of {tables.figure(total)} ms",
        f"Recommendation: {_recommendation(results)}",
    ])  # fmt: skip


def _recommendation(results: Sequence[ProfileResult]) -> str:
    """For the larger of the two groups that one change can touch: what works on [S, S] matrices, and the projections."""
    total = sum(result.time_ms for result in results)
    core = sum(result.time_ms for result in results if result.name in CORE) / total
    if core >= 0.5:
        change, share = f"make {', '.join(CORE)} one kernel (optimization level 1 or 3)", core
    else:
        change, share = "compute the two projections in a cheaper format, or launch less (torch.compile)", 1 - core
    return f"{change}. That touches {100 * share:.1f} % of the time: at most {1 / (1 - share):.2f} times as fast."


# ------------------------------------------------------------------------------------------------ problem 5: arithmetic intensity


def compute_arithmetic_intensity(op: str, shapes: Sequence[Sequence[int]]) -> float:
    """FLOPs for each byte that has to move, with 2 bytes an element (float16 or bfloat16).

    Args:
        op: `matmul`, `softmax`, `layernorm` or `gelu`; the last three along the last dimension.
        shapes: of the inputs: [(m, k), (k, n)] or with the same leading dimensions for matmul, else [(..., n)].

    Raises:
        ValueError: the operation is unknown, or the shapes do not fit it.
    """
    # FLOPs for each element, and for each row. The derivations are in README.md.
    per_element = {"softmax": (5, 0), "layernorm": (7, 4), "gelu": (5, 0)}
    if op != "matmul" and op not in per_element:
        raise UsageError(f"unknown operation {op!r}; there are matmul, {', '.join(per_element)}")
    if not shapes or not all(shape and min(shape) > 0 for shape in shapes):
        raise UsageError(f"shapes must be a list of shapes with positive sizes, such as [(8, 16)], not {shapes}")
    if op == "matmul":
        fits = len(shapes) == 2 and all(len(shape) >= 2 for shape in shapes)
        if not fits or shapes[0][-1] != shapes[1][-2] or tuple(shapes[0][:-2]) != tuple(shapes[1][:-2]):
            raise UsageError(f"matmul takes [(..., m, k), (..., k, n)], not {shapes}")
        flops, read, written = operators.matrix_product("bmm", shapes)
        return flops / (2 * (read + written))
    if len(shapes) != 1:
        raise UsageError(f"{op} takes one shape, not {len(shapes)}")
    elements, columns = math.prod(shapes[0]), shapes[0][-1]
    by_element, by_row = per_element[op]
    flops = by_element * elements + by_row * elements // columns
    parameters = 2 * columns if op == "layernorm" else 0  # weight and bias
    return flops / (2 * (2 * elements + parameters))


# ---------------------------------------------------------------------------------------------------- problem 6: faster attention


def attention_baseline(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(dk)) V, one operation after the other.

    Args:
        Q, K, V: [B, H, S, dk].

    Returns:
        [B, H, S, dk].
    """
    scores = Q @ K.transpose(-2, -1) / math.sqrt(Q.shape[-1])  # [B, H, S, S]
    return scores.softmax(dim=-1) @ V


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
    if optimization_level == 0:
        return attention_baseline(Q, K, V)
    if optimization_level == 1:
        return F.scaled_dot_product_attention(Q, K, V)
    if optimization_level == 2:
        return _compiled_baseline()(Q, K, V)
    if optimization_level == 3:
        if not _flash_takes(Q, K, V):
            warnings.warn(f"no flash attention for {Q.dtype} on {Q.device.type}: PyTorch chooses another kernel", stacklevel=2)
            return F.scaled_dot_product_attention(Q, K, V)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(Q, K, V)
    raise UsageError(f"there is no optimization level {optimization_level}; there are {list(OPTIMIZATIONS.values())}")


attention_optimized = optimize_attention


@functools.cache
def _compiled_baseline() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    torch._dynamo.config.recompile_limit = 64  # past it PyTorch logs a line and runs eager code
    return torch.compile(attention_baseline, dynamic=False)  # code of its own for each shape


def compare_optimizations(batch: int, heads: int, seq_len: int, d_k: int, device: str = "auto") -> dict[str, float]:
    """Milliseconds of one call without gradients: `baseline`, `sdpa`, and where they can run here `compiled` and `flash`.

    Raises:
        ValueError: a size is not positive, or the device is not there.
    """
    where = _device(device)
    _positive(batch=batch, heads=heads, seq_len=seq_len, d_k=d_k)
    q, k, v = _inputs(where, *[(batch, heads, seq_len, d_k)] * 3)
    missing = {"compiled": bool(_compile_problem(where.type)), "flash": not _flash_takes(q, k, v)}
    levels = {name: level for name, level in OPTIMIZATIONS.items() if not missing.get(name)}
    with torch.no_grad():
        return {name: 1e3 * benchmark_function(optimize_attention, (q, k, v, level)) for name, level in levels.items()}


# ----------------------------------------------------------------------------------------------------------------- problem 7: JAX


def attention_jax(Q: Any, K: Any, V: Any) -> Any:
    """attention_baseline as one jitted JAX function; JAX arrays [B, H, S, dk] in and out."""
    return _jitted_attention()(Q, K, V)


@functools.cache
def _jitted_attention() -> Callable:
    import jax

    def attention(q, k, v):
        return jax.nn.softmax(q @ k.swapaxes(-2, -1) / math.sqrt(q.shape[-1]), axis=-1) @ v

    return jax.jit(attention)


def profile_attention_components_jax(
    seq_len: int, d_model: int, num_heads: int, batch_size: int = 8, device: str = "auto"
) -> list[ProfileResult]:
    """The same five components, each a jitted JAX function, on the same inputs and by the same clock.

    Raises:
        ValueError: as profile_attention_components, or JAX has no such device.
        ImportError: JAX is not installed.
    """
    import jax

    where, d_k = _device(device), _head_dim(batch_size, seq_len, d_model, num_heads)
    if not _jax_runs_on(where):
        raise UsageError(f"JAX has no {where.type} device here; it has {jax.default_backend()}")
    x, w_qkv, w_out = _inputs(where, (batch_size, seq_len, d_model), (3 * d_model, d_model), (d_model, d_model))
    work = component_work(batch_size, seq_len, d_model, num_heads, x.element_size())
    w_qkv, w_out = w_qkv / math.sqrt(d_model), w_out / math.sqrt(d_model)
    x, w_qkv, w_out = (_to_jax(t) for t in (x, w_qkv, w_out))

    def qkv_projection(x, w):
        parts = (x @ w.T).reshape(batch_size, seq_len, 3, num_heads, d_k)
        return tuple(parts[:, :, i].swapaxes(1, 2) for i in range(3))  # 3 x [B, H, S, dk]

    def score_computation(q, k):
        return q @ k.swapaxes(-2, -1) / math.sqrt(d_k)

    def softmax(scores):
        return jax.nn.softmax(scores, axis=-1)

    def weighted_sum(weights, v):
        return weights @ v

    def output_projection(context, w):
        return context.swapaxes(1, 2).reshape(batch_size, seq_len, d_model) @ w.T

    jitted = [jax.jit(fn) for fn in (qkv_projection, score_computation, softmax, weighted_sum, output_projection)]
    q, k, v = jitted[0](x, w_qkv)
    scores = jitted[1](q, k)
    weights = jitted[2](scores)
    arguments = [(x, w_qkv), (q, k), (scores,), (weights, v), (jitted[3](weights, v), w_out)]
    return [
        ProfileResult(name, 1e3 * benchmark_function(fn, args), 0.0, *work[name])
        for name, fn, args in zip(COMPONENTS, jitted, arguments, strict=True)
    ]


def compare_frameworks(batch: int, heads: int, seq_len: int, d_k: int, device: str = "auto") -> dict[str, float]:
    """Milliseconds of the same attention on the same inputs: `PyTorch eager`, `PyTorch compiled`, `JAX jit`.

    What cannot run on this device is left out: torch.compile without a compiler, JAX where it is missing or has no such device.

    Raises:
        ValueError: a size is not positive, or the device is not there.
    """
    where = _device(device)
    _positive(batch=batch, heads=heads, seq_len=seq_len, d_k=d_k)
    inputs = _inputs(where, *[(batch, heads, seq_len, d_k)] * 3)
    calls = {"PyTorch eager": (attention_baseline, inputs)}
    if not _compile_problem(where.type):
        calls["PyTorch compiled"] = (_compiled_baseline(), inputs)
    if _jax_runs_on(where):
        calls["JAX jit"] = (attention_jax, tuple(_to_jax(t) for t in inputs))
    with torch.no_grad():
        return {name: 1e3 * benchmark_function(fn, args) for name, (fn, args) in calls.items()}


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
    _positive(chunk_size=chunk_size)
    precise = torch.promote_types(Q.dtype, torch.float32)  # sums over many chunks
    largest = Q.new_full((*Q.shape[:-1], 1), -math.inf, dtype=precise)  # m [B, H, S, 1]
    total = torch.zeros_like(largest)  # l [B, H, S, 1]
    out = Q.new_zeros((*Q.shape[:-1], V.shape[-1]), dtype=precise)  # o [B, H, S, dk]
    for k, v in zip(K.split(chunk_size, dim=-2), V.split(chunk_size, dim=-2), strict=True):
        scores = (Q @ k.transpose(-2, -1)).to(precise) / math.sqrt(Q.shape[-1])  # [B, H, S, C]
        raised = torch.maximum(largest, scores.amax(dim=-1, keepdim=True))
        weights, correction = (scores - raised).exp(), (largest - raised).exp()
        total = total * correction + weights.sum(dim=-1, keepdim=True)
        out = out * correction + weights.to(V.dtype) @ v
        largest = raised
    return (out / total).to(Q.dtype)


def memory_curve(
    seq_lens: Sequence[int], batch: int = 1, heads: int = 8, d_k: int = 64, chunk_size: int = 128, device: str = "auto"
) -> list[dict[str, float]]:
    """What a call adds at its peak (`added_memory`), for each sequence length.

    Returns:
        A dictionary `seq_len`, `baseline`, `chunked`, `sdpa` for each length, the last three in MB.

    Raises:
        ValueError: a size is not positive, or the device is not there.
    """
    where = _device(device)
    functions = {"baseline": attention_baseline, "chunked": functools.partial(attention_chunked, chunk_size=chunk_size)}
    functions["sdpa"] = F.scaled_dot_product_attention
    curve = []
    for seq_len in seq_lens:
        _positive(batch=batch, heads=heads, seq_len=seq_len, d_k=d_k, chunk_size=chunk_size)
        inputs = _inputs(where, *[(batch, heads, seq_len, d_k)] * 3)
        row: dict[str, float] = {"seq_len": seq_len}
        with torch.no_grad():
            for name, fn in functions.items():
                fn(*inputs)  # libraries take their workspaces in the first call
                row[name] = added_memory(fn, inputs, where.type)
        curve.append(row)
    return curve


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
