"""The profiling lab, solved. src/profiling.py describes the arguments, units and errors of the same functions.

Clock, memory and lower bounds are those of `common`, so the lab and the versions measure alike. The attention here has no mask:
every position reads all others.

Shapes: B batch, S sequence, D model dimension (`d_model`), H heads, dk = D / H head dimension. One MB is 2^20 bytes.
"""

import functools
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from common import device as devices
from common.analysis.formulas import operators
from common.analysis.output import tables
from common.errors import UsageError
from common.records.fields import Rates
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
    """Seconds of a call `fn(*args)`: the median of `iterations` calls, after `warmup` calls that do not count."""

    def call() -> None:
        result = fn(*args)
        if sync and "jax" in sys.modules and not isinstance(result, Tensor):  # a function that returns JAX arrays imported JAX
            sys.modules["jax"].block_until_ready(result)

    device = devices.select("auto" if sync else "cpu")
    return summarize(benchmark(call, device, warmup, iterations))["median"] / 1e3


# -------------------------------------------------------------------------------------------------------------- problem 2: memory


def measure_memory_usage(fn: Callable[..., object], args: Sequence[Any] = (), device: str = "auto") -> dict[str, float]:
    """Memory of one call, in MB."""
    where = devices.select(device)
    devices.synchronize(where)
    devices.reset_peak_memory(where)
    result = fn(*args)
    devices.synchronize(where)
    peak = devices.peak_memory(where)["peak_mib"]
    names = ("peak_memory_mb", "current_memory_mb", "cached_memory_mb")
    if not devices.is_gpu(where):
        return dict.fromkeys(names, 0.0) | {"resident_peak_mb": peak}
    current, cached = torch.cuda.memory_allocated(where) / lab.MIB, torch.cuda.memory_reserved(where) / lab.MIB
    del result  # it exists until here, so that it counts
    return dict(zip(names, (peak, current, cached), strict=True))


# ----------------------------------------------------------------------------------------- problem 3: the components of attention


def profile_attention_components(
    seq_len: int, d_model: int, num_heads: int, batch_size: int = 8, device: str = "auto"
) -> list[ProfileResult]:
    """The five components of attention, each timed alone, in the order of `lab.COMPONENTS`."""
    where, d_k = devices.select(device), lab.head_dim(batch_size, seq_len, d_model, num_heads)
    x, w_qkv, w_out = lab.projection_inputs(where, batch_size, seq_len, d_model)

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
        calls: list[tuple[Callable[..., object], tuple[Tensor, ...]]] = [
            (qkv_projection, (x,)), (scores_of, (q, k)), (functools.partial(torch.softmax, dim=-1), (scores,)),
            (torch.matmul, (weights, v)), (output_projection, (weights @ v,)),
        ]  # fmt: skip
        work = component_work(batch_size, seq_len, d_model, num_heads, x.element_size())
        results = []
        for name, (fn, args) in zip(lab.COMPONENTS, calls, strict=True):
            seconds = benchmark_function(fn, args)
            results.append(ProfileResult(name, 1e3 * seconds, lab.added_memory(fn, args, where.type), *work[name]))
    return results


def component_work(batch_size: int, seq_len: int, d_model: int, num_heads: int, element_size: int) -> dict[str, tuple[int, int]]:
    """(FLOPs, bytes) of each component."""
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


# ------------------------------------------------------------------------------------------------------ problem 4: the bottleneck


def identify_bottleneck(results: Sequence[ProfileResult]) -> tuple[str, float]:
    """The name of the result with the longest time, and its share of the total time in percent."""
    total = sum(result.time_ms for result in results)
    if total <= 0:
        raise UsageError("no bottleneck without measured times: results is empty, or its times add up to 0")
    longest = max(results, key=lambda result: result.time_ms)
    return longest.name, 100 * longest.time_ms / total


def classify_bound(result: ProfileResult, peak_flops: float, peak_bandwidth: float) -> str:
    """The limit on the time of a result: `compute`, `memory` or `launch`."""
    if peak_flops <= 0 or peak_bandwidth <= 0:
        raise UsageError(f"peaks must be positive, in FLOP/s and bytes/s, not {peak_flops} and {peak_bandwidth}")
    least = lab.UNEXPLAINED * result.time_ms / 1e3
    rates: Rates = {"flops_per_second": peak_flops, "bytes_per_second": peak_bandwidth, "operation_seconds": least}
    return operators.bound(result.flops, result.bytes_moved, rates)[1]


