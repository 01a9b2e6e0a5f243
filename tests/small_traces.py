"""Traces and profiles for tests: a real one of a small Version 1 on the CPU, and a GPU's, written
by hand.
"""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

from common import spans
from common.config import ModelConfig
from common.precision import Precision
from tests.records import record
from tracepage.readers import chrome_trace
from version1_pytorch_baseline import tiny_llama_v1

import torch

BATCH, LENGTH, STEPS = 2, 24, 3
CONFIG = ModelConfig(
    vocab_size=300,
    hidden_size=32,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=72,
    max_sequence_length=LENGTH,
)
CEILINGS = {
    "flops_per_second": 1e9,
    "bytes_per_second": 2e8,
    "operation_seconds": 1e-6,
    "precision": "fp32",
}


def record_cpu_trace(path: Path) -> None:
    """Profiles STEPS training steps of Version 1 with CONFIG, memory included."""
    torch.manual_seed(0)
    model, precision = tiny_llama_v1.TinyLlama(CONFIG), Precision(torch.device("cpu"), None)
    optimizer = tiny_llama_v1.make_optimizer(model, SimpleNamespace(learning_rate=1e-3))
    ids = torch.randint(CONFIG.vocab_size, (BATCH, LENGTH + 1))
    batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    step = tiny_llama_v1.make_step(model, optimizer, precision)
    step(batch)
    spans.recording = True
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        record_shapes=True,
        profile_memory=True,
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=STEPS, repeat=1),
    ) as profiler:
        for _ in range(1 + STEPS):
            step(batch)
            profiler.step()
    spans.recording = False
    profiler.export_chrome_trace(str(path))


def event(
    category: str,
    name: str,
    start: float,
    end: float,
    thread: int = 1,
    number: int | None = None,
    shapes: list | None = None,
    **arguments,
) -> dict:
    """A complete event as traces write it; `number` is its "Sequence number", `shapes` those of its
    inputs.
    """
    if number is not None:
        arguments["Sequence number"] = number
    if shapes is not None:
        arguments |= {
            "Input Dims": shapes,
            "Input type": ["float" if shape else "Scalar" for shape in shapes],
        }
    times = {"ts": 1000.0 + start, "dur": end - start}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 7,
        "tid": thread,
        **times,
        "args": arguments,
    }


def gpu_trace(launch: str = "cudaLaunchKernel") -> dict:
    """Two steps, and a third that is cut off. The first: a product (kernel 1), a residual addition
    (2), their backward in a thread of its own (3, and a fill, 4, beside it), an optimizer (5). The
    second: a product (6) that ends after its step. Kernel 99 was launched before the trace began.
    Times in us.
    """
    node = "autograd::engine::evaluate_function: "
    host = [
        event("user_annotation", "ProfilerStep#0", 0, 100),
        event("user_annotation", "attention", 10, 30),
        event("cpu_op", "aten::matmul", 11, 29, number=5),
        event("cpu_op", "aten::mm", 12, 28, number=5, shapes=[[4, 8], [8, 8]]),
        event("cuda_runtime", launch, 14, 16, correlation=1),
        event("cpu_op", "aten::add", 32, 38, number=6, shapes=[[2, 2, 8], [2, 2, 8], []]),
        event("cuda_runtime", launch, 33, 34, correlation=2),
        event("user_annotation", "backward", 40, 80),
        event("cpu_op", node + "AddBackward0", 44, 48, 2, number=6),
        event("cpu_op", node + "MmBackward0", 50, 66, 2, number=5),
        event("cpu_op", "MmBackward0", 51, 64, 2, number=5),
        event("cpu_op", "aten::mm", 52, 62, 2, shapes=[[8, 4], [4, 8]]),
        event("cuda_runtime", launch, 54, 56, 2, correlation=3),
        event("cuda_driver", "cuLaunchKernel", 58, 59, 2, correlation=4),
        event("cpu_op", node + "torch::autograd::AccumulateGrad", 68, 72, 2),
        event("user_annotation", "optimizer", 82, 95),
        event("user_annotation", "Optimizer.step#AdamW.step", 83, 94),
        event("cpu_op", "aten::_foreach_add_", 84, 90, shapes=[[], []]),
        event("cuda_runtime", launch, 85, 86, correlation=5),
        event("cpu_op", "aten::copy_", 96, 98, shapes=[[1], []]),
        event("user_annotation", "ProfilerStep#1", 100, 160),
        event("user_annotation", "mlp", 105, 125),
        event("cpu_op", "aten::mm", 110, 120, number=9, shapes=[[4, 8], [8, 8]]),
        event("cuda_runtime", launch, 112, 113, correlation=6),
        event("user_annotation", "ProfilerStep#2", 160, 165),
        event("python_function", "train.py(1): step", 0, 100),
    ]
    device = [
        event("kernel", "before", -30, 5, 0, stream=7, correlation=99),
        event("kernel", "gemm", 20, 50, 0, stream=7, correlation=1),
        event("kernel", "add", 50, 55, 0, stream=7, correlation=2),
        event("kernel", "gemm", 60, 90, 0, stream=7, correlation=3),
        event("gpu_memset", "Memset (Device)", 85, 95, 0, stream=8, correlation=4),
        event("kernel", "foreach", 100, 130, 0, stream=7, correlation=5),
        event("kernel", "gemm", 131, 190, 0, stream=7, correlation=6),
        event("gpu_user_annotation", "attention", 20, 50, 0),
    ]
    return {"schemaVersion": 1, "traceEvents": host + device}


