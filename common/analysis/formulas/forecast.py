"""A forecast of a version's training step in bf16, by formula and data sheet: three lower bounds on its time.

    compute    FLOPs of the matrix products over the peak; Version 1 executes all S^2 scores, the others the causal ones
    memory     bytes that its operators read and write over the bandwidth of the data sheet
    launch     its kernels times what the host takes to launch one, or what a node of a captured graph takes

The step takes at least the largest. Bytes count as in `footprint`, with 2 for each element of an activation, though some have 4.
The embedding, the last norm, casts of activations, and what epilogues write are left out. The bound by bytes holds where nothing
stays in a cache between two kernels, as at large sizes.
"""

from collections.abc import Iterator
from typing import NamedTuple

from common.analysis.formulas import flops, footprint
from common.analysis.formulas.footprint import FLOAT, HALF
from common.analysis.formulas.operators import linear_products
from common.config import ModelConfig

LAUNCH = 6.0e-6  # s: the least `operation_seconds` in results/h100 and results/h200 (6.0 to 11.6 us); an AMD host may differ
NODE = 0.94e-6  # s: an empty kernel in a graph on an H200 (LOG.md)

# Elements that each operator of PyTorch's `foreach` AdamW moves for each weight; a fused kernel moves 7 in all.
FOREACH_ADAMW = {"mul_": 2, "lerp_": 3, "mul_ (square)": 2, "addcmul_": 3, "sqrt": 2, "div_": 2, "add_": 2, "addcdiv_": 4}


class Change(NamedTuple):
    """One fusion in one pass over one layer: the numbers of operators and of float32 bytes, before and after it."""

    fusion: str
    phase: str
    operators: tuple[int, int]
    bytes: tuple[int, int]


def layer_changes(config: ModelConfig, batch_size: int, sequence_length: int) -> list[Change]:
    """The changes that the fusions make in one layer of Version 1, forward and backward, for B, H and S above 1.

    No fusion changes the output and down projections. With these two, the numbers before add up to the layer.
    """
    layers, hidden, ffn = config.num_layers, config.hidden_size, config.intermediate_size
    tokens, kv_size = batch_size * sequence_length, config.num_key_value_heads * config.head_dim
    n, m, f, table = tokens * hidden, tokens * kv_size, tokens * ffn, sequence_length * config.head_dim
    rows = tokens * config.num_attention_heads
    grouped = config.num_key_value_heads < config.num_attention_heads
    eager = footprint.totals(footprint.operations(config, batch_size, sequence_length), "group")
    core = sum(eager[group]["bytes"] for group in footprint.ONE_KERNEL["attention core"]) // layers
    one_core = footprint.one_kernel_bytes(config, batch_size, sequence_length)["attention core"] // layers
    # Backward: 4 products; derivatives of softmax, mask (a copy and a fill) and scale; copies of four gradients (out, q, k, v);
    # with K < H two sums over the query heads that share a head.
    back = FLOAT * (13 * rows * sequence_length + 12 * n + 4 * m + (2 * (n + m) if grouped else 0)) + sequence_length**2
    one_back = FLOAT * (4 * n + 4 * m + rows)  # q, k, v, output, its gradient, log-sum-exp in; three gradients out
    return [
        *_joined("Q, K, V: one product", tokens, hidden, (hidden, kv_size, kv_size)),
        Change("RoPE", "forward", (10, 1), (FLOAT * (10 * (n + m) + 4 * table), FLOAT * 2 * (n + m + table))),
        Change("RoPE", "backward", (10, 1), (FLOAT * (10 * (n + m) + 4 * table), FLOAT * 2 * (n + m + table))),
        Change("flash attention", "forward", (12, 1), (core, one_core)),
        Change("flash attention", "backward", (14 if grouped else 12, 1), (back, one_back)),
        *_joined("gate, up: one product", tokens, hidden, (ffn, ffn)),
        Change("SwiGLU", "forward", (2, 1), (FLOAT * 5 * f, FLOAT * 3 * f)),
        Change("SwiGLU", "backward", (3, 1), (FLOAT * 9 * f, FLOAT * 5 * f)),
        _twice("forward", 7, 10 * n + 6 * tokens + hidden, 4 * n + tokens + hidden),
        _twice("backward", 15, 26 * n + 10 * tokens + 2 * hidden, 4 * n + tokens + 2 * hidden),
    ]


