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
    ceilings         from common.training.ceilings.measure, the best of all rounds
    gemms, fused     a list each of {"batch_size", "sequence_length", "gemm", "phase", "batch", "m", "n", "k", "layout",
                     "per_step", "ms": {"median", "p20", "p80", "count"}, "calls"}
                     per_step: how many such products a step has (for a fused one: would have)
                     ms: of one product; `count` samples, each the mean of products back to back, `calls` in all

What the timed matrix products say: achieved rate, roofline bound, share of the step, and what fusing could gain.

For C [M, N] = A [M, K] @ B [K, N], `batch` times, with numbers of e bytes:

    work        2 batch M N K                           FLOP
    traffic     e batch (M K + K N + M N)               bytes: inputs read once, output written once
    intensity   work / traffic                          FLOP/byte
    bound       min(peak, intensity x bandwidth)        FLOP/s: the roofline (Williams, Waterman and Patterson 2009,
                                                        "Roofline", doi:10.1145/1498765.1498785)

Peak and bandwidth are the measured ceilings of the same device and precision. A product cannot be faster than any of three
times: work / peak, traffic / bandwidth, and what it costs to issue one operation. The longest of the three is its limit:
compute, memory or launch. Operands that stay in a cache between two repetitions can beat the memory bound.
"""

import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import device as devices
from common.analysis.formulas import operators
from common.analysis.output import plots, tables
from common.analysis.reports import roofline
from common.config import ModelConfig
from common.errors import RunError
from common.files import read_json, write_text
from common.precision import Precision
from common.timing import benchmark, summarize
from common.training import ceilings

import torch

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


SCHEMA = "tiny-llama-gemms/1"

# Kinds of product in the plots: the products of each, its colour and its marker.
KINDS = {
    "Q, K, V projections": (("q_proj", "k_proj", "v_proj"), plots.BLUE, "o"),
    "attention products": (("scores", "weighted_sum"), plots.ORANGE, "s"),
    "output projection": (("o_proj",), plots.SKY, "v"),
    "gate, up projections": (("gate_proj", "up_proj"), plots.GREEN, "^"),
    "down projection": (("down_proj",), plots.PURPLE, "D"),
    "LM head": (("lm_head",), plots.VERMILION, "P"),
}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PHASES = ("forward", "input_grad", "weight_grad")
DETAILS = {  # heading of a table: key of a row
    "GEMM": "gemm", "phase": "phase", "batch": "batch", "M": "m", "N": "n", "K": "k", "layout": "layout", "per step": "per_step",
    "ms": "ms", "p20": "p20", "p80": "p80", "samples": "samples", "calls": "calls", "TFLOP/s": "tflops",
    "FLOP/byte": "intensity", "bound TFLOP/s": "bound_tflops", "% of GEMM ceiling": "ceiling_percent", "limit": "limit",
    "% of GEMM time": "share_percent",
}  # fmt: skip


def analyze(path: Path, folder: Path) -> str:
    """Reads gemm_analysis.json and writes gemm_analysis.csv, .md and .png into `folder`.

    Returns:
        The summary for the terminal.

    Raises:
        UsageError: the file is not a complete one of schema tiny-llama-gemms/1.
    """
    measured = read_json(path, SCHEMA)
    rows = describe(measured)
    write_text(folder / "gemm_analysis.csv", tables.csv_text(list(rows[0]), (row.values() for row in rows)))
    write_text(folder / "gemm_analysis.md", report(measured, rows))
    plot(measured, rows, folder / "gemm_analysis.png")
    parts = [
        _conditions(measured),
        tables.text(*_grid_table(rows)),
        "fusing, ms for all in a step (separate / fused > 1: fused is faster):",
        tables.text(*_fusion_table(measured)),
        _doubts(_shapes(rows)),
        f"written: {', '.join(str(folder / f'gemm_analysis.{kind}') for kind in ('json', 'csv', 'md', 'png'))}",
    ]
    return "\n\n".join(parts)


def describe(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per product of the step and grid point: its shape, times (ms), rates and limit, by the formulas above."""
    ceilings, size = measured["ceilings"], measured["element_bytes"]
    peak, bandwidth = ceilings["flops_per_second"], ceilings["bytes_per_second"]
    totals = {key: _step_ms(gemms) for key, gemms in _by_grid_point(measured["gemms"]).items()}
    rows = []
    for gemm in measured["gemms"]:
        batch, m, n, k = gemm["batch"], gemm["m"], gemm["n"], gemm["k"]
        work, traffic = 2 * batch * m * n * k, size * batch * (m * k + k * n + m * n)
        ms = gemm["ms"]["median"]
        shape = {key: gemm[key] for key in ("batch_size", "sequence_length", "gemm", "phase", "batch", "m", "n", "k", "layout")}
        rows.append(
            shape
            | {
                "per_step": gemm["per_step"],
                "ms": ms,
                "p20": gemm["ms"]["p20"],
                "p80": gemm["ms"]["p80"],
                "samples": gemm["ms"]["count"],
                "calls": gemm["calls"],
                "gflop": work / 1e9,
                "tflops": work / ms / 1e9,
                "intensity": work / traffic,
                "bound_tflops": min(peak, work / traffic * bandwidth) / 1e12,
                "ceiling_percent": 100 * work / (ms / 1e3) / peak,
                "limit": operators.bound(work, traffic, ceilings)[1],
                "share_percent": 100 * ms * gemm["per_step"] / totals[gemm["batch_size"], gemm["sequence_length"]],
            }
        )
    return rows


