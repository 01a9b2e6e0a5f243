"""Tests for the problems of the lab, in their order; the same for src/profiling.py and
solution/profiling.py.
"""

import importlib.util
import itertools
import time
import timeit

import lab
import profiling
import pytest
import torch
from profiling import ProfileResult, measure_memory_usage

COMPONENTS = ["qkv_projection", "score_computation", "softmax", "weighted_sum", "output_projection"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# seconds of a fake GPU
LAUNCH = 1e-5
WORK = 1e-3
MIB = 2**20


def qkv(device: str = "cpu", shape: tuple[int, ...] = (1, 2, 16, 8)) -> list[torch.Tensor]:
    dtype = torch.float16 if device == "cuda" else torch.float32
    return [torch.randn(shape).to(device, dtype) for _ in range(3)]


def by_definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention in float64, written out."""
    q, k, v = (t.double() for t in (q, k, v))
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1) @ v


def assert_right(actual: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    expected = by_definition(*inputs)
    tolerance = 3e-3 if actual.dtype == torch.float16 else 2e-6
    assert actual.dtype == inputs[0].dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance)


# --- problem 1: time


class FakeGpu:
    """A host and a GPU, each with a clock of its own: a launch returns at once, and the work is
    done later. Seconds.
    """

    def __init__(self) -> None:
        self.host = self.done = 0.0  # done: when the GPU will have done all that was launched

    def launch(self, work: float) -> None:
        self.host += LAUNCH
        self.done = max(self.done, self.host) + work

    def synchronize(self, device: object = None) -> None:
        self.host = max(self.host, self.done)


@pytest.fixture
def gpu(monkeypatch) -> FakeGpu:
    """torch.cuda and Python's clock are those of a fake GPU."""
    gpu = FakeGpu()

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing, "torch.cuda.Event(enable_timing=True)"

        def record(self) -> None:
            self.reached = max(gpu.host, gpu.done)

        def synchronize(self) -> None:
            gpu.host = max(gpu.host, self.reached)

        def elapsed_time(self, end: "Event") -> float:
            assert gpu.host >= end.reached, (
                "the clock reads an event that the GPU has not reached: synchronize first"
            )
            return 1e3 * (end.reached - self.reached)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(time, "perf_counter", lambda: gpu.host)
    return gpu


@pytest.mark.parametrize("sync", [True, False])
def test_benchmark_calls_exactly_as_often_as_asked(sync):
    calls = []
    profiling.benchmark_function(lambda x, y: calls.append((x, y)), (1, 2), 3, 7, sync=sync)
    assert calls == [(1, 2)] * 10


def test_benchmark_returns_seconds():
    assert 0.01 < profiling.benchmark_function(time.sleep, (0.01,), warmup=0, iterations=5) < 0.05


def test_benchmark_waits_for_the_work(gpu):
    seconds = profiling.benchmark_function(gpu.launch, (WORK,), warmup=1, iterations=5)
    assert WORK <= seconds <= WORK + LAUNCH + 1e-9, "this is not the time of the work"
    assert profiling.benchmark_function(gpu.launch, (WORK,), 1, 5, sync=False) == pytest.approx(
        LAUNCH
    )


def test_benchmark_leaves_the_warmup_out(gpu):
    durations = itertools.chain([1.0] * 3, itertools.repeat(WORK))  # the first calls compile
    seconds = profiling.benchmark_function(
        lambda: gpu.launch(next(durations)), (), warmup=3, iterations=1
    )
    assert seconds < 2 * WORK, (
        "a call of the warm-up counts: was it left out, and did the clock wait for its end?"
    )


def test_benchmark_is_not_moved_by_one_slow_call(gpu):
    durations = iter([WORK, 1.0, WORK, WORK, WORK])
    assert (
        profiling.benchmark_function(
            lambda: gpu.launch(next(durations)), (), warmup=0, iterations=5
        )
        < 2 * WORK
    )


@pytest.mark.gpu
def test_benchmark_waits_for_a_real_gpu():
    x = torch.randn(8192, 8192, device="cuda")
    waited, asked = (
        profiling.benchmark_function(torch.matmul, (x, x), 2, 5, sync=sync)
        for sync in (True, False)
    )
    # no GPU does 10^15 FLOP/s in float32
    assert waited > 2 * 8192**3 / 1e15 and asked < 0.5 * waited


# --- problem 2: memory


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "call, factor",
    [
        (lambda x: x + 1, 1),
        (lambda x: (x + 1).sum(), 1),
        (lambda x: ((x + 1).sum(), (x + 2).sum()), 1),
        (lambda x: (x + 1) * x, 2),
    ],
    ids=["a result", "a temporary tensor", "two, one after the other", "two at once"],
)
def test_memory_is_the_peak_of_what_a_call_adds(call, factor, device):
    x = torch.ones(8, MIB, device=device)  # 32 MB
    assert measure_memory_usage(call, (x,), device).peak_mb == pytest.approx(32 * factor, abs=1)