def _twice(phase: str, operators: int, before: int, after: int) -> Change:
    return Change("residual + RMSNorm, twice", phase, (2 * operators, 2), (2 * FLOAT * before, 2 * FLOAT * after))


def _joined(fusion: str, tokens: int, inputs: int, outputs: tuple[int, ...]) -> Iterator[Change]:
    """Products of one input [tokens, inputs] with several weights [inputs, output], and one product with all of the weights.

    The backward pass has two products for each. It adds up the gradients of the input before the fusion, and joins those of the
    outputs after it.
    """
    parts, x, w, y = len(outputs), tokens * inputs, inputs * sum(outputs), tokens * sum(outputs)
    apart, one = parts * x + w + y, x + w + y
    yield Change(fusion, "forward", (parts, 1), (FLOAT * apart, FLOAT * one))
    before, after = 2 * apart + (parts - 1) * 3 * x, 2 * one + 2 * y
    yield Change(fusion, "backward", (3 * parts - 1, 3), (FLOAT * before, FLOAT * after))


class Version(NamedTuple):
    """What a version does otherwise than Version 1."""

    fused: frozenset[str] = frozenset()  # of the fusions of `layer_changes`
    ultra: bool = False  # RoPE and SwiGLU in epilogues, no gradients to join, 16-bit weights from a fused AdamW, and one graph


PRODUCTS = ("Q, K, V: one product", "gate, up: one product")
KERNELS = frozenset((*PRODUCTS, "flash attention", "RoPE", "SwiGLU", "residual + RMSNorm, twice"))
VERSIONS = (Version(), Version(frozenset((*PRODUCTS, "flash attention"))), Version(KERNELS), Version(KERNELS, ultra=True))
EPILOGUES = (("RoPE", "forward"), ("RoPE", "backward"), ("SwiGLU", "forward"))


class Forecast(NamedTuple):
    """Lower bounds on the seconds of a step."""

    compute: float
    memory: float
    launch: float


def work(config: ModelConfig, batch_size: int, sequence_length: int, version: int) -> tuple[int, int, int]:
    """FLOPs, bytes and kernels of a step at least, in bf16; versions count from 1."""
    own = VERSIONS[version - 1]
    layers, hidden, ffn = config.num_layers, config.hidden_size, config.intermediate_size
    tokens, kv_size = batch_size * sequence_length, config.num_key_value_heads * config.head_dim
    logits, counted = tokens * config.vocab_size, flops.parameters(config)
    kernels = moved = 0
    for change in layer_changes(config, batch_size, sequence_length):
        if not (own.ultra and (change.fusion, change.phase) in EPILOGUES):
            fused = change.fusion in own.fused
            kernels += layers * change.operators[fused]
            moved += layers * change.bytes[fused] * HALF // FLOAT
    products = [
        *linear_products(layers, tokens, hidden, hidden, HALF),  # output
        *linear_products(layers, tokens, ffn, hidden, HALF),  # down
        *linear_products(1, tokens, hidden, config.vocab_size, HALF),  # head
    ]
    kernels += sum(int(product.calls) for product in products)
    moved += sum(int(product.calls * product.bytes) for product in products)
    if own.fused >= KERNELS:
        kernels += 1  # logits to their gradient, in place
        moved += 2 * HALF * logits
    else:
        kernels += 7  # a cast, log softmax and the mean of -log p; the gradients of all, with a fill
        moved += (2 * (HALF + FLOAT) + 6 * FLOAT) * logits
    if own.ultra:
        kernels += 1 - 2 * layers  # AdamW; nothing to join
        moved += footprint.optimizer_bytes(config) - layers * HALF * 2 * tokens * (hidden + 2 * kv_size + 2 * ffn)
    else:
        matrices = counted["total"] - counted["norms"]
        kernels += len(FOREACH_ADAMW)
        moved += FLOAT * sum(FOREACH_ADAMW.values()) * counted["total"] + 2 * (HALF + FLOAT) * matrices  # casts there and back
    return flops.training_step(config, batch_size, sequence_length, causal=version > 1)["total"], moved, kernels


def forecast(config: ModelConfig, batch_size: int, sequence_length: int, version: int, peaks: dict[str, float]) -> Forecast:
    """The bounds on a device with these data-sheet `peaks`; `version` as for `work`."""
    executed, moved, kernels = work(config, batch_size, sequence_length, version)
    launch = NODE if VERSIONS[version - 1].ultra else LAUNCH
    return Forecast(executed / peaks["bf16"], moved / peaks["bandwidth"], kernels * launch)
