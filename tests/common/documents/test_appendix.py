"""The formulas of common.documents.appendix against the code, and its tables against the measured files."""

from collections.abc import Callable

from common.analysis.formulas import footprint
from common.analysis.formulas.fusions import FOREACH_ADAMW, Change, layer_changes
from common.config import ModelConfig
from common.documents import appendix
from common.rope import rope_tables
from tests.conftest import ROOT
from tests.operators import OperatorMode, saved_bytes, stored_bytes
from version1_pytorch_baseline import tiny_llama_v1 as v1
from version2_pytorch_fused import tiny_llama_v2 as v2

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

ODD = dict(vocab_size=53, hidden_size=36, num_layers=2, num_attention_heads=6, intermediate_size=44, max_sequence_length=64)
CONFIGS = {"MHA": ModelConfig(**ODD), "GQA": ModelConfig(**ODD, num_key_value_heads=2)}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
H100 = ROOT / "results/h100"


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


@each_config
@pytest.mark.parametrize("shape", [(2, 7), (3, 17)], ids=str)
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


@each_config
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


def test_foreach_adamw_moves_what_the_table_says() -> None:
    weight = torch.nn.Parameter(torch.randn(1000))
    weight.grad = torch.randn(1000)
    optimizer = torch.optim.AdamW([weight], foreach=True)
    optimizer.step()
    with Operators() as seen:
        optimizer.step()
    elements, single_numbers = divmod(seen.bytes, weight.nbytes)
    assert elements == sum(FOREACH_ADAMW.values())
    assert single_numbers < 10 * footprint.FLOAT  # the step counter, and what is added to it


class Loads:
    """Counts the elements of the blocks that are taken out of tensors and put back."""

    def __init__(self) -> None:
        self.elements = 0

    def __call__(self, *blocks: Tensor) -> tuple[Tensor, ...]:
        self.elements += sum(block.numel() for block in blocks)
        return blocks


def tiled_forward(q: Tensor, k: Tensor, v: Tensor, moved: Loads) -> tuple[Tensor, Tensor]:
    """Output [S, Dh] and log-sum-exp [S] of one head, block by block, as on the page."""
    length, out, log_sum = len(q), torch.empty_like(q), torch.empty(len(q), dtype=q.dtype)
    for start in range(0, length, appendix.OUTER):
        rows = slice(start, min(start + appendix.OUTER, length))
        (block,) = moved(q[rows])
        top, total, acc = torch.full((len(block),), -torch.inf, dtype=q.dtype), torch.zeros(len(block), dtype=q.dtype), 0.0
        for first in range(0, rows.stop, appendix.INNER):
            keys, values = moved(k[first : first + appendix.INNER], v[first : first + appendix.INNER])
            scores = masked(block @ keys.T / q.shape[1] ** 0.5, start, first)
            higher = torch.maximum(top, scores.amax(1))
            shrink, p = (top - higher).exp(), (scores - higher[:, None]).exp()
            top, total, acc = higher, shrink * total + p.sum(1), shrink[:, None] * acc + p @ values
        out[rows], log_sum[rows] = moved(acc / total[:, None], top + total.log())
    return out, log_sum


def tiled_backward(q, k, v, out, log_sum, d_out, moved: Loads) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; the scores come again from the log-sum-exp."""
    length, scale = len(q), q.shape[1] ** -0.5
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    row_sum = (d_out * out).sum(1)
    moved(d_out, out, row_sum)
    for first in range(0, length, appendix.OUTER):
        columns = slice(first, first + appendix.OUTER)
        keys, values = moved(k[columns], v[columns])
        for start in range(first // appendix.INNER * appendix.INNER, length, appendix.INNER):
            rows = slice(start, start + appendix.INNER)
            block, gradient, lse, total, part = moved(q[rows], d_out[rows], log_sum[rows], row_sum[rows], dq[rows])
            p = (masked(block @ keys.T * scale, start, first) - lse[:, None]).exp()
            ds = p * (gradient @ values.T - total[:, None]) * scale
            dv[columns] += p.T @ gradient
            dk[columns] += ds.T @ block
            (dq[rows],) = moved(part + ds @ keys)
        moved(dk[columns], dv[columns])
    return dq, dk, dv


def masked(scores: Tensor, start: int, first: int) -> Tensor:
    query, key = start + torch.arange(scores.shape[0]), first + torch.arange(scores.shape[1])
    return scores.masked_fill(key > query[:, None], -torch.inf)


@pytest.mark.parametrize("length", [1, 64, 100, 128, 300, 512])
def test_tiles_compute_attention_and_move_what_the_formula_says(length: int) -> None:
    q, k, v, d_out = (torch.randn(length, 16, dtype=torch.float64) for _ in range(4))
    forward, backward = Loads(), Loads()
    out, log_sum = tiled_forward(q, k, v, forward)
    gradients = tiled_backward(q, k, v, out, log_sum, d_out, backward)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    reference = F.scaled_dot_product_attention(*(t[None] for t in leaves), is_causal=True)[0]
    reference.backward(d_out)
    torch.testing.assert_close(out, reference.detach())
    torch.testing.assert_close(gradients, tuple(t.grad for t in leaves))
    expected = appendix.tiled_attention(length, 16)
    assert {"forward": forward.elements, "backward": backward.elements} == expected


@each_config
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_version_2_keeps_as_much_less_as_the_formula_says(config: ModelConfig, autocast: bool) -> None:
    batch = torch.randint(config.vocab_size, (2, 4, 33)).unbind()
    kept = (saved_bytes(config, version.TinyLlama(config), batch, ["step"], "cpu" if autocast else None) for version in (v1, v2))
    before, after = (parts.total() for parts in kept)
    assert appendix.kept_less(config, 4, 33, autocast, on_gpu=False)["total"] == before - after


def test_the_formula_gives_what_the_h100_saved_at_medium() -> None:
    rows = [line.split("|") for line in appendix.memory_saved(H100).splitlines() if line.startswith("| medium")]
    assert len(rows) == 2
    for row in rows:
        assert row[5] == row[-2], row  # in MiB, thousands apart
