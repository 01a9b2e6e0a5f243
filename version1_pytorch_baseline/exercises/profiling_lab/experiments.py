"""The experiments of `lab.py experiment`: four bottlenecks, four techniques, and a transformer
layer by its parts.

An experiment does the same work in several ways, the mistake first. Its docstring is printed below
its table. Numbers are in fp32, and `profiling.py` has the clock and the measure of memory.
"""

import functools
import inspect
from argparse import Namespace
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

from common import device as devices
from common.config import ModelConfig
from common.rope import rope_tables
from tracepage.show import tables
from version1_pytorch_baseline import tiny_llama_v1 as v1

import torch
import torch.nn.functional as F
from settings import ITERATIONS, WARMUP, compile_runs_on
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SCHEMA = "tiny-llama-profiling-experiments/1"
SMALL = 512  # operations of `launches`
STEPS = 20  # of `synchronization`
LAYERS = 4  # of `techniques`

Ways = dict[str, Callable[[], object]]


def scores_like(options: Namespace, device: torch.device | str) -> Tensor:
    """[B, H, S, S] numbers 1 / S, which matrix products of them keep."""
    length = options.seq_len
    return torch.full(
        (options.batch_size, options.num_heads, length, length), 1 / length, device=device
    )


def compiled(function: Callable[..., Any], device: torch.device) -> dict[str, Callable[..., Any]]:
    """The function compiled, where torch.compile works."""
    if not compile_runs_on(device.type):
        return {}
    return {"compile": torch.compile(function, dynamic=False)}


def bandwidth(options: Namespace, device: torch.device) -> Ways:
    """Symptom: simple operations take the time of their bytes. Each of the three reads and writes
    the whole tensor. Fix: fuse them (torch.compile). One kernel reads once and writes once, 2
    numbers an element and not 6: bound 3.
    """
    x = scores_like(options, device)

    def chain() -> Tensor:
        return (x * 2 + 1).relu()

    return {"eager": chain} | compiled(chain, device)


def launches(options: Namespace, device: torch.device) -> Ways:
    """Symptom: many short kernels. The time follows the number of operations and not that of
    elements. Fix: one operation on all tensors (a batch). A CUDA graph launches all operations at
    once.
    """
    flat = torch.ones(SMALL * 64, device=device)
    parts = flat.split(64)

    def one_by_one() -> None:
        for part in parts:
            part.neg_()

    graph: Ways = (
        {"CUDA graph": devices.capture_graph(one_by_one)} if devices.is_gpu(device) else {}
    )
    return {f"{SMALL} operations": one_by_one} | graph | {"1 operation": flat.neg_}


def transfer(options: Namespace, device: torch.device) -> Ways:
    """Symptom: copies from the host take as long as the kernels, which wait for them. Fix: pinned
    memory, which the GPU reads itself; non_blocking, which lets the host go on; and prefetching on
    a side stream, which copies the next batch while the kernels use this one.
    """
    if not devices.is_gpu(device):
        print("transfer needs a GPU: a CPU computes in the host's own memory and copies nothing\n")
        return {}
    pageable = scores_like(options, "cpu")  # a batch is [H, S, S]
    pinned = pageable.pin_memory()
    copies = torch.cuda.Stream()

    def use(batch: Tensor) -> None:
        for _ in range(4):  # about as long as a copy
            batch = batch @ batch

    def copy_and_use(batches: Tensor, non_blocking: bool) -> None:
        for batch in batches:
            use(batch.to(device, non_blocking=non_blocking))

    def prefetch() -> None:
        compute = torch.cuda.current_stream()
        copies.wait_stream(compute)
        # the host runs ahead, so the next copy begins while kernels use this batch
        for batch in pinned:
            with torch.cuda.stream(copies):
                copy = batch.to(device, non_blocking=True)
            compute.wait_stream(copies)
            copy.record_stream(compute)  # its memory is free only after this stream's work
            use(copy)

    return {
        "pageable": functools.partial(copy_and_use, pageable, False),
        "pinned": functools.partial(copy_and_use, pinned, False),
        "non_blocking": functools.partial(copy_and_use, pinned, True),
        "prefetched": prefetch,
    }


def synchronization(options: Namespace, device: torch.device) -> Ways:
    """Symptom: the GPU idles after each `.item()`: the host waits for it, and launches the next
    step only then. Fix: keep the losses on the device and read them once. A CPU has no queue, so
    there it changes nothing.
    """
    x = scores_like(options, device)[0, 0]  # [S, S]

    def loss() -> Tensor:
        y = x
        for _ in range(8):
            y = y @ x
        return y.sum()

    return {
        "item() each step": lambda: [loss().item() for _ in range(STEPS)],
        "one read at the end": lambda: torch.stack([loss() for _ in range(STEPS)]).tolist(),
    }


