"""Times every matrix product (GEMM) of a training step, each alone, over a grid of batch sizes and sequence lengths.

A linear layer y = x W^T is three products per step. With T = B S tokens, and W [out, in] stored as nn.Linear does:

    forward        y  [T, out]  = x    [T, in]  @ W^T [in, out]    layout NT
    input_grad     dx [T, in]   = dy   [T, out] @ W   [out, in]    layout NN
    weight_grad    dW [out, in] = dy^T [out, T] @ x   [T, in]      layout TN

Attention's two products are batched over B H heads; their "input" is the left operand and their "weight" the right one.
C [M, N] = A [M, K] @ B [K, N] throughout; in a layout the two letters stand for A and B: N is stored as written, row by
row, and T is stored transposed. Shapes and layouts are those that eager PyTorch runs in Version 1 from batch 2 on.

Beside the products of the step, the fused ones are timed that could replace them: one [D, (H + 2 K) Dh] product for Q, K
and V, and one [D, 2 F] product for gate and up. Separate over fused time is what fusing them could gain.

Products of one shape and layout are timed once and share the result: q_proj and o_proj, or a linear layer at B = 4, S = 128
and at B = 8, S = 64. All are timed in several rounds, so that a slow spell of the machine meets every product, and not one
product with all its samples. Operands are used again and again: what fits a cache is read from there.

The result, gemm_analysis.json (schema "tiny-llama-gemms/1"):

    command, date, device, environment      as in a run record
    precision        {"compute": "fp32", "tf32": false}; element_bytes: size of a number
    model            the configuration; batch_sizes, sequence_lengths: the grid
    ceilings         from common.ceilings.measure, the best of all rounds
    gemms, fused     a list each of {"batch_size", "sequence_length", "gemm", "phase", "batch", "m", "n", "k", "layout",
                     "per_step", "ms": {"median", "p20", "p80", "count"}, "calls"}
                     per_step: how many such products a step has (for a fused one: would have)
                     ms: of one product; `count` samples, each the mean of products back to back, `calls` in all
"""

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from common import ceilings
from common import device as devices
from common.analysis.gemms import SCHEMA
from common.config import ModelConfig
from common.errors import RunError
from common.precision import Precision
from common.timing import benchmark, summarize

ROUNDS = 3
BUDGET_MS = 40.0  # of samples for one product and round
MIN_SAMPLES, MAX_SAMPLES = 3, 30  # for one product and round
SAMPLE_MS = 1.0  # a sample repeats a short product until it lasts about this long: many times the clock's resolution


@dataclass(frozen=True)
class Product:
    """`per_step` products C [batch, m, n] = A [batch, m, k] @ B [batch, k, n] of a training step."""

    gemm: str
    phase: str  # forward, input_grad or weight_grad
    batch: int
    m: int
    n: int
    k: int
    layout: str  # NN, NT or TN
    per_step: int

    @property
    def shape(self) -> tuple[int, int, int, int, str]:
        return self.batch, self.m, self.n, self.k, self.layout


def linear(name: str, tokens: int, inputs: int, outputs: int, per_step: int) -> list[Product]:
    """The three products of a linear layer from `inputs` to `outputs` features."""
    return [
        Product(name, "forward", 1, tokens, outputs, inputs, "NT", per_step),
        Product(name, "input_grad", 1, tokens, inputs, outputs, "NN", per_step),
        Product(name, "weight_grad", 1, outputs, inputs, tokens, "TN", per_step),
    ]


def attention(config: ModelConfig, batch_size: int, length: int) -> list[Product]:
    """The six products of attention: scores = q k^T and out = p v, over all S^2 pairs, and their gradients."""
    batch, head, layers = batch_size * config.num_attention_heads, config.head_dim, config.num_layers
    # torch.matmul folds batch and heads. With H = K it must copy k^T for that, row by row; with K < H it need not.
    keys = "NT" if config.num_key_value_heads < config.num_attention_heads else "NN"
    return [
        Product("scores", "forward", batch, length, length, head, keys, layers),
        Product("scores", "input_grad", batch, length, head, length, "NN" if keys == "NT" else "NT", layers),
        Product("scores", "weight_grad", batch, head, length, length, "TN", layers),
        Product("weighted_sum", "forward", batch, length, head, length, "NN", layers),
        Product("weighted_sum", "input_grad", batch, length, length, head, "NT", layers),
        Product("weighted_sum", "weight_grad", batch, length, head, length, "TN", layers),
    ]


def products(config: ModelConfig, batch_size: int, sequence_length: int) -> list[Product]:
    """All products of a training step, in the order of the forward pass."""
    tokens, hidden, ffn, layers = batch_size * sequence_length, config.hidden_size, config.intermediate_size, config.num_layers
    kv_size = config.num_key_value_heads * config.head_dim
    return [
        *linear("q_proj", tokens, hidden, hidden, layers),
        *linear("k_proj", tokens, hidden, kv_size, layers),
        *linear("v_proj", tokens, hidden, kv_size, layers),
        *attention(config, batch_size, sequence_length),
        *linear("o_proj", tokens, hidden, hidden, layers),
        *linear("gate_proj", tokens, hidden, ffn, layers),
        *linear("up_proj", tokens, hidden, ffn, layers),
        *linear("down_proj", tokens, ffn, hidden, layers),
        *linear("lm_head", tokens, hidden, config.vocab_size, 1),
    ]


