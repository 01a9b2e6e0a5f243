"""Tests for the problems of the lab, in their order; the same for src/profiling.py and solution/profiling.py."""

import importlib.util
import math
import re
import time
import timeit
from pathlib import Path

import profiling
import pytest
import torch
from profiling import ProfileResult

COMPONENTS = ["qkv_projection", "score_computation", "softmax", "weighted_sum", "output_projection"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BOUND = "compute|memory|launch"
MIB = 2**20


def qkv(device: str = "cpu", shape: tuple[int, ...] = (1, 2, 16, 8)) -> list[torch.Tensor]:
    dtype = torch.float16 if device == "cuda" else torch.float32
    return [torch.randn(shape).to(device, dtype) for _ in range(3)]


def by_definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention in float64, written out."""
    q, k, v = (t.double() for t in (q, k, v))
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1) @ v


def assert_right(actual: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    expected, tolerance = by_definition(*inputs), 3e-3 if actual.dtype == torch.float16 else 2e-6
    assert actual.dtype == inputs[0].dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance)


# --------------------------------------------------------------------------------------------------- problem 1: time


@pytest.mark.parametrize("sync", [True, False])
def test_benchmark_calls_exactly_as_often_as_asked(sync):
    calls = []
    profiling.benchmark_function(lambda x, y: calls.append((x, y)), (1, 2), 3, 7, sync=sync)
    assert calls == [(1, 2)] * 10


def test_benchmark_returns_seconds_per_call_without_the_warmup():
    durations = iter([0.1] * 3 + [0.01] * 5)  # the median of five holds where one call is late
    assert 0.005 < profiling.benchmark_function(lambda: time.sleep(next(durations)), (), warmup=3, iterations=5) < 0.05


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="gpu"):
        profiling.measure_memory_usage(int, device="gpu")
    with pytest.raises(ValueError, match="conv"):
        profiling.compute_arithmetic_intensity("conv", [(4, 4)])


@pytest.mark.gpu
def test_benchmark_waits_for_the_gpu():
    x = torch.randn(8192, 8192, device="cuda")
    waited, asked = (profiling.benchmark_function(torch.matmul, (x, x), 2, 5, sync=sync) for sync in (True, False))
    assert waited > 2 * 8192**3 / 1e15 and asked < 0.5 * waited  # no GPU does 10^15 FLOP/s in float32


# ------------------------------------------------------------------------------------------------- problem 2: memory


def test_memory_on_a_cpu():
    idle = profiling.measure_memory_usage(int, device="cpu")["resident_peak_mb"]
    memory = profiling.measure_memory_usage(torch.ones, ((64, MIB // 4),), device="cpu")  # 64 MB
    assert memory["peak_memory_mb"] == 0
    added = 32 if Path("/proc/self/clear_refs").exists() else 0  # macOS has no reset: its peak may be that of an earlier test
    assert memory["resident_peak_mb"] >= idle + added


@pytest.mark.gpu
def test_memory_on_a_gpu():
    held = torch.ones(32, MIB // 4, device="cuda")  # 32 MB

    def add(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).sum()  # 32 MB that are gone when it returns

    before = torch.cuda.memory_allocated() / MIB
    memory = profiling.measure_memory_usage(add, (held,), device="cuda")
    assert memory["peak_memory_mb"] == pytest.approx(before + 32, abs=1)
    assert memory["current_memory_mb"] == pytest.approx(before, abs=1)
    assert memory["cached_memory_mb"] >= memory["peak_memory_mb"]


# --------------------------------------------------------------------------------------------- problem 3: components


def test_component_work_follows_from_the_shapes():
    # n = 256, scores 2048, D^2 = 64
    assert profiling.component_work(batch_size=2, seq_len=16, d_model=8, num_heads=4, element_size=2) == {
        "qkv_projection": (12288, 2 * (256 + 192 + 768)),
        "score_computation": (8192 + 2048, 2 * (512 + 2048)),
        "softmax": (10240, 2 * 4096),
        "weighted_sum": (8192, 2 * (2048 + 512)),
        "output_projection": (4096, 2 * (256 + 64 + 256)),
    }


@pytest.mark.parametrize("device", DEVICES)
def test_components_in_order_with_time_memory_and_work(device):
    batch, length, width, heads, element = 2, 64, 32, 4, 2 if device == "cuda" else 4
    results = profiling.profile_attention_components(length, width, heads, batch_size=batch, device=device)
    assert [result.name for result in results] == COMPONENTS
    assert all(result.time_ms > 0 for result in results)
    work = profiling.component_work(batch, length, width, heads, element)
    assert [(result.flops, result.bytes_moved) for result in results] == list(work.values())
    scores = batch * heads * length**2 * element / MIB
    assert all(result.memory_mb >= scores for result in results[1:3])  # their output alone


# --------------------------------------------------------------------------------------------- problem 4: bottleneck


def test_the_bottleneck_is_what_takes_longest():
    name, percent = profiling.identify_bottleneck([ProfileResult("a", 1.0), ProfileResult("b", 2.5), ProfileResult("c", 1.5)])
    assert name == "b" and percent == pytest.approx(50)


@pytest.mark.parametrize(
    ("flops", "moved", "bound"),
    [(10**9, 10**6, "compute"), (10**6, 10**8, "memory"), (10**6, 10**6, "launch"), (0, 0, "launch")],
    ids=["compute", "memory", "neither", "no work"],
)
def test_what_binds_a_result(flops, moved, bound):
    # With 10^12 FLOP/s and 10^11 bytes/s: 10^9 FLOPs and 10^8 bytes take 1 ms each.
    assert profiling.classify_bound(ProfileResult("x", 1.5, 0.0, flops, moved), 1e12, 1e11) == bound


@pytest.mark.parametrize("device", DEVICES)
def test_the_report_says_what_its_figures_say(device):
    report = profiling.generate_profile_report(32, 64, 4, device)
    print(f"\n{report}")
    shares, bounds = {}, {}
    for name in COMPONENTS:
        row = re.search(rf"^{name}\s+\S+\s+(\S+)\s+({BOUND})$", report, re.MULTILINE)
        assert row, f"no row for {name}"
        shares[name], bounds[name] = float(row.group(1)), row.group(2)
    assert sum(shares.values()) == pytest.approx(100, abs=1)
    assert report.splitlines()[0] == f"Components of attention: S 32, D 64, H 4, {device}"
    [(named, percent, bound)] = re.findall(rf"^Bottleneck: (\w+), ([\d.]+) % of .*, ({BOUND})-bound$", report, re.MULTILINE)
    assert bound == bounds[named] and shares[named] == max(shares.values())
    assert float(percent) == pytest.approx(shares[named], abs=0.5)
    gain = re.search(r"^Recommendation: .*?([\d.]+) times", report, re.MULTILINE)
    core, rest = sum(shares[name] for name in COMPONENTS[1:4]), shares[COMPONENTS[0]] + shares[COMPONENTS[4]]
    assert gain and float(gain.group(1)) == pytest.approx(100 / min(core, rest), rel=0.05)  # the other group takes no time


# ---------------------------------------------------------------------------------------------- problem 5: intensity


@pytest.mark.parametrize(
    ("op", "shapes", "expected"),
    [
        ("matmul", [(1024, 1024), (1024, 1024)], 1024 / 3), ("matmul", {"A": (1024, 1024), "B": (1024, 1024)}, 1024 / 3),
        ("matmul", [(4, 2, 8), (4, 8, 3)], 2 * 4 * 2 * 8 * 3 / (2 * 4 * (16 + 24 + 6))),
        ("softmax", (8, 128, 128), 1.25), ("gelu", [(64, 64)], 1.25),
        ("layernorm", [(4, 256)], 4 * (7 * 256 + 4) / (2 * (2 * 4 * 256 + 2 * 256))),
    ],
    ids=str,
)  # fmt: skip
def test_intensity(op, shapes, expected):
    assert profiling.compute_arithmetic_intensity(op, shapes) == pytest.approx(expected)


# ---------------------------------------------------------------------------------------------- problem 6: attention


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_every_level_is_attention(level, device):
    inputs = qkv(device, (2, 3, 7, 16))
    with torch.no_grad():
        assert_right(profiling.optimize_attention(*inputs, level), inputs)


def test_level_1_is_compiled_and_levels_2_and_3_are_one_operation_of_pytorch():
    ran = {}
    for level in (1, 2, 3):
        profiling.optimize_attention(*qkv(), level)  # compiles
        with torch.profiler.profile() as profile:
            profiling.optimize_attention(*qkv(), level)
        ran[level] = " ".join(event.name for event in profile.events())
    assert "Dynamo" in ran[1] and "Dynamo" not in ran[2]
    assert "aten::scaled_dot_product_attention" in ran[2] and "flash_attention" in ran[3]


@pytest.mark.parametrize("device", DEVICES)
def test_optimizations_are_compared_in_milliseconds(device):
    times = profiling.compare_optimizations(1, 2, 16, 8, device)
    assert {"baseline", "sdpa"} <= times.keys() <= {"baseline", "sdpa", "compiled", "flash"}
    assert all(0 < milliseconds < 1000 for milliseconds in times.values())


# ---------------------------------------------------------------------------------------------------- problem 7: JAX

needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX: make setup-jax")


@needs_jax
def test_jax_gives_the_same_attention():
    import jax.numpy

    inputs = qkv(shape=(2, 3, 7, 16))
    with jax.default_matmul_precision("highest"):  # on an NVIDIA GPU float32 products would take TF32
        out = profiling.attention_jax(*(jax.numpy.asarray(t.numpy()) for t in inputs))
    assert isinstance(out, jax.Array)
    assert_right(torch.tensor(out.tolist()), inputs)


@needs_jax
def test_jax_has_the_same_components():
    results = profiling.profile_attention_components_jax(64, 32, 4, batch_size=2, device="cpu")
    assert [result.name for result in results] == COMPONENTS
    assert all(result.time_ms > 0 for result in results)
    assert [(result.flops, result.bytes_moved) for result in results] == list(profiling.component_work(2, 64, 32, 4, 4).values())


@needs_jax
def test_a_jax_result_is_waited_for():
    import jax

    x = jax.numpy.ones((1500, 1500))
    product = jax.jit(lambda a: a @ a)
    walls = timeit.repeat(lambda: product(x).block_until_ready(), number=1, repeat=4)
    assert profiling.benchmark_function(product, (x,), 1, 5) > 0.5 * min(walls)


def test_frameworks_are_compared_where_they_run():
    times = profiling.compare_frameworks(1, 2, 16, 8, "cpu")
    assert "PyTorch eager" in times and times.keys() <= {"PyTorch eager", "PyTorch compiled", "JAX jit"}
    assert all(0 < milliseconds < 1000 for milliseconds in times.values())


# ------------------------------------------------------------------------------------------------- problem 8: memory


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", [5, 100], ids=lambda chunk: f"chunk {chunk}")
def test_chunks_give_the_same_result(chunk, device):
    inputs = qkv(device, (2, 3, 16, 8))
    assert_right(profiling.attention_chunked(*inputs, chunk_size=chunk), inputs)


def test_chunks_survive_large_scores():
    q, k, v = qkv(shape=(1, 1, 9, 4))
    out = profiling.attention_chunked(1000 * q, 1000 * k, v, chunk_size=2)  # scores near 10^6: exp of one would be infinite
    torch.testing.assert_close(out.double(), by_definition(1000 * q, 1000 * k, v), rtol=0, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_memory_grows_with_the_square_of_s_or_with_s(device):
    curve = profiling.memory_curve([512, 1024, 2048], batch=1, heads=2, d_k=8, chunk_size=64, device=device)
    growth = {name: math.log2(curve[2][name] / curve[1][name]) for name in ("baseline", "chunked")}
    assert 1.9 < growth["baseline"] < 2.1 and 0.8 < growth["chunked"] < 1.2
    assert curve[2]["sdpa"] < curve[2]["baseline"] / 2
