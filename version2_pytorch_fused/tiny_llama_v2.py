"""Version 2: fused with PyTorch alone. Fewer and larger operations, the same mathematics and the same weights.

Changes from Version 1, each with a switch of its own (`--enable-X`, `--disable-X`):

- qkv-fusion, swiglu-fusion: Q, K and V come from one matrix product, gate and up from another, so each input is read once;
- flash-attention: `scaled_dot_product_attention` writes no [S, S] matrix, and does not repeat K and V for grouped heads;
- torch-compile (off by default): fuses the elementwise operations that are left between the matrix products.

With all four off this is Version 1, bit for bit on the CPU. Version 1's weights load, and come back.

    python tiny_llama_v2.py                                            # the first three fusions
    python tiny_llama_v2.py --use-amp --amp-dtype bfloat16 --enable-all-fusion
    python tiny_llama_v2.py --disable-all-fusion --enable-qkv-fusion   # one alone
"""

import math
import os
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass, replace

from common import device as devices
from common.config import ModelConfig
from common.errors import UsageError
from common.rmsnorm import rms_norm
from common.rope import apply_rope, rope_tables
from common.spans import span
from common.training import run

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

# Shapes: B batch, S sequence, D hidden, H heads, K kv heads, Dh head dim, F ffn, V vocabulary.


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}  # name: Version 1's names