def generate_profile_report(seq_len: int, d_model: int, num_heads: int, device: str = "auto") -> str:
    """A title, a text table of the components with their total, the one with the longest time, and a recommendation."""
    where, results = devices.select(device), profile_attention_components(seq_len, d_model, num_heads, device=device)
    total, peaks = sum(result.time_ms for result in results), lab.peaks(where)
    bounds = {result.name: classify_bound(result, peaks["flops_per_second"], peaks["bytes_per_second"]) for result in results}
    name, percent = identify_bottleneck(results)
    rows = [[result.name, result.time_ms, 100 * result.time_ms / total, bounds[result.name]] for result in results]
    return "\n".join([
        f"Components of attention: S {seq_len}, D {d_model}, H {num_heads}, {where.type}",
        "",
        tables.text(["component", "time ms", "% of total", "bound"], [*rows, ["total", total, 100.0, None]]),
        "",
        f"Bottleneck: {name}, {percent:.1f} % of {tables.format_number(total)} ms, {bounds[name]}-bound",
        f"Recommendation: {_recommendation(results)}",
    ])  # fmt: skip


def _recommendation(results: Sequence[ProfileResult]) -> str:
    """For the larger of two groups that one change can improve: the operations on [S, S] matrices, and the projections."""
    total = sum(result.time_ms for result in results)
    core = sum(result.time_ms for result in results if result.name in lab.CORE) / total
    if core >= 0.5:
        change, share = f"use flash attention (optimization level 3), one kernel for {', '.join(lab.CORE)}", core
    else:
        change, share = "compute the two projections in a cheaper format, or launch less (torch.compile)", 1 - core
    return f"{change}. That touches {100 * share:.1f} % of the time: at most {1 / (1 - share):.2f} times as fast."


# ------------------------------------------------------------------------------------------------ problem 5: arithmetic intensity


def compute_arithmetic_intensity(op: str, shapes: lab.Shapes) -> float:
    """FLOPs per byte that has to move, with 2 bytes per element (float16 or bfloat16)."""
    # FLOPs for each element, and for each row. README.md has the derivations.
    per_element = {"softmax": (5, 0), "layernorm": (7, 4), "gelu": (5, 0)}
    if op not in ("matmul", *per_element):
        raise UsageError(f"unknown operation {op!r}; there are matmul, {', '.join(per_element)}")
    first, *others = lab.shape_list(shapes)
    if op == "matmul":
        fits = len(others) == 1 and min(len(first), len(others[0])) >= 2
        if not fits or first[-1] != others[0][-2] or first[:-2] != others[0][:-2]:
            raise UsageError(f"matmul takes [(..., m, k), (..., k, n)], not {shapes}")
        flops, read, written = operators.matrix_product("bmm", [first, *others])
        return flops / (2 * (read + written))
    if others:
        raise UsageError(f"{op} takes one shape, not {1 + len(others)}")
    elements, columns = math.prod(first), first[-1]
    by_element, by_row = per_element[op]
    flops = by_element * elements + by_row * elements // columns
    parameters = 2 * columns if op == "layernorm" else 0  # weight and bias
    return flops / (2 * (2 * elements + parameters))


# ---------------------------------------------------------------------------------------------------- problem 6: faster attention


