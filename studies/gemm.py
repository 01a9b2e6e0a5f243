"""Times every matrix product (GEMM) of a training step, each alone, over a grid of batch sizes and
sequence lengths.

A linear layer y = x W^T is three products of a step. With T = B S tokens, and W [out, in] stored as
nn.Linear does:

    forward        y  [T, out]  = x    [T, in]  @ W^T [in, out]    layout NT
    input_grad     dx [T, in]   = dy   [T, out] @ W   [out, in]    layout NN
    weight_grad    dW [out, in] = dy^T [out, T] @ x   [T, in]      layout TN

Attention's two products are batched over B H heads; their "input" is the left operand and their
"weight" is the right one. All are C [M, N] = A [M, K] @ B [K, N], `batch` times. The two letters of
a layout stand for A and B: N is stored row by row, T is stored transposed. Shapes and layouts are
those that eager PyTorch runs in Version 1 from batch 2 on.

Products of one shape and layout are timed once and share the result, such as q_proj and o_proj. All
are timed in several rounds, so that a slow spell of the machine affects every product. Operands are
used again and again, so small ones are read from a cache.

`tracepage.views.gemm_operations` compares the products with the roofline.
"""

import itertools
import time
from argparse import Namespace
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from common import device as devices
from common.config import ModelConfig
from common.precision import AMP_DTYPES, Precision
from common.timing import benchmark, summarize
from common.training import ceilings, record
from tracepage import files
from tracepage.errors import RunError
from tracepage.terminal import progress
from tracepage.views.gemm_operations import POINT, SCHEMA

import torch

PHASES = ("forward", "input_grad", "weight_grad")
ROUNDS = 3
BUDGET_MS = 40.0  # of samples for one product and round
MIN_SAMPLES = 3  # of one product and round
MAX_SAMPLES = 30
SAMPLE_MS = 1.0  # a sample repeats a short product until it lasts about this long
Shape = tuple[int, int, int, int, str]  # batch, M, N, K, layout


class Product(NamedTuple):
    """`per_step` products C [batch, m, n] = A [batch, m, k] @ B [batch, k, n] of a step."""

    gemm: str
    phase: str  # of PHASES
    batch: int
    m: int
    n: int
    k: int
    layout: str
    per_step: int

    @property
    def shape(self) -> Shape:
        return self.batch, self.m, self.n, self.k, self.layout


def three(gemm: str, per_step: int, *shapes: Shape) -> list[Product]:
    """A forward product and those of its two gradients."""
    return [
        Product(gemm, phase, *shape, per_step) for phase, shape in zip(PHASES, shapes, strict=True)
    ]


def linear(gemm: str, tokens: int, inputs: int, outputs: int, per_step: int) -> list[Product]:
    """The products of a linear layer from `inputs` to `outputs` features."""
    forward = (1, tokens, outputs, inputs, "NT")
    input_grad = (1, tokens, inputs, outputs, "NN")
    weight_grad = (1, outputs, inputs, tokens, "TN")
    return three(gemm, per_step, forward, input_grad, weight_grad)


def attention(config: ModelConfig, batch_size: int, length: int) -> list[Product]:
    """The products of attention: scores = q k^T and out = p v, over all S^2 pairs, and their
    gradients.
    """
    batch = batch_size * config.num_attention_heads
    head = config.head_dim
    layers = config.num_layers
    # torch.matmul folds batch and heads. With H = K it must copy k^T for that, row by row; with
    # K < H it need not.
    if config.num_key_value_heads < config.num_attention_heads:
        keys = "NT"
        keys_grad = "NN"
    else:
        keys = "NN"
        keys_grad = "NT"
    square = (batch, length, length, head)
    narrow = (batch, length, head, length)
    wide = (batch, head, length, length)
    return [
        *three("scores", layers, (*square, keys), (*narrow, keys_grad), (*wide, "TN")),
        *three("weighted_sum", layers, (*narrow, "NN"), (*square, "NT"), (*narrow, "TN")),
    ]


def products(config: ModelConfig, batch_size: int, sequence_length: int) -> list[Product]:
    """All products of a training step, in the order of the forward pass."""
    tokens = batch_size * sequence_length
    hidden = config.hidden_size
    ffn = config.intermediate_size
    layers = config.num_layers
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


def time_product(product: Product, precision: Precision) -> list[float]:
    """Milliseconds of a product on random operands, in several samples. RunError: memory ran out.

    The output is newly allocated, as in eager PyTorch.
    """
    batch, m, n, k, layout = product.shape

    def operand(rows: int, columns: int, transposed: bool) -> torch.Tensor:
        shape = [columns, rows] if transposed else [rows, columns]
        if batch > 1:
            shape.insert(0, batch)
        stored = torch.randn(shape, device=precision.device, dtype=precision.dtype)
        return stored.mT if transposed else stored

    try:
        a = operand(m, k, layout[0] == "T")
        b = operand(k, n, layout[1] == "T")
        first = benchmark(lambda: a @ b, precision.device, warmup=1, iterations=2)
    except (RuntimeError, MemoryError) as error:
        if not devices.is_out_of_memory(error):
            raise
        raise RunError(
            f"out of memory in {product.gemm}: lower --batch-sizes or --sequence-lengths"
        ) from error
    once = summarize(first)["median"]
    calls = max(1, round(SAMPLE_MS / once))
    samples = int(min(max(BUDGET_MS / (once * calls), MIN_SAMPLES), MAX_SAMPLES))

    def sample() -> None:
        for _ in range(calls):
            a @ b  # noqa: B018

    times = benchmark(sample, precision.device, warmup=1, iterations=samples)
    return [milliseconds / calls for milliseconds in times]


def measure(config: ModelConfig, asked: Namespace, device: torch.device, path: Path) -> None:
    """Times all products over the grid that the script's flags ask for, and prints a line for each
    round.

    After each point of the grid in each round it writes gemm_analysis.json (`path`), with the
    points of which all products are timed. Sequence lengths only shape the products. RunError: the
    operands of a product do not fit in memory.
    """
    devices.configure(device, seed=0, allow_tf32=asked.allow_tf32)
    precision = Precision(device, AMP_DTYPES.get(asked.dtype))
    grid = dict.fromkeys(itertools.product(asked.batch_sizes, asked.sequence_lengths))
    samples: defaultdict[Shape, list[float]] = defaultdict(list)
    measured = record.header(SCHEMA, device, precision.name, asked.allow_tf32, config) | {
        "element_bytes": precision.dtype.itemsize,
        "batch_sizes": asked.batch_sizes,
        "sequence_lengths": asked.sequence_lengths,
        "ceilings": ceilings.measure(device, precision),
    }
    complete: dict[tuple[int, int], list[Product]] = {}  # points of which all products are timed
    for number in range(1, ROUNDS + 1):
        start = time.perf_counter()
        timed = set()
        with progress(f"round {number} of {ROUNDS}"):
            for point in grid:
                complete[point] = products(config, *point)
                for product in complete[point]:
                    if product.shape not in timed:
                        samples[product.shape] += time_product(product, precision)
                        timed.add(product.shape)
                measured["gemms"] = [
                    dict(zip(POINT, size, strict=True))
                    | product._asdict()
                    | {"ms": summarize(samples[product.shape])}
                    for size, step_products in complete.items()
                    for product in step_products
                ]
                files.write_measurement(path, measured, "--output-dir")
        seconds = time.perf_counter() - start
        print(f"round {number} of {ROUNDS}: {len(timed)} shapes in {seconds:.1f} s", flush=True)
