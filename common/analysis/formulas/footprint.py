"""Memory of Version 1 by formula: persistent state (weights, gradients, optimizer state), activations that the forward pass
keeps for the backward pass, and bytes that the forward pass moves between memory and the processor.

The formulas follow the eager operations of `tiny_llama_v1.py` one by one. `tests/common/analysis/formulas/test_footprint.py`
checks them to the byte against the tensors that autograd saves and the kernels that the dispatcher runs. In comments and
docstrings n = B S D and f = B S F are numbers of elements.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from common.analysis.formulas import flops
from common.config import ModelConfig

FLOAT, HALF, INTEGER = 4, 2, 8  # bytes of a float32, of a float16 or bfloat16, of a token id


def states(config: ModelConfig) -> dict[str, int]:
    """Bytes that persist between steps: float32 weights, their gradients, and AdamW's two moments.

    AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101) keeps a mean and a mean square per weight, and a step counter per
    tensor. Autocast changes none of these; it copies the matrices for the products.
    """
    counted = flops.parameters(config)["total"]
    tensors = 9 * config.num_layers + 2  # 7 matrices and 2 norms a layer, the embedding, the last norm
    parts = {"weights": FLOAT * counted, "gradients": FLOAT * counted, "adamw": 2 * FLOAT * counted + FLOAT * tensors}
    return parts | {"total": sum(parts.values())}


def activations(config: ModelConfig, batch_size: int, sequence_length: int, autocast: str | None = None) -> dict[str, int]:
    """Bytes that autograd keeps between forward and backward, without weights and rotary tables, by part: embed, norm, attention
    (grows with S), scores (grows with S^2), mlp, loss, casts and total.

    A tensor that two operations keep counts once, in the part that kept it first. `autocast` is None for float32, else the device
    of the 16-bit run: `cpu` or `cuda`. On CUDA and ROCm autocast computes the softmax in float32, so the [B, H, S, S] weights are
    kept twice: in float32, and in 16 bits for the product.
    """
    layers, length = config.num_layers, sequence_length
    tokens = batch_size * length
    n, f = tokens * config.hidden_size, tokens * config.intermediate_size
    pairs = batch_size * config.num_attention_heads * length**2
    width = HALF if autocast else FLOAT
    inputs = {None: 1, "cpu": 3, "cuda": 3}[autocast]  # autocast casts the norm's output for each of Q, K and V anew
    scores = {None: FLOAT, "cpu": HALF, "cuda": FLOAT + HALF}[autocast]
    parts = {
        "embed": INTEGER * tokens,  # the token ids
        "norm": (2 * layers + 1) * FLOAT * (2 * n + tokens),  # x, x / rms and 1 / rms
        "attention": layers * width * (inputs + 4) * n,  # input; q, k and v with H heads; output before o_proj
        "scores": layers * (scores * pairs + length**2),  # softmax's output; the mask, a byte each
        "mlp": layers * width * ((2 if autocast else 1) * n + 4 * f),  # input; gate, up, silu(gate), silu(gate) * up
        "loss": width * n + FLOAT * tokens * config.vocab_size + INTEGER * tokens + FLOAT,  # input, log p, targets, count
        "casts": 0,
    }
    if autocast:  # all matrices, the head's included, and cos and sin once a layer
        counted = flops.parameters(config)
        parts["casts"] = HALF * (counted["total"] - counted["norms"] + layers * 2 * length * config.head_dim)
    return parts | {"total": sum(parts.values())}


def activations_of(run: Mapping[str, Any]) -> dict[str, int]:
    """`activations` at the sizes of a run, by its record."""
    autocast = None if run["precision"]["compute"] == "fp32" else "cpu" if run["device"]["kind"] == "cpu" else "cuda"
    training = run["training"]
    return activations(ModelConfig(**run["model"]), training["batch_size"], training["sequence_length"], autocast)


def least_peak(config: ModelConfig, batch_size: int, sequence_length: int, autocast: str | None = None) -> int:
    """A lower bound on the peak memory of a training step, in bytes.

    The peak is either at the end of the forward pass (weights, moments and all activations, but no gradients, which `zero_grad`
    released) or in the optimizer (weights, moments and all gradients). Temporary tensors of backward and optimizer, and the
    workspaces of libraries, come on top.
    """
    stays, kept = states(config), activations(config, batch_size, sequence_length, autocast)
    return max(stays["weights"] + stays["adamw"] + kept["total"], stays["total"])


class Operation(NamedTuple):
    """One kernel of the eager forward pass, run `calls` times."""

    span: str  # embed, norm, attention, mlp, loss or residual
    group: str  # what one fused kernel would compute together; each group is a row in the tables
    name: str
    calls: int
    flops: int  # of one call
    bytes: int  # likewise; every input is read once and every output is written once


def operations(config: ModelConfig, batch_size: int, sequence_length: int) -> list[Operation]:
    """The float32 forward pass with its loss, kernel by kernel, for B, H and S above 1 (else PyTorch omits some copies).

    An exponential, a root, a logarithm and a comparison count as one FLOP each. Views move no data and are left out.
    """
    layers, hidden, ffn, head_dim = config.num_layers, config.hidden_size, config.intermediate_size, config.head_dim
    length, tokens, heads = sequence_length, batch_size * sequence_length, batch_size * config.num_attention_heads
    kv_size = config.num_key_value_heads * head_dim
    n, m, f, logits = tokens * hidden, tokens * kv_size, tokens * ffn, tokens * config.vocab_size  # m: elements of k, and of v
    table = length * head_dim  # elements of cos, and of sin
    pairs, mask = heads * length**2, length**2
    grouped = config.num_key_value_heads < config.num_attention_heads

    result: list[Operation] = []

    def add(span: str, group: str, name: str, calls: int, flops: int, elements: int, other_bytes: int = 0) -> None:
        result.append(Operation(span, group, name, calls, flops, FLOAT * elements + other_bytes))

    def product(span: str, group: str, name: str, calls: int, rows: int, columns: int, inner: int, batch: int = 1) -> None:
        """`batch` times [rows, inner] @ [inner, columns]."""
        elements = rows * inner + inner * columns + rows * columns
        add(span, group, name, calls, 2 * batch * rows * columns * inner, batch * elements)

    product("attention", "attention projections", "q_proj", layers, tokens, hidden, hidden)
    product("attention", "attention projections", "k_proj, v_proj", 2 * layers, tokens, kv_size, hidden)
    product("attention", "attention projections", "o_proj", layers, tokens, hidden, hidden)
    product("attention", "attention products", "scores = q k^T", layers, length, length, head_dim, batch=heads)
    product("attention", "attention products", "out = p v", layers, length, head_dim, length, batch=heads)
    product("mlp", "mlp projections", "gate_proj, up_proj", 2 * layers, tokens, ffn, hidden)
    product("mlp", "mlp projections", "down_proj", layers, tokens, hidden, ffn)
    product("loss", "head", "lm_head", 1, tokens, config.vocab_size, hidden)

    add("embed", "embedding", "gather rows", 1, 0, 2 * n, INTEGER * tokens)

    norms = 2 * layers + 1
    add("norm", "RMSNorm", "x^2", norms, n, 2 * n)
    add("norm", "RMSNorm", "mean", norms, n, n + tokens)
    add("norm", "RMSNorm", "+ eps", norms, tokens, 2 * tokens)
    add("norm", "RMSNorm", "1 / sqrt", norms, tokens, 2 * tokens)
    add("norm", "RMSNorm", "x / rms", norms, n, 2 * n + tokens)
    add("norm", "RMSNorm", "* weight", norms, n, 2 * n + hidden)

    for x, size in (("q", n), ("k", m)):
        add("attention", "RoPE", f"{x} * cos", layers, size, 2 * size + table)
        add("attention", "RoPE", f"-{x}[half]", layers, size // 2, size)
        add("attention", "RoPE", f"rotate {x}: cat", layers, 0, 2 * size)
        add("attention", "RoPE", f"rotated {x} * sin", layers, size, 2 * size + table)
        add("attention", "RoPE", f"{x}: sum", layers, size, 3 * size)

    if grouped:
        add("attention", "copies", "repeat k and v", 2 * layers, 0, m + n)
    add("attention", "copies", "q contiguous" if grouped else "q, k, v contiguous", (1 if grouped else 3) * layers, 0, 2 * n)
    add("attention", "copies", "merge heads", layers, 0, 2 * n)
    add("attention", "scale, mask, softmax", "/ sqrt(Dh)", layers, pairs, 2 * pairs)
    add("attention", "scale, mask, softmax", "ones", layers, 0, 0, mask)
    add("attention", "scale, mask, softmax", "upper triangle", layers, 0, 0, 2 * mask)
    add("attention", "scale, mask, softmax", "masked_fill: copy", layers, 0, 2 * pairs)
    add("attention", "scale, mask, softmax", "masked_fill: fill -inf", layers, 0, 2 * pairs, mask)
    add("attention", "scale, mask, softmax", "softmax", layers, 5 * pairs, 2 * pairs)  # max, subtract, exp, sum, divide

    add("mlp", "SwiGLU", "silu", layers, 4 * f, 2 * f)  # negate, exp, add, divide
    add("mlp", "SwiGLU", "silu * up", layers, f, 3 * f)
    add("residual", "residual", "x + branch", 2 * layers, n, 3 * n)

    add("loss", "cross-entropy", "log softmax", 1, 5 * logits, 2 * logits)  # max, subtract, exp, sum, subtract
    add("loss", "cross-entropy", "mean of -log p", 1, tokens, tokens + 2, INTEGER * tokens)  # a gather; writes loss and count
    return result


def totals(operations: list[Operation], key: str) -> dict[str, dict[str, int]]:
    """Kernels, FLOPs and bytes of a forward pass, added up over `key`: span, group or name."""
    result: dict[str, dict[str, int]] = {}
    for operation in operations:
        row = result.setdefault(getattr(operation, key), {"kernels": 0, "flops": 0, "bytes": 0})
        row["kernels"] += operation.calls
        row["flops"] += operation.calls * operation.flops
        row["bytes"] += operation.calls * operation.bytes
    return result