@pytest.mark.parametrize("device", DEVICES)
def test_memory_is_current_while_the_result_lives(device):
    x = torch.ones(8, MIB, device=device)
    usage = measure_memory_usage(lambda x: x + 1, (x,), device)
    assert usage.current_mb == pytest.approx(32, abs=1)
    assert measure_memory_usage(lambda x: (x + 1).sum(), (x,), device).current_mb == pytest.approx(
        0, abs=1
    )
    if device == "cpu":
        assert usage.cached_mb is None
    else:
        assert usage.cached_mb >= 64  # x and the result


# --- problem 3: components


def test_component_work_follows_from_the_shapes():
    # n = 256, scores 2048, D^2 = 64
    assert profiling.component_work(
        batch_size=2, seq_len=16, d_model=8, num_heads=4, element_size=2
    ) == {
        "qkv_projection": (12288, 2 * (256 + 192 + 768)),
        "score_computation": (8192 + 2048, 2 * (512 + 2048)),
        "softmax": (10240, 2 * 4096),
        "weighted_sum": (8192, 2 * (2048 + 512)),
        "output_projection": (4096, 2 * (256 + 64 + 256)),
    }


@pytest.mark.parametrize("device", DEVICES)
def test_components_in_order_with_time_memory_and_work(device):
    batch = 2
    length = 64
    width = 32
    heads = 4
    element = 2 if device == "cuda" else 4
    results = profiling.profile_attention_components(
        length, width, heads, batch_size=batch, device=device
    )
    assert [result.name for result in results] == COMPONENTS
    assert all(result.time_ms > 0 for result in results)
    work = profiling.component_work(batch, length, width, heads, element)
    assert [(result.flops, result.bytes_moved) for result in results] == list(work.values())
    scores = batch * heads * length**2 * element / MIB
    assert all(result.memory_mb >= scores for result in results[1:3])  # their output alone


# --- problem 4: bottleneck


def test_the_bottleneck_is_what_takes_longest():
    name, percent = profiling.identify_bottleneck(
        [ProfileResult("a", 1.0), ProfileResult("b", 2.5), ProfileResult("c", 1.5)]
    )
    assert name == "b" and percent == pytest.approx(50)


@pytest.mark.parametrize(
    ("flops", "moved", "bound"),
    [
        (10**9, 10**6, "compute"),
        (10**6, 10**8, "memory"),
        (10**6, 10**6, "launch"),
        (0, 0, "launch"),
    ],
    ids=["compute", "memory", "neither", "no work"],
)
def test_what_binds_a_result(flops, moved, bound):
    # With 10^12 FLOP/s and 10^11 bytes/s: 10^9 FLOPs and 10^8 bytes take 1 ms each.
    assert profiling.classify_bound(ProfileResult("x", 1.5, 0.0, flops, moved), 1e12, 1e11) == bound


@pytest.mark.parametrize(
    ("slowest", "flops", "moved", "advice"),
    [
        ("softmax", 10**6, 10**8, "flash attention"),
        ("qkv_projection", 10**6, 10**8, "fewer bytes"),
        ("qkv_projection", 10**9, 10**6, "format"),
        ("softmax", 10**6, 10**6, "launch"),
    ],
    ids=["memory, scores", "memory, projection", "compute", "launch"],
)
def test_report_recommends_what_the_bound_asks_for(slowest, flops, moved, advice):
    results = [
        ProfileResult(name, 1.5 if name == slowest else 0.5, 0.0, flops, moved)
        for name in COMPONENTS
    ]
    title, *lines = profiling.generate_profile_report(results, 1e12, 1e11).splitlines()
    assert title == "Attention Component Profiling:"
    assert [line.split()[0] for line in lines[:7]] == ["Component", *COMPONENTS, "Total"]
    assert [float(cell) for cell in lines[6].split()[1:]] == [3.5, 100]
    assert f"Bottleneck: {slowest} (42.9%)" in lines
    assert lines[-1].startswith("Recommendation: ") and advice in lines[-1]