def attention_baseline(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(dk)) V, one operation after the other."""
    scores = Q @ K.transpose(-2, -1) / math.sqrt(Q.shape[-1])  # [B, H, S, S]
    return scores.softmax(dim=-1) @ V


def optimize_attention(Q: Tensor, K: Tensor, V: Tensor, optimization_level: int) -> Tensor:
    """The same attention at every level."""
    if optimization_level == 0:
        return attention_baseline(Q, K, V)
    if optimization_level == 1:
        return _compiled_baseline()(Q, K, V)
    if optimization_level == 2:
        return F.scaled_dot_product_attention(Q, K, V)
    if optimization_level == 3:
        if not lab.has_flash_kernel(Q, K, V):
            warnings.warn(f"no flash attention for {Q.dtype} on {Q.device.type}: PyTorch chooses another kernel", stacklevel=2)
            return F.scaled_dot_product_attention(Q, K, V)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(Q, K, V)
    raise UsageError(f"there is no optimization level {optimization_level}; there are {list(lab.OPTIMIZATIONS.values())}")


attention_optimized = optimize_attention


@functools.cache
def _compiled_baseline() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    torch._dynamo.config.recompile_limit = 64  # beyond it PyTorch logs a line and runs eager code
    return torch.compile(attention_baseline, dynamic=False)  # separate code for each shape


def compare_optimizations(batch: int, heads: int, seq_len: int, d_k: int, device: str = "auto") -> dict[str, float]:
    """Milliseconds of one call without gradients: `baseline`, `sdpa`, and where they can run here `compiled` and `flash`."""
    where = devices.select(device)
    q, k, v = lab.attention_inputs(where, batch, heads, seq_len, d_k)
    runs = {"compiled": lab.compile_runs_on(where), "flash": lab.has_flash_kernel(q, k, v)}
    levels = {name: level for name, level in lab.OPTIMIZATIONS.items() if runs.get(name, True)}
    with torch.no_grad():
        return {name: 1e3 * benchmark_function(optimize_attention, (q, k, v, level)) for name, level in levels.items()}


# ----------------------------------------------------------------------------------------------------------------- problem 7: JAX


def attention_jax(Q: Any, K: Any, V: Any) -> Any:
    """attention_baseline as one jitted JAX function; JAX arrays [B, H, S, dk] in and out."""
    return _jitted_attention()(Q, K, V)


@functools.cache
def _jitted_attention() -> Callable:
    import jax

    def head(q, k, v):  # [S, dk]
        return jax.nn.softmax(q @ k.T / math.sqrt(q.shape[-1])) @ v

    return jax.jit(jax.vmap(jax.vmap(head)))  # over B, over H


def profile_attention_components_jax(
    seq_len: int, d_model: int, num_heads: int, batch_size: int = 8, device: str = "auto"
) -> list[ProfileResult]:
    """The same five components, each a jitted JAX function, with the same inputs and the same clock."""
    import jax

    where, d_k = devices.select(device), lab.head_dim(batch_size, seq_len, d_model, num_heads)
    if not lab.jax_runs_on(where):
        raise UsageError(f"JAX has no {where.type} device here; it has {jax.default_backend()}")
    inputs = lab.projection_inputs(where, batch_size, seq_len, d_model)
    work = component_work(batch_size, seq_len, d_model, num_heads, inputs[0].element_size())
    x, w_qkv, w_out = map(lab.to_jax, inputs)

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
        ProfileResult(name, 1e3 * benchmark_function(fn, args), lab.added_memory(fn, args, where.type), *work[name])
        for name, fn, args in zip(lab.COMPONENTS, jitted, arguments, strict=True)
    ]


def compare_frameworks(batch: int, heads: int, seq_len: int, d_k: int, device: str = "auto") -> dict[str, float]:
    """Milliseconds of the same attention on the same inputs: `PyTorch eager`, `PyTorch compiled`, `JAX jit`."""
    where = devices.select(device)
    inputs = lab.attention_inputs(where, batch, heads, seq_len, d_k)
    calls: dict[str, tuple[Callable[..., object], list[Any]]] = {"PyTorch eager": (attention_baseline, inputs)}
    if lab.compile_runs_on(where):
        calls["PyTorch compiled"] = (_compiled_baseline(), inputs)
    if lab.jax_runs_on(where):
        calls["JAX jit"] = (attention_jax, [lab.to_jax(tensor) for tensor in inputs])
    with torch.no_grad():
        return {name: 1e3 * benchmark_function(fn, args) for name, (fn, args) in calls.items()}


# -------------------------------------------------------------------------------------------- problem 8: attention in less memory


def attention_chunked(Q: Tensor, K: Tensor, V: Tensor, chunk_size: int = 128) -> Tensor:
    """attention_baseline, exact, with scores [B, H, S, C] for a chunk of C keys in memory instead of [B, H, S, S]."""
    lab.check_positive(chunk_size=chunk_size)
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
    """The memory that a call adds at its peak (`lab.added_memory`), for each sequence length."""
    where = devices.select(device)
    functions: dict[str, Callable[..., Tensor]] = {
        "baseline": attention_baseline,
        "chunked": functools.partial(attention_chunked, chunk_size=chunk_size),
        "sdpa": F.scaled_dot_product_attention,
    }
    curve = []
    for seq_len in seq_lens:
        inputs = lab.attention_inputs(where, batch, heads, seq_len, d_k)
        row: dict[str, float] = {"seq_len": seq_len}
        with torch.no_grad():
            for name, fn in functions.items():
                fn(*inputs)  # libraries allocate their workspaces in the first call
                row[name] = lab.added_memory(fn, inputs, where.type)
        curve.append(row)
    return curve
