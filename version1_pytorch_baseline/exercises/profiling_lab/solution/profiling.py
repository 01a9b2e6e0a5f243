"""The profiling lab, solved. src/profiling.py describes the arguments, units and errors of the same
functions.

The attention here has no mask: every position reads all others.

Shapes: B batch, S sequence, D model dimension (`d_model`), H heads, dk = D / H head dimension. One
MB is 2^20 bytes.
"""

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
    """
    events = sync and torch.cuda.is_available()

    def mark() -> Any:
        if not events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def call() -> None:
        result = fn(*args)
        # a function that returns JAX arrays imported JAX
        if sync and "jax" in sys.modules and not isinstance(result, Tensor):
            sys.modules["jax"].block_until_ready(result)

    for _ in range(warmup):
        call()
    if events:
        torch.cuda.synchronize()
    marks = []
    for _ in range(iterations):
        start = mark()
        call()
        marks.append((start, mark()))
    if events:
        torch.cuda.synchronize()  # nothing waits inside the timed region
        return statistics.median(start.elapsed_time(end) for start, end in marks) / 1e3
    return statistics.median(end - start for start, end in marks)


def measure_memory_usage(
    fn: Callable[..., object], args: Sequence[Any] = (), device: str = DEVICE
) -> MemoryUsage:
    """Peak, current and cached MB of a call `fn(*args)`. A first call is not measured."""
    fn(*args)  # libraries allocate their workspaces here
    if lab.has_jax_arrays(args):
        return lab.jax_memory(fn, args)
    if device == "cpu":
        running = [0, *itertools.accumulate(lab.allocations(fn, args))]  # bytes
        return MemoryUsage(max(running) / lab.MIB, running[-1] / lab.MIB, None)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = fn(*args)
    peak = torch.cuda.max_memory_allocated() - before
    current = torch.cuda.memory_allocated() - before
    del result  # held until here: its memory is current
    return MemoryUsage(peak / lab.MIB, current / lab.MIB, torch.cuda.memory_reserved() / lab.MIB)


def component_work(
    batch_size: int, seq_len: int, d_model: int, num_heads: int, element_size: int
) -> dict[str, tuple[int, int]]:
    """(FLOPs, bytes) of each component."""
    tokens = batch_size * seq_len
    # elements
    n = tokens * d_model
    scores = num_heads * tokens * seq_len
    square = d_model**2
    product = 2 * n * seq_len  # FLOPs of q k^T, and of weights @ v
    work = {
        "qkv_projection": (6 * n * d_model, n + 3 * square + 3 * n),
        "score_computation": (product + scores, 2 * n + scores),
        "softmax": (5 * scores, 2 * scores),
        "weighted_sum": (product, scores + 2 * n),
        "output_projection": (2 * n * d_model, n + square + n),
    }
    return {name: (flops, element_size * elements) for name, (flops, elements) in work.items()}


def profile_attention_components(
    seq_len: int, d_model: int, num_heads: int, batch_size: int = 8, device: str = DEVICE
) -> list[ProfileResult]:
    """The five components of attention, each timed alone, in the order of `lab.COMPONENTS`, with
    memory and work.
    """
    d_k = d_model // num_heads
    x, w_qkv, w_out = lab.projection_inputs(device, batch_size, seq_len, d_model)

    def qkv_projection(x: Tensor) -> list[Tensor]:
        parts = F.linear(x, w_qkv).chunk(3, dim=-1)  # 3 x [B, S, D]
        # 3 x [B, H, S, dk]
        return [part.unflatten(-1, (num_heads, d_k)).transpose(1, 2).contiguous() for part in parts]

    def scores_of(q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) / math.sqrt(d_k)

    def output_projection(context: Tensor) -> Tensor:
        return F.linear(context.transpose(1, 2).flatten(2), w_out)

    with torch.no_grad():
        q, k, v = qkv_projection(x)
        scores = scores_of(q, k)
        weights = scores.softmax(dim=-1)
        calls: list[tuple[Callable[..., object], tuple[Tensor, ...]]] = [
            (qkv_projection, (x,)),
            (scores_of, (q, k)),
            (functools.partial(torch.softmax, dim=-1), (scores,)),
            (torch.matmul, (weights, v)),
            (output_projection, (weights @ v,)),
        ]
        work = component_work(batch_size, seq_len, d_model, num_heads, x.element_size())
        results = []
        for name, (fn, args) in zip(lab.COMPONENTS, calls, strict=True):
            seconds = benchmark_function(fn, args)
            peak_mb = measure_memory_usage(fn, args, device).peak_mb
            results.append(ProfileResult(name, 1e3 * seconds, peak_mb or 0.0, *work[name]))
    return results


def identify_bottleneck(results: Sequence[ProfileResult]) -> tuple[str, float]:
    """The name of the result with the longest time, and its share of the total time in percent."""
    longest = max(results, key=lambda result: result.time_ms)
    return longest.name, 100 * longest.time_ms / sum(result.time_ms for result in results)


def classify_bound(result: ProfileResult, peak_flops: float, peak_bandwidth: float) -> str:
    """The limit on the time of a result: `compute`, `memory` or `launch`, which names the longest
    of three times.
    """
    seconds = {
        "compute": result.flops / peak_flops,
        "memory": result.bytes_moved / peak_bandwidth,
        "launch": lab.UNEXPLAINED * result.time_ms / 1e3,
    }
    return max(seconds, key=seconds.__getitem__)


def generate_profile_report(
    results: Sequence[ProfileResult], peak_flops: float, peak_bandwidth: float
) -> str:
    """The report on the five components, as problem 4 shows it: a table with a total, the
    bottleneck, a recommendation.
    """
    name, share = identify_bottleneck(results)
    slowest = next(result for result in results if result.name == name)
    bound = classify_bound(slowest, peak_flops, peak_bandwidth)
    total = ProfileResult("Total", sum(result.time_ms for result in results))
    lines = [
        "Attention Component Profiling:",
        f"{'Component':<20}{'Time (ms)':>12}{'% of total':>12}",
    ]
    for result in [*results, total]:
        percent = 100 * result.time_ms / total.time_ms
        lines.append(f"{result.name:<20}{result.time_ms:>12.4f}{percent:>12.1f}")
    return "\n".join(
        [
            *lines,
            "",
            f"Bottleneck: {name} ({share:.1f}%)",
            f"Recommendation: it is {bound}-bound: {_recommendation(name, bound)}",
        ]
    )


def _recommendation(name: str, bound: str) -> str:
    """The change that removes what limits a component."""
    if bound == "launch":
        return "launch less (torch.compile, a CUDA graph) or more at once (a larger batch)"
    if bound == "compute":
        return "take a number format with faster matmuls (TF32, 16 bits)"
    if name in lab.CORE:
        return "use flash attention, which does not write the scores"
    return "move fewer bytes (16 bits, or fuse with torch.compile)"


def attention_baseline(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(dk)) V, one operation after the other; all [B, H, S, dk]."""
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
    if not lab.has_flash_kernel(Q, K, V):
        warnings.warn(
            f"no flash attention for {Q.dtype} on {Q.device.type}: PyTorch chooses another kernel",
            stacklevel=2,
        )
        return F.scaled_dot_product_attention(Q, K, V)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(Q, K, V)