def _by_grid_point(items: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """(batch size, sequence length) -> its items, in their order."""
    result = defaultdict(list)
    for item in items:
        result[item["batch_size"], item["sequence_length"]].append(item)
    return result


def _step_ms(gemms: list[dict[str, Any]]) -> float:
    return sum(gemm["ms"]["median"] * gemm["per_step"] for gemm in gemms)


def _conditions(measured: dict[str, Any]) -> str:
    ceilings, precision = measured["ceilings"], measured["precision"]
    tf32 = " (TF32 allowed)" if precision["tf32"] else ""
    return (
        f"{measured['device']['name']}, {precision['compute']}{tf32}, torch {measured['environment']['torch']}. "
        f"Measured ceilings: GEMM {ceilings['flops_per_second'] / 1e12:.3g} TFLOP/s, copy "
        f"{ceilings['bytes_per_second'] / 1e9:.3g} GB/s, {ceilings['operation_seconds'] * 1e6:.2g} us to issue an operation; "
        f"compute and memory bound meet at {ceilings['flops_per_second'] / ceilings['bytes_per_second']:.3g} FLOP/byte."
    )


def _shapes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each shape and layout that was timed."""
    return list({(row["batch"], row["m"], row["n"], row["k"], row["layout"]): row for row in rows}.values())


def _doubts(shapes: list[dict[str, Any]]) -> str:
    """How far the figures can be relied on."""
    beyond = sum(row["tflops"] > row["bound_tflops"] for row in shapes)
    unsteady = sum(row["p80"] > 1.5 * row["p20"] for row in shapes)
    return (
        f"Faster than their roofline bound: {beyond} of {len(shapes)} shapes. Repeated calls find operands in a cache, which the "
        "copy's bandwidth does not know, and the GEMM ceiling is the rate of one large square product, not a limit of nature. "
        f"80th percentile more than 1.5 times the 20th: {unsteady} of {len(shapes)} shapes. Many such shapes mean that something "
        "else was running: measure again on an idle machine, or on a busy CPU with OMP_NUM_THREADS=1."
    )


def _grid_table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[object]]]:
    """Per grid point: time of all products of a step, their rate, and the product that takes most of it."""
    header = ["B", "S", "GEMM ms/step", "GFLOP/step", "TFLOP/s", "% of GEMM ceiling", "largest", "its % of GEMM time"]
    body = []
    for (batch_size, length), items in _by_grid_point(rows).items():
        ms = sum(row["ms"] * row["per_step"] for row in items)
        gflop = sum(row["gflop"] * row["per_step"] for row in items)
        ideal = sum(row["ceiling_percent"] * row["ms"] * row["per_step"] for row in items)
        shares = _shares(items)
        largest = max(shares, key=shares.get)
        body.append([batch_size, length, ms, gflop, gflop / ms, ideal / ms, largest, shares[largest]])
    return header, body


def _shares(items: list[dict[str, Any]]) -> dict[str, float]:
    """Percent of the step's GEMM time per name, all phases together."""
    result: dict[str, float] = defaultdict(float)
    for row in items:
        result[row["gemm"]] += row["share_percent"]
    return dict(result)


def _fusion_table(measured: dict[str, Any]) -> tuple[list[str], list[list[object]]]:
    """Per number of tokens and fused product: ms per step apart and fused, and their ratio, in all and by phase."""
    header = ["tokens B S", "fused", "separate ms", "fused ms", "separate / fused", *PHASES]
    body = {}
    separate_by_point, fused_by_point = _by_grid_point(measured["gemms"]), _by_grid_point(measured["fused"])
    for (batch_size, length), fused in fused_by_point.items():
        for name, parts in FUSED.items():
            pairs = []
            for phase in PHASES:
                apart = [g for g in separate_by_point[batch_size, length] if g["gemm"] in parts and g["phase"] == phase]
                together = [g for g in fused if g["gemm"] == name and g["phase"] == phase]
                pairs.append((_step_ms(apart), _step_ms(together)))
            apart_ms, together_ms = (sum(times) for times in zip(*pairs, strict=True))
            ratios = [apart / together for apart, together in pairs]
            body[batch_size * length, name] = [batch_size * length, name, apart_ms, together_ms, apart_ms / together_ms, *ratios]
    return header, [body[key] for key in sorted(body)]


def report(measured: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The Markdown report."""
    names = list(dict.fromkeys(row["gemm"] for row in rows))
    points = _by_grid_point(rows)
    shares = [[batch_size, length, *(_shares(items)[name] for name in names)] for (batch_size, length), items in points.items()]
    samples, calls = [row["samples"] for row in rows], [row["calls"] for row in rows]
    shapes = _shapes(rows)
    parts = [
        "# Matrix products of a training step",
        _conditions(measured),
        f"Model: {tables.letters(measured['model'])}. Made by `{measured['command']}` on {measured['date']}.",
        "Each product was timed alone, in rounds over all of them. ms is the median, with the 20th and 80th percentile, of "
        f"{min(samples)} to {max(samples)} samples; a sample is the time per product over calls back to back, and a row has "
        f"{min(calls):,} to {max(calls):,} calls. Products of one shape and layout share one measurement: {len(shapes)} were "
        f"timed for {len(rows)} rows.",
        _doubts(shapes),
        "![Roofline, and share of GEMM time](gemm_analysis.png)",
        "## The step's products together",
        "Sums over all products of a step, forward and backward. Norms, softmax, activations, the optimizer and the gaps between "
        "operations are not in them.",
        tables.markdown(*_grid_table(rows)).strip(),
        "## Share of GEMM time, percent",
        "Forward and both gradients together.",
        tables.markdown(["B", "S", *names], shares).strip(),
        "## Separate against fused products",
        "qkv_proj is one product with N = (H + 2 K) Dh in place of three, gate_up_proj one with N = 2 F in place of two. Times "
        "in ms for all in a step; the last columns are the ratio by phase. A ratio above 1 says that the fused product is "
        "faster. Fusing also saves the additions of the separate input gradients, which are not timed here.",
        tables.markdown(*_fusion_table(measured)).strip(),
        "## Every product",
        "C [M, N] = A [M, K] @ B [K, N], `batch` times. Layout: N stored row by row, T stored transposed. Bound: the roofline at "
        "this intensity. Limit: the longest of the times for work at the GEMM ceiling (compute), bytes at the copy's bandwidth "
        "(memory) and issuing one operation (launch).",
    ]
    for (batch_size, length), items in points.items():
        table = tables.markdown(list(DETAILS), [[row[key] for key in DETAILS.values()] for row in items])
        parts += [f"### B = {batch_size}, S = {length}", table.strip()]
    return "\n\n".join(parts) + "\n"


def plot(measured: dict[str, Any], rows: list[dict[str, Any]], path: Path) -> None:
    """Left the roofline with a point per product and phase, right the share of GEMM time over the grid."""
    from matplotlib.lines import Line2D

    figure = plots.new(14, 6.5)
    model, precision = measured["model"], measured["precision"]["compute"]
    figure.suptitle(
        f"GEMMs of a training step: D {model['hidden_size']}, L {model['num_layers']}, F {model['intermediate_size']}, "
        f"V {model['vocab_size']}, {precision}, {measured['device']['name']}"
    )
    left, right = figure.subplots(1, 2)
    _roofline(left, measured["ceilings"], rows)
    _share_bars(right, rows)
    handles = [
        Line2D([], [], color=colour, marker=marker, markersize=8, linestyle="none", label=label)
        for label, (_, colour, marker) in KINDS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    plots.save(figure, path)


def _roofline(axes: Any, ceilings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    roofline.draw_roof(axes, ceilings, [row["intensity"] for row in rows])
    for names, colour, marker in KINDS.values():
        for forward in (True, False):
            chosen = [row for row in rows if row["gemm"] in names and (row["phase"] == "forward") == forward]
            axes.scatter(
                [row["intensity"] for row in chosen], [row["tflops"] for row in chosen], marker=marker, s=42,
                facecolors=colour if forward else "none", edgecolors=colour, linewidths=1.2, zorder=3,
            )  # fmt: skip
    axes.set_title(f"Roofline (filled: forward, hollow: gradients)\n{roofline.describe(ceilings)}")


def _share_bars(axes: Any, rows: list[dict[str, Any]]) -> None:
    points = _by_grid_point(rows)
    labels = [f"{batch_size} x {length}" for batch_size, length in points]
    bottoms = [0.0] * len(points)
    for names, colour, _ in KINDS.values():
        heights = [sum(row["share_percent"] for row in items if row["gemm"] in names) for items in points.values()]
        axes.bar(labels, heights, bottom=bottoms, color=colour, edgecolor="white")
        for i, height in enumerate(heights):
            if height >= 4:
                axes.text(i, bottoms[i] + height / 2, f"{height:.0f}", ha="center", va="center", fontsize=9)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set(title="Share of GEMM time in a step", ylabel="percent", ylim=(0, 100))
    axes.set_xlabel("batch size x sequence length")
    axes.tick_params(axis="x", rotation=45)
