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

Each product is compared with the roofline (`tracepage.views.roofline`). It does 2 batch M N K FLOPs
and moves at least batch (M K + K N + M N) numbers. Its limit is the longest of three times: the
FLOPs at the measured peak (compute), the bytes at the measured bandwidth (memory), and the time to
issue one operation (launch).
"""

import itertools
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from common import device as devices
from common.config import ModelConfig
from common.precision import AMP_DTYPES, Precision
from common.timing import benchmark, summarize
from common.training import ceilings, record
from tracepage import files
from tracepage.errors import RunError
from tracepage.show import plots, run_facts, tables
from tracepage.show.report import Report
from tracepage.terminal import progress
from tracepage.views import roofline

import pandas
import torch

PHASES = ("forward", "input_grad", "weight_grad")
ROUNDS = 3
BUDGET_MS = 40.0  # of samples for one product and round
# for one product and round
MIN_SAMPLES = 3
MAX_SAMPLES = 30
SAMPLE_MS = 1.0  # a sample repeats a short product until it lasts about this long
POINT = ["batch_size", "sequence_length"]  # of the grid
# columns of the table
SHOWN = ["gemm", "phase", "m", "n", "k", "ms", "tflops", "intensity", "ceiling_percent", "limit"]
Shape = tuple[int, int, int, int, str]  # batch, M, N, K, layout


class Product(NamedTuple):
    """`per_step` products C [batch, m, n] = A [batch, m, k] @ B [batch, k, n] of a training step."""

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
    forward = 1, tokens, outputs, inputs, "NT"
    return three(
        gemm,
        per_step,
        forward,
        (1, tokens, inputs, outputs, "NN"),
        (1, outputs, inputs, tokens, "TN"),
    )


def attention(config: ModelConfig, batch_size: int, length: int) -> list[Product]:
    """The products of attention: scores = q k^T and out = p v, over all S^2 pairs, and their
    gradients.
    """
    batch = batch_size * config.num_attention_heads
    head = config.head_dim
    layers = config.num_layers
    # torch.matmul folds batch and heads. With H = K it must copy k^T for that, row by row; with K <
    # H it need not.
    keys, keys_grad = (
        ("NT", "NN") if config.num_key_value_heads < config.num_attention_heads else ("NN", "NT")
    )
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
        shape = (columns, rows) if transposed else (rows, columns)
        stored = torch.randn(
            shape if batch == 1 else (batch, *shape), device=precision.device, dtype=precision.dtype
        )
        return stored.mT if transposed else stored

    try:
        a = operand(m, k, layout[0] == "T")
        b = operand(k, n, layout[1] == "T")
        once = summarize(benchmark(lambda: a @ b, precision.device, warmup=1, iterations=2))[
            "median"
        ]
    except (RuntimeError, MemoryError) as error:
        if not devices.is_out_of_memory(error):
            raise
        raise RunError(
            f"out of memory in {product.gemm}: lower --batch-sizes or --sequence-lengths"
        ) from error
    calls = max(1, round(SAMPLE_MS / once))
    samples = int(min(max(BUDGET_MS / (once * calls), MIN_SAMPLES), MAX_SAMPLES))

    def sample() -> None:
        for _ in range(calls):
            a @ b  # noqa: B018

    times = benchmark(sample, precision.device, warmup=1, iterations=samples)
    return [milliseconds / calls for milliseconds in times]


def measure(
    config: ModelConfig, asked: Namespace, device: torch.device, path: Path
) -> dict[str, Any]:
    """Times all products over the grid that the script's flags ask for, and prints a line for each
    round.

    After each point of the grid in each round it writes gemm_analysis.json (`path`), with the
    points of which all products are timed. Sequence lengths only shape the products. RunError: the
    operands of a product do not fit in memory.
    """
    devices.configure(device, seed=0, allow_tf32=asked.allow_tf32)
    precision = Precision(device, AMP_DTYPES.get(asked.dtype))
    grid = list(dict.fromkeys(itertools.product(asked.batch_sizes, asked.sequence_lengths)))
    samples: defaultdict[Shape, list[float]] = defaultdict(list)
    measured = record.header(
        "tiny-llama-gemms/1", device, precision.name, asked.allow_tf32, config
    ) | {
        "element_bytes": precision.dtype.itemsize,
        "batch_sizes": asked.batch_sizes,
        "sequence_lengths": asked.sequence_lengths,
        "ceilings": ceilings.measure(device, precision),
    }

    complete: list[tuple[int, int]] = []  # the points of which all products are timed
    for number in range(1, ROUNDS + 1):
        start = time.perf_counter()
        timed = set()
        with progress(f"round {number} of {ROUNDS}"):
            for point in grid:
                for product in products(config, *point):
                    if product.shape not in timed:
                        samples[product.shape] += time_product(product, precision)
                        timed.add(product.shape)
                complete += [point] if number == 1 else []
                measured["gemms"] = [
                    dict(zip(POINT, each, strict=True))
                    | product._asdict()
                    | {"ms": summarize(samples[product.shape])}
                    for each in complete
                    for product in products(config, *each)
                ]
                files.write_measurement(path, measured, "--output-dir")
        print(
            f"round {number} of {ROUNDS}: {len(timed)} shapes in {time.perf_counter() - start:.1f} s",
            flush=True,
        )
    return measured


def analyze(measured: Mapping[str, Any]) -> Report:
    """The report on what was measured."""
    rows = describe(measured)
    conditions = run_facts.describe({**measured, "training": {}}, *POINT)
    shapes = rows.drop_duplicates(["batch", "m", "n", "k", "layout"])
    noisy = (100 * (shapes["p80"] - shapes["p20"]) / shapes["ms"] > run_facts.NOISY).sum()
    report = Report("Matrix products of a training step")
    report.text(
        f"{conditions}; {roofline.describe(measured['ceilings'])}. Issuing one operation takes "
        f"{tables.format_time(1e3 * measured['ceilings']['operation_seconds'])}.",
        f"Made by `{measured['command']}` on {measured['date']}.",
        "Each product was timed alone, in rounds over all of them. Times are medians. Products of one shape and layout share one "
        "measurement. Repeated calls find operands in a cache, so a small product can be faster than its roofline bound.",
        f"Noisy, since p20 to p80 spans more than {run_facts.NOISY} % of the median: {noisy} of {len(shapes)} shapes.",
    )
    report.figure(
        lambda: figure(measured, rows, conditions), "gemm_analysis", "Roofline of all products"
    )
    last = rows[(rows[POINT] == rows[POINT].iloc[-1]).all(axis=1)]
    size = " x ".join(map(str, last[POINT].iloc[0]))
    report.table(
        SHOWN,
        last[SHOWN].astype(object).to_numpy().tolist(),
        f"Products at B x S = {size}; the CSV file has all",
    )
    report.csv("gemm_analysis", list(rows.columns), rows.astype(object).to_numpy().tolist())
    report.json("gemm_analysis", measured)
    return report


def describe(measured: Mapping[str, Any]) -> pandas.DataFrame:
    """A row of the CSV for each product of the step at each point of the grid.

    `limit` is the longest of the times for its work at the GEMM ceiling (compute), for its bytes at
    the copy's bandwidth (memory), and for issuing one operation (launch); `intensity` is in
    FLOP/byte.
    """
    timings = measured["gemms"]
    best = measured["ceilings"]
    rows = pandas.DataFrame(
        [{**timing, **timing["ms"], "ms": timing["ms"]["median"]} for timing in timings]
    )
    rows = rows[[*POINT, *Product._fields, "ms", "p20", "p80"]]
    batch, m, n, k = (rows[name].astype(float) for name in ("batch", "m", "n", "k"))
    flops = 2 * batch * m * n * k
    moved = measured["element_bytes"] * batch * (m * k + k * n + m * n)
    seconds = {
        "compute": flops / best["flops_per_second"],
        "memory": moved / best["bytes_per_second"],
    }
    least = pandas.DataFrame(seconds).assign(launch=best["operation_seconds"])
    return rows.assign(
        gflop=flops / 1e9,
        tflops=flops / rows["ms"] / 1e9,
        intensity=flops / moved,
        ceiling_percent=1e5 * least["compute"] / rows["ms"],
        limit=least.idxmax(axis=1),
    )


def figure(measured: Mapping[str, Any], rows: pandas.DataFrame, title: str) -> "plots.Figure":
    """The roofline with a point for each product and phase."""
    result = plots.new(8, 6)
    result.suptitle(f"Matrix products of a training step: {title}", wrap=True)
    axes = result.subplots()
    roofline.draw_roof(axes, measured["ceilings"], rows["intensity"])
    axes.set_title(roofline.describe(measured["ceilings"]), fontsize=10)
    for i, (name, own) in enumerate(rows.groupby("gemm", sort=False)):
        colour, marker = plots.style(i).values()
        axes.scatter(own["intensity"], own["tflops"], c=colour, marker=marker, label=name)
    result.legend(loc="outside lower center", ncols=5)
    return result