def fused_products(config: ModelConfig, batch_size: int, sequence_length: int) -> list[Product]:
    """The products that could replace q, k, v_proj and gate, up_proj."""
    tokens, hidden, layers = batch_size * sequence_length, config.hidden_size, config.num_layers
    qkv_size = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    return [
        *linear("qkv_proj", tokens, hidden, qkv_size, layers),
        *linear("gate_up_proj", tokens, hidden, 2 * config.intermediate_size, layers),
    ]


def time_product(product: Product, device: torch.device, dtype: torch.dtype) -> tuple[list[float], int]:
    """Times one product on random operands, its output newly allocated as in eager PyTorch.

    Short products are repeated within a sample, and the number of samples follows from the time budget.

    Returns:
        Milliseconds per product in each sample; how many products the samples hold together.
    """
    batch, m, n, k, layout = product.shape
    a = operand(batch, m, k, layout[0] == "T", device, dtype)
    b = operand(batch, k, n, layout[1] == "T", device, dtype)
    once = summarize(benchmark(lambda: a @ b, device, warmup=1, iterations=2))["median"]
    calls = max(1, round(SAMPLE_MS / once))
    samples = int(min(max(BUDGET_MS / (once * calls), MIN_SAMPLES), MAX_SAMPLES))

    def sample() -> None:
        for _ in range(calls):
            a @ b  # noqa: B018

    times = benchmark(sample, device, warmup=1, iterations=samples)
    return [milliseconds / calls for milliseconds in times], samples * calls


def operand(batch: int, rows: int, columns: int, transposed: bool, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Random [batch, rows, columns], without the first dimension for batch 1; stored transposed where asked."""
    stored = (columns, rows) if transposed else (rows, columns)
    result = torch.randn(stored if batch == 1 else (batch, *stored), device=device, dtype=dtype)
    return result.mT if transposed else result


def measure(
    config: ModelConfig, batch_sizes: list[int], sequence_lengths: list[int], device: torch.device, precision: Precision,
    allow_tf32: bool,
) -> dict[str, Any]:  # fmt: skip
    """Times all products over the grid, printing a line per round; sequence lengths only shape the products.

    Returns:
        The content of gemm_analysis.json.

    Raises:
        RunError: the operands of a product do not fit in memory.
    """
    grid = list(dict.fromkeys((batch_size, length) for batch_size in batch_sizes for length in sequence_lengths))
    wanted = {
        "gemms": [(point, product) for point in grid for product in products(config, *point)],
        "fused": [(point, product) for point in grid for product in fused_products(config, *point)],
    }
    distinct: dict[tuple, Product] = {}
    for _, product in wanted["gemms"] + wanted["fused"]:
        distinct.setdefault(product.shape, product)
    samples: dict[tuple, list[float]] = {shape: [] for shape in distinct}
    calls = dict.fromkeys(distinct, 0)
    peaks = []
    for i in range(ROUNDS):
        start = time.perf_counter()
        peaks.append(ceilings.measure(device, precision))
        for shape, product in distinct.items():
            with _out_of_memory_explained(product):
                times, count = time_product(product, device, precision.dtype)
            samples[shape] += times
            calls[shape] += count
        print(f"round {i + 1} of {ROUNDS}: {len(distinct)} shapes in {time.perf_counter() - start:.1f} s", flush=True)
    described = {
        name: [
            {"batch_size": point[0], "sequence_length": point[1]}
            | asdict(product)
            | {"ms": summarize(samples[product.shape]), "calls": calls[product.shape]}
            for point, product in point_products
        ]
        for name, point_products in wanted.items()
    }
    return {
        "schema": SCHEMA,
        "command": shlex.join(sys.argv),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": devices.describe(device),
        "environment": devices.environment(),
        "precision": {"compute": precision.name, "tf32": allow_tf32},
        "element_bytes": precision.dtype.itemsize,
        "model": config.model_dump(),
        "batch_sizes": batch_sizes,
        "sequence_lengths": sequence_lengths,
        "ceilings": {
            "flops_per_second": max(peak["flops_per_second"] for peak in peaks),
            "bytes_per_second": max(peak["bytes_per_second"] for peak in peaks),
            "operation_seconds": min(peak["operation_seconds"] for peak in peaks),
            "precision": precision.name,
        },
    } | described


@contextmanager
def _out_of_memory_explained(product: Product) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not devices.is_out_of_memory(error):
            raise
        shape = f"{product.batch} x [{product.m}, {product.k}] @ [{product.k}, {product.n}]"
        raise RunError(f"out of memory in {product.gemm}, {shape}: lower --batch-sizes or --sequence-lengths") from error
