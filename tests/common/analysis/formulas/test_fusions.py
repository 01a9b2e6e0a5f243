"""Operators and bytes of the fusions against what PyTorch runs in Versions 1 and 2, forward and backward."""

from collections.abc import Callable

from common.analysis.formulas import footprint
from common.analysis.formulas.fusions import Change, layer_changes
from common.config import ModelConfig
from common.rope import rope_tables
from tests.common.analysis.formulas.conftest import CONFIGS
from tests.operators import OperatorMode, stored_bytes
from version1_pytorch_baseline import tiny_llama_v1 as v1
from version2_pytorch_fused import tiny_llama_v2 as v2

import pytest
import torch
from torch import Tensor


class Operators(OperatorMode):
    """Counts the operators that are not views, and the bytes of their arguments and results, each tensor once."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.bytes = 0, 0

    def note(self, name, read, written):
        self.count += 1
        self.bytes += sum(map(stored_bytes, (*{id(t): t for t in read}.values(), *written)))


def both_passes(function: Callable[..., Tensor | tuple[Tensor, ...]], *arguments: Tensor) -> list[tuple[int, int]]:
    """Operators and bytes, forward and backward."""
    leaves = [argument.detach().requires_grad_() for argument in arguments]
    with Operators() as forward:
        out = function(*leaves)
    outputs = out if isinstance(out, tuple) else (out,)
    gradients = [torch.randn_like(output) for output in outputs]
    with Operators() as backward:
        torch.autograd.grad(outputs, leaves, gradients)
    return [(forward.count, forward.bytes), (backward.count, backward.bytes)]


def changes(config: ModelConfig, batch: int, length: int) -> dict[str, list[Change]]:
    """Forward and backward of each fusion."""
    found: dict[str, list[Change]] = {}
    for change in layer_changes(config, batch, length):
        found.setdefault(change.fusion, []).append(change)
    assert all([change.phase for change in pair] == ["forward", "backward"] for pair in found.values())
    return found


@pytest.mark.parametrize("config", [CONFIGS["MHA"], CONFIGS["GQA"]])
def test_before_the_fusions_add_up_to_a_layer_of_version_1(config: ModelConfig, shape: tuple[int, int]) -> None:
    block, x = v1.Block(config), torch.randn(*shape, config.hidden_size)
    names, weights = zip(*block.named_parameters(), strict=True)
    tables = rope_tables(config.head_dim, 64, config.rope_theta)

    def layer(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(block, dict(zip(names, weights, strict=True)), (x, *tables))

    tokens, hidden, ffn = shape[0] * shape[1], config.hidden_size, config.intermediate_size
    rest = sum(footprint.FLOAT * (tokens * i + i * hidden + tokens * hidden) for i in (hidden, ffn))  # o_proj, down_proj
    expected = [(2, rest), (4, 2 * rest)]
    for pair in changes(config, *shape).values():
        expected = [(n + c.operators[0], size + c.bytes[0]) for (n, size), c in zip(expected, pair, strict=True)]
    assert both_passes(layer, x, *weights) == expected


@pytest.mark.parametrize("name", ["Q, K, V: one product", "gate, up: one product", "flash attention"])
def test_what_version_2_runs_after_a_fusion(config: ModelConfig, name: str) -> None:
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    if name == "flash attention":
        q, k, v = (torch.randn(3, 17, count, config.head_dim) for count in heads)
        measured = both_passes(lambda *qkv: v2.attention(*(t.transpose(1, 2) for t in qkv)), q, k, v)
    else:
        sizes = [count * config.head_dim for count in heads] if name.startswith("Q") else [config.intermediate_size] * 2
        x, weight = torch.randn(3, 17, config.hidden_size), torch.randn(sum(sizes), config.hidden_size)
        measured = both_passes(lambda x, w: v2.project(x, w, sizes, fused=True), x, weight)
    assert measured == [(change.operators[1], change.bytes[1]) for change in changes(config, 3, 17)[name]]