def test_report_of_this_machine():
    """`pytest -s` shows it."""
    results = profiling.profile_attention_components(128, 64, 4, batch_size=2)
    rates = lab.peaks(torch.device(lab.DEVICE))
    printed = profiling.generate_profile_report(
        results, rates["flops_per_second"], rates["bytes_per_second"]
    )
    print(f"\n{printed}")
    assert all(name in printed for name in COMPONENTS)


# --- problem 5: attention


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


# --- problem 6: JAX

needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="needs JAX: make setup-jax"
)


@needs_jax
def test_jax_gives_the_same_attention():
    import jax.numpy

    inputs = qkv(shape=(2, 3, 7, 16))
    # on an NVIDIA GPU float32 products would take TF32
    with jax.default_matmul_precision("highest"):
        out = profiling.attention_jax(*(jax.numpy.asarray(t.numpy()) for t in inputs))
    assert isinstance(out, jax.Array)
    assert_right(torch.tensor(out.tolist()), inputs)


@needs_jax
def test_jax_has_the_same_components():
    results = profiling.profile_attention_components_jax(64, 32, 4, batch_size=2, device="cpu")
    assert [result.name for result in results] == COMPONENTS
    assert all(result.time_ms > 0 for result in results)
    assert [(result.flops, result.bytes_moved) for result in results] == list(
        profiling.component_work(2, 64, 32, 4, 4).values()
    )


@needs_jax
def test_jax_memory_is_unknown_on_a_cpu_and_read_from_its_statistics(monkeypatch):
    import jax

    x = jax.numpy.ones(8)
    monkeypatch.setattr(lab, "jax_statistics", lambda: None)  # as on a CPU
    assert measure_memory_usage(lambda x: x + 1, (x,), "cpu") == (None, None, None)
    statistics = iter(
        [(32, 64), (64, 96), (32, 96), (64, 96)]
    )  # in use and peak, before and after each of two calls

    def counted() -> dict[str, int]:
        in_use, peak = next(statistics)
        return {
            "bytes_in_use": in_use * MIB,
            "peak_bytes_in_use": peak * MIB,
            "pool_bytes": 128 * MIB,
        }

    monkeypatch.setattr(lab, "jax_statistics", counted)
    assert measure_memory_usage(lambda x: x + 1, (x,), "cuda") == (64, 32, 128)
    assert measure_memory_usage(lambda x: x + 1, (x,), "cuda") == (None, 32, 128)


@needs_jax
def test_a_jax_result_is_waited_for():
    import jax

    x = jax.numpy.ones((1500, 1500))
    product = jax.jit(lambda a: a @ a)
    walls = timeit.repeat(lambda: product(x).block_until_ready(), number=1, repeat=4)
    assert profiling.benchmark_function(product, (x,), 1, 5) > 0.5 * min(walls)


def test_frameworks_are_compared_where_they_run():
    times = profiling.compare_frameworks(1, 2, 16, 8, "cpu")
    assert "PyTorch eager" in times and times.keys() <= {
        "PyTorch eager",
        "PyTorch compiled",
        "JAX jit",
    }
    assert all(0 < milliseconds < 1000 for milliseconds in times.values())


# --- problem 7: attention in blocks


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_size", [1, 4, 7, 100])
def test_blocks_of_queries_give_the_same_attention(block_size, device):
    inputs = qkv(device, (2, 3, 7, 16))
    with torch.no_grad():
        assert_right(profiling.attention_in_blocks(*inputs, block_size=block_size), inputs)


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_of_queries_take_less_memory(device):
    inputs = qkv(device, (1, 2, 512, 8))
    element = inputs[0].element_size()
    peak_mb = measure_memory_usage(profiling.attention_in_blocks, (*inputs, 64), device).peak_mb
    assert peak_mb < 0.5 * 2 * 512**2 * element / MIB  # half of the scores [B, H, S, S]