def layers(options: Namespace, device: torch.device) -> tuple[list[v1.Block], list[Tensor]]:
    """Version 1's layers with random weights, and their inputs: x [B, S, D], and RoPE's cos and sin
    [S, Dh].
    """
    d_model = options.d_model
    heads = options.num_heads
    config = ModelConfig(
        hidden_size=d_model, num_attention_heads=heads, intermediate_size=2 * d_model
    )
    x = torch.randn(options.batch_size, options.seq_len, d_model)
    inputs = [x, *rope_tables(d_model // heads, options.seq_len, config.rope_theta)]
    blocks = [v1.Block(config).to(device) for _ in range(LAYERS)]
    return blocks, [tensor.to(device) for tensor in inputs]


def passes(
    forward: Callable[[Tensor], Tensor], x: Tensor, *modules: nn.Module
) -> Callable[[], object]:
    """A call that runs forward and backward pass, and returns the gradients of x and of the
    modules' parameters.
    """
    x = x.clone().requires_grad_()
    leaves = [x, *(parameter for module in modules for parameter in module.parameters())]
    return lambda: torch.autograd.grad(forward(x), leaves, torch.ones_like(x))


def techniques(options: Namespace, device: torch.device) -> Ways:
    """Four layers of Version 1, forward and backward. torch.compile removes launches and bytes,
    SDPA the scores. Autocast multiplies in 16 bits: float16 on a GPU, bfloat16 on a CPU.
    Checkpointing gives time for memory: it runs each layer twice.
    """
    blocks, (x, cos, sin) = layers(options, device)

    def eager(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x, cos, sin)
        return x

    def sdpa(x: Tensor) -> Tensor:
        fused = functools.partial(F.scaled_dot_product_attention, is_causal=True)
        with mock.patch.object(v1, "attention", fused):
            return eager(x)

    def autocast(x: Tensor) -> Tensor:
        dtype = torch.float16 if devices.is_gpu(device) else torch.bfloat16
        with torch.autocast(device.type, dtype):
            return eager(x)

    def checkpointed(x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False)
        return x

    ways = {"eager": eager} | compiled(eager, device)
    ways |= {"SDPA": sdpa, "autocast": autocast, "checkpoint": checkpointed}
    return {name: passes(forward, x, *blocks) for name, forward in ways.items()}


def layer(options: Namespace, device: torch.device) -> Ways:
    """One layer of Version 1, forward and backward, and its parts, each alone. The rest are two
    residual additions.
    """
    [block, *_], (x, *rotation) = layers(options, device)

    def whole(module: nn.Module) -> Callable[[], object]:
        return passes(lambda x: module(x, *rotation), x, module)

    return {
        "whole layer": whole(block),
        "attention": whole(block.self_attn),
        "MLP": passes(block.mlp, x, block.mlp),
        "one norm": passes(block.input_layernorm, x, block.input_layernorm),
    }


def run(
    name: str, profiling: ModuleType, options: Namespace, device: torch.device
) -> list[dict[str, Any]]:
    """Measures an experiment, prints its table, and returns rows of the record: milliseconds, and
    of techniques MB added.

    A row has the kind of device, the values of all ways, and those of the first and the last.
    """
    experiment: Callable[[Namespace, torch.device], Ways] = globals()[name]
    torch.manual_seed(0)
    ways = experiment(options, device)
    if not ways:
        return []
    calls = 5 if name in ("techniques", "layer") else ITERATIONS
    measured = {
        "ms": {
            way: 1e3 * profiling.benchmark_function(call, (), WARMUP, calls)
            for way, call in ways.items()
        }
    }
    if name == "techniques":
        measured["MB"] = {
            way: profiling.measure_memory_usage(call, (), device.type).peak_mb
            for way, call in ways.items()
        }
    rows = []
    for quantity, values in measured.items():
        # Without torch.compile, `bandwidth` has one way.
        numbers = list(values.values())
        first = numbers[0]
        body = [[way, value, 100 * value / first] for way, value in values.items()]
        print(f"{tables.text([name, quantity, '% of the first'], body)}\n", flush=True)
        row = {
            "on": device.type,
            "experiment": name,
            "quantity": quantity,
            "values": values,
            "first": first,
            "last": numbers[-1],
        }
        rows.append(row)
    print(f"{inspect.getdoc(experiment)}\n")
    return rows