def rank_trace(rank: int) -> dict:
    """One step on a GPU with two all-reduces and an all-gather on each of two ranks.

    Computing runs from 0 to 100 us and from 130 to 150. Rank 0 is in the all-reduces from 60 to 90
    and 90 to 120, rank 1 from 70 to 90 and 100 to 120; both are in the all-gather from 140 to 160.
    So rank 0 waits 10 us in each all-reduce, beside computing, and the 20 us in which the second
    one moves its bytes are exposed.
    """
    names = (
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_AllGather_RING_LL",
    )
    times = [(60, 90), (90, 120)] if rank == 0 else [(70, 90), (100, 120)]
    events = [
        event("user_annotation", "ProfilerStep#0", 0, 200),
        event("cpu_op", "aten::mm", 1, 100, shapes=[[4, 8], [8, 8]]),
    ]
    found = [
        ("gemm", 0, 100),
        *((names[0], *each) for each in times),
        ("gemm", 130, 150),
        (names[1], 140, 160),
    ]
    for number, (name, start, end) in enumerate(found, 1):
        events.append(
            event("cuda_runtime", "cudaLaunchKernelExC", 1 + number, 2 + number, correlation=number)
        )
        events.append(event("kernel", name, start, end, 0, stream=number % 2, correlation=number))
    return {"schemaVersion": 1, "traceEvents": events}


@functools.cache
def tables_as_json(trace: Path, attention_only: bool) -> str:
    """A trace takes a second to read."""
    return json.dumps(chrome_trace.profile_tables(chrome_trace.load(trace), attention_only))


def write_profile(
    path: Path, trace: Path, attention_only: bool = False, ceilings: dict | None = CEILINGS, **run
) -> dict:
    """A profile of `trace` as common.training.profiler writes it. `run` changes parts of its run's
    record.
    """
    own = {
        "model": CONFIG.model_dump(),
        "ceilings": ceilings,
        "device": {"kind": "cpu", "name": "some CPU", "memory_mib": 1000.0, "threads": 1},
        "step_ms": {
            "all": [9.0, 8.0, 7.0],
            "profiled": 2,
            "median": 9.0,
            "p20": 9.0,
            "p80": 9.0,
            "count": 1,
        },
    }
    changes = own | {"training__batch_size": BATCH, "training__sequence_length": LENGTH} | run
    profile = {
        "schema": "tiny-llama-profile/1",
        "run": record(**changes),
        "attention_only": attention_only,
        "trace": trace.name,
        **json.loads(tables_as_json(trace, attention_only)),
    }
    path.write_text(json.dumps(profile))
    return profile