@functools.cache
def _compiled_baseline() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    torch._dynamo.config.recompile_limit = 64  # beyond it PyTorch logs a line and runs eager code
    return torch.compile(attention_baseline, dynamic=False)  # separate code for each shape


def compare_optimizations(
    batch: int, heads: int, seq_len: int, d_k: int, device: str = DEVICE
) -> dict[str, float]:
    """Milliseconds of one call without gradients: `baseline`, `sdpa`, and where they can run here
    `compiled` and `flash`.
    """
    q, k, v = lab.attention_inputs(device, batch, heads, seq_len, d_k)
    runs = {"compiled": lab.compile_runs_on(device), "flash": lab.has_flash_kernel(q, k, v)}
    levels = {name: level for name, level in lab.OPTIMIZATIONS.items() if runs.get(name, True)}
    with torch.no_grad():
        return {
            name: 1e3 * benchmark_function(optimize_attention, (q, k, v, level))
            for name, level in levels.items()
        }


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
    seq_len: int, d_model: int, num_heads: int, batch_size: int = 8, device: str = DEVICE
) -> list[ProfileResult]:
    """The same five components, each a jitted JAX function, with the same inputs and the same
    clock; without memory.
    """
    import jax

    d_k = d_model // num_heads
    inputs = lab.projection_inputs(device, batch_size, seq_len, d_model)
    work = component_work(batch_size, seq_len, d_model, num_heads, inputs[0].element_size())
    x, w_qkv, w_out = map(lab.to_jax, inputs)

    def qkv_projection(x, w):
        parts = (x @ w.T).reshape(batch_size, seq_len, 3, num_heads, d_k)
        return tuple(parts[:, :, i].swapaxes(1, 2) for i in range(3))  # 3 x [B, H, S, dk]

    def score_computation(q, k):
        return q @ k.swapaxes(-2, -1) / math.sqrt(d_k)

    def weighted_sum(weights, v):
        return weights @ v

    def output_projection(context, w):
        return context.swapaxes(1, 2).reshape(batch_size, seq_len, d_model) @ w.T

    jitted = [
        jax.jit(fn)
        for fn in (
            qkv_projection,
            score_computation,
            jax.nn.softmax,
            weighted_sum,
            output_projection,
        )
    ]
    q, k, v = jitted[0](x, w_qkv)
    scores = jitted[1](q, k)
    weights = jitted[2](scores)
    arguments = [(x, w_qkv), (q, k), (scores,), (weights, v), (jitted[3](weights, v), w_out)]
    return [
        ProfileResult(name, 1e3 * benchmark_function(fn, args), 0.0, *work[name])
        for name, fn, args in zip(lab.COMPONENTS, jitted, arguments, strict=True)
    ]


def compare_frameworks(
    batch: int, heads: int, seq_len: int, d_k: int, device: str = DEVICE
) -> dict[str, float]:
    """Milliseconds of the same attention on the same inputs: `PyTorch eager`, `PyTorch compiled`,
    `JAX jit`.
    """
    inputs = lab.attention_inputs(device, batch, heads, seq_len, d_k)
    calls: dict[str, tuple[Callable[..., object], list[Any]]] = {
        "PyTorch eager": (attention_baseline, inputs)
    }
    if lab.compile_runs_on(device):
        calls["PyTorch compiled"] = (_compiled_baseline(), inputs)
    if lab.jax_runs_on(device):
        calls["JAX jit"] = (attention_jax, [lab.to_jax(tensor) for tensor in inputs])
    with torch.no_grad():
        return {name: 1e3 * benchmark_function(fn, args) for name, (fn, args) in calls.items()}


def attention_in_blocks(Q: Tensor, K: Tensor, V: Tensor, block_size: int = 128) -> Tensor:
    """attention_baseline for `block_size` queries at a time: the largest tensor has [B, H,
    block_size, S] scores.
    """
    out = torch.empty_like(Q)
    for start in range(0, Q.shape[2], block_size):
        queries = slice(start, start + block_size)
        # a query's softmax needs its row of scores alone
        out[:, :, queries] = attention_baseline(Q[:, :, queries], K, V)
    return out