@dataclass(frozen=True)
class Fusions:
    """Which fusions are on."""

    qkv: bool = True
    flash_attention: bool = True
    swiglu: bool = True
    torch_compile: bool = False


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention; query head h reads key/value head h // (H / K).

    Args:
        q: [B, H, S, Dh].
        k, v: [B, K, S, Dh].

    Returns:
        [B, H, S, Dh].
    """
    groups, length = q.shape[1] // k.shape[1], q.shape[2]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)  # [B, H, S, Dh]
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # [B, H, S, S]
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(diagonal=1)  # [S, S]
    scores = scores.masked_fill(future, float("-inf"))
    return scores.softmax(dim=-1) @ v


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by a fused kernel: softmax(q k^T) v in tiles (Dao et al. 2022, arXiv:2205.14135); shapes as above."""
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda and q.dtype == torch.float32:  # the fp32 kernel knows no groups: PyTorch would take the plain path
        groups, grouped = q.shape[1] // k.shape[1], False
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)  # [B, H, S, Dh]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, arXiv:2002.05202); all [..., F]."""
    return F.silu(gate) * up


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean over the tokens of -log softmax(x @ weight.T)[target], in nats.

    Args:
        x: [B, S, D], the last hidden states.
        weight: [V, D].
        targets: [B, S], the tokens that follow.
    """
    logits = F.linear(x, weight).flatten(0, 1)  # [B S, V]
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten())


def project(x: Tensor, weight: Tensor, sizes: tuple[int, ...], fused: bool) -> tuple[Tensor, ...]:
    """The parts of x @ weight.T, of the given sizes: by one matrix product, or by one for each part of the weight."""
    if fused:
        return F.linear(x, weight).split(sizes, dim=-1)
    return tuple(F.linear(x, part) for part in weight.split(sizes))


def fuse_on_load(fused: str):
    """A hook that stacks Version 1's matrices into the fused one while a state dict is loaded."""

    def hook(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_) -> None:
        names = [f"{prefix}{part}.weight" for part in FUSED[fused]]
        if names[0] in state_dict:
            state_dict[f"{prefix}{fused}.weight"] = torch.cat([state_dict.pop(name) for name in names])

    return hook


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    @span("norm")
    def forward(self, x: Tensor) -> Tensor:  # [B, S, D] -> [B, S, D]
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, fusions: Fusions) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.sizes = (config.hidden_size, kv_size, kv_size)  # of Q, K and V
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.fused = fusions.qkv
        self.attention = attention if fusions.flash_attention else plain_attention
        self.register_load_state_dict_pre_hook(fuse_on_load("qkv_proj"))

    @span("attention")
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [B, S, D] -> [B, S, D]
        q, k, v = project(x, self.qkv_proj.weight, self.sizes, self.fused)  # [B, S, D], 2 x [B, S, K Dh]
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in (q, k, v))  # [B, H or K, S, Dh]
        q, k = apply_rope(q, k, cos, sin)
        out = self.attention(q, k, v)  # [B, H, S, Dh]
        return self.o_proj(out.transpose(1, 2).flatten(2))  # [B, S, D]


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig, fusions: Fusions) -> None:
        super().__init__()
        self.sizes = (config.intermediate_size, config.intermediate_size)  # of gate and up
        self.gate_up_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.fused = fusions.swiglu
        self.register_load_state_dict_pre_hook(fuse_on_load("gate_up_proj"))

    @span("mlp")
    def forward(self, x: Tensor) -> Tensor:  # [B, S, D] -> [B, S, D]
        gate, up = project(x, self.gate_up_proj.weight, self.sizes, self.fused)  # 2 x [B, S, F]
        return self.down_proj(swiglu(gate, up))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, fusions: Fusions) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, fusions)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config, fusions)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [B, S, D] -> [B, S, D]
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class TinyLlama(nn.Module):
    """Decoder-only language model with tied input and output embeddings."""

    def __init__(self, config: ModelConfig, fusions: Fusions = Fusions()) -> None:  # noqa: B008 (frozen)
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, fusions) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        cos, sin = rope_tables(config.head_dim, config.max_sequence_length, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)  # [S_max, Dh]
        self.register_buffer("sin", sin, persistent=False)
        generator = torch.Generator().manual_seed(torch.initial_seed())  # so that all versions start from the same weights
        for name, weight in self.baseline_state_dict().items():
            if weight.dim() == 2 and name != "lm_head.weight":  # the head is tied; the norms' weights stay 1
                nn.init.normal_(weight, std=config.initializer_std, generator=generator)

    def hidden_states(self, input_ids: Tensor) -> Tensor:  # [B, S] -> [B, S, D]
        with span("embed"):
            x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.norm(x)

    def forward(self, input_ids: Tensor) -> Tensor:  # [B, S] -> logits [B, S, V]
        return self.lm_head(self.hidden_states(input_ids))

    def loss(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats; `targets` [B, S] are the tokens that follow, already shifted."""
        x = self.hidden_states(input_ids)
        with span("loss"):
            return linear_cross_entropy(x, self.lm_head.weight, targets)

    def baseline_state_dict(self) -> dict[str, Tensor]:
        """The weights under Version 1's names, from any version: views of the fused ones."""
        state = {}
        for name, weight in self.state_dict().items():
            module, _, leaf = name.removesuffix(".weight").rpartition(".")
            if leaf in FUSED:
                parts = weight.split(self.get_submodule(module).sizes)
                state |= {f"{module}.{part}.weight": piece for part, piece in zip(FUSED[leaf], parts, strict=True)}
            else:
                state[name] = weight
        return state


def add_arguments(parser: ArgumentParser) -> None:
    """The switches of this version; `--enable-all-fusion` and `--disable-all-fusion` are what the single ones start from."""
    group = parser.add_argument_group("fusions (qkv, flash attention and swiglu are on unless switched off)")
    for name in ("qkv-fusion", "flash-attention", "swiglu-fusion", "torch-compile", "all-fusion"):
        choice, key = group.add_mutually_exclusive_group(), name.replace("-", "_")
        choice.add_argument(f"--enable-{name}", dest=key, action="store_true", default=None)
        choice.add_argument(f"--disable-{name}", dest=key, action="store_false", default=None)
    modes = ("default", "reduce-overhead", "max-autotune")
    group.add_argument("--torch-compile-mode", choices=modes, help="of torch.compile (default: default)")


def fusions(options: Namespace) -> Fusions:
    """What the switches say together.

    Raises:
        UsageError: a mode for torch.compile is given, but it is off.
    """
    base = Fusions() if options.all_fusion is None else Fusions(*4 * [options.all_fusion])
    given = {
        "qkv": options.qkv_fusion,
        "flash_attention": options.flash_attention,
        "swiglu": options.swiglu_fusion,
        "torch_compile": options.torch_compile,
    }
    if os.environ.get("PYTORCH_FALLBACK_ATTENTION") == "1":
        given["flash_attention"] = False
    result = replace(base, **{name: value for name, value in given.items() if value is not None})
    if options.torch_compile_mode and not result.torch_compile:
        raise UsageError("--torch-compile-mode needs --enable-torch-compile")
    return result


def describe(options: Namespace) -> dict[str, bool]:
    """For the run's record: which fusions are on."""
    return asdict(fusions(options))


def make_model(options: Namespace) -> nn.Module:
    chosen = fusions(options)
    model = TinyLlama(options.model, chosen)
    if chosen.torch_compile:
        problem = devices.compile_problem(devices.select(options.device))
        if problem:
            raise UsageError(problem)
        model.loss = torch.compile(model.loss, mode=options.torch_compile_mode)
    return model


def make_optimizer(model: nn.Module, options) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=options.learning_rate)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], precision) -> Tensor:
    """One optimizer step; returns the loss from before it, on the device."""
    with precision.autocast():
        loss = model.loss(*batch)
    with span("backward"):
        precision.scale(loss).backward()
    with span("optimizer"):
        precision.step(optimizer)
        optimizer.zero_grad()
    return loss.detach()


if __name__ == "__main__":
    run.main(sys.modules[__name__])
