"""Parameters and floating-point operations of the model, by formula.

A multiplication and an addition count as two. Only matrix products count, as in the literature on
model FLOPs utilization (Kaplan et al. 2020, arXiv:2001.08361, section 2.1; Chowdhery et al. 2022,
arXiv:2204.02311, appendix B): norms, rotary embedding, softmax and activations are below one
percent. The backward pass computes two products of the same size for each product of the forward
pass, so it counts twice.

Causal attention needs only the S (S + 1) / 2 scores at or before each position: the `causal` count.
Code that computes all S^2 scores and masks half of them, like Version 1, executes the `full` count.
Utilization uses the causal count in every version, so that no version gets credit for work whose
result is discarded.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Protocol


class Sizes(Protocol):
    """Sizes of a LLaMA with tied embeddings, such as `common.config.ModelConfig`."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def sizes(model: Mapping[str, Any]) -> Sizes:
    """The sizes of a record's `model`."""
    head_dim = model["hidden_size"] // model["num_attention_heads"]
    return SimpleNamespace(**model, head_dim=head_dim)  # type: ignore[return-value]


def parameters(config: Sizes) -> dict[str, int]:
    """Parameters by part. The head shares the weight of the embedding and adds none."""
    hidden = config.hidden_size
    kv_size = config.num_key_value_heads * config.head_dim
    parts = {
        "embedding": config.vocab_size * hidden,
        "attention": config.num_layers * (2 * hidden * hidden + 2 * hidden * kv_size),
        "mlp": config.num_layers * 3 * hidden * config.intermediate_size,
        "norms": (2 * config.num_layers + 1) * hidden,
    }
    return parts | {"total": sum(parts.values())}


def forward(
    config: Sizes, batch_size: int, sequence_length: int, causal: bool = True
) -> dict[str, int]:
    """FLOPs of one forward pass: projections (Q, K, V and output), attention (scores and weighted
    sum), mlp, head, and total.
    """
    tokens = batch_size * sequence_length
    pairs = sequence_length * (sequence_length + 1) // 2 if causal else sequence_length**2
    counted = parameters(config)
    parts = {
        "projections": 2 * tokens * counted["attention"],
        "attention": 2 * 2 * batch_size * config.num_layers * config.hidden_size * pairs,
        "mlp": 2 * tokens * counted["mlp"],
        "head": 2 * tokens * config.hidden_size * config.vocab_size,
    }
    return parts | {"total": sum(parts.values())}


def training_step(
    config: Sizes, batch_size: int, sequence_length: int, causal: bool = True
) -> dict[str, int]:
    """FLOPs of forward, backward (twice the forward) and both."""
    once = forward(config, batch_size, sequence_length, causal)["total"]
    return {"forward": once, "backward": 2 * once, "total": 3 * once}
