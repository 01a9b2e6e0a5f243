"""Version 2: fused with PyTorch alone, in fewer and larger operations with the same mathematics.

Changes from Version 1, each with a switch (`--enable-X`, `--disable-X`); without all five it is
Version 1, bit for bit on a CPU:

- qkv-fusion, swiglu-fusion: Q, K and V come from one matrix product, gate and up from another, so
  each input is read once.
- flash-attention: `scaled_dot_product_attention` writes no [S, S] matrix, and does not repeat K and
  V for grouped heads.
- fused-adamw: one kernel updates all weights, and goes over each tensor once.
- torch-compile (off by default): fuses the elementwise operations that are left between the matrix
  products.

    python tiny_llama_v2.py --use-amp --amp-dtype bfloat16 --enable-all-fusion
    python tiny_llama_v2.py --disable-all-fusion --enable-qkv-fusion   # one alone

Flags that profile: --enable-pytorch-profiler (--profile-dir, --profile-steps, --profile-memory,
--profile-operators, --sort-by, --profile-attention-only, --profile-with-stack,
--profile-with-flops), --enable-deepspeed-flops, --enable-all-profiling, --measure-peak,
--time-phases.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of this clone

import argparse
import math

from common import cli, weights
from common import device as devices
from common.attention import attention
from common.config import ModelConfig
from common.options import Options, RunOptions, Switches
from common.precision import Precision
from common.rmsnorm import rms_norm
from common.rope import apply_rope, rope_tables
from common.spans import span
from common.training.preparation import Batch, Step
from common.training.run import Run

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

SWITCHES = {
    "qkv-fusion": True,
    "flash-attention": True,
    "swiglu-fusion": True,
    "fused-adamw": True,
    "torch-compile": False,
}

# Shapes: B batch, S sequence, D hidden, H heads, K kv heads, Dh head dim, F ffn, V vocabulary.


def eager_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention; q [B, H, S, Dh], k and v [B, K, S, Dh] -> [B, H, S, Dh].

    Query head h reads key/value head h // (H / K).
    """
    groups = q.shape[1] // k.shape[1]
    length = q.shape[2]
    if groups > 1:
        k = k.repeat_interleave(groups, dim=1)  # [B, H, S, Dh]
        v = v.repeat_interleave(groups, dim=1)  # [B, H, S, Dh]
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # [B, H, S, S]
    ones = torch.ones(length, length, dtype=torch.bool, device=q.device)
    future = ones.triu(diagonal=1)  # [S, S]
    scores = scores.masked_fill(future, float("-inf"))
    return scores.softmax(dim=-1) @ v


def project(x: Tensor, weight: Tensor, sizes: tuple[int, ...], fused: bool) -> tuple[Tensor, ...]:
    """The parts of x @ weight.T, of these sizes: by one matrix product, or by one for each part."""
    if fused:
        return F.linear(x, weight).split(sizes, dim=-1)
    return tuple(F.linear(x, part) for part in weight.split(sizes))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, arXiv:2002.05202); all [..., F]."""
    return F.silu(gate) * up


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log softmax(x @ weight.T)[target] in nats, computed in float32 or wider.

    x [B, S, D], the last hidden states; weight [V, D]; targets [B, S], the next tokens. A target of
    -100 does not count.
    """
    logits = F.linear(x, weight).flatten(0, 1)  # [B S, V]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(dtype), targets.flatten())


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    @span("norm")
    def forward(self, x: Tensor) -> Tensor:  # [B, S, D] -> [B, S, D]
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, switches: Switches) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.sizes = (config.hidden_size, kv_size, kv_size)  # of Q, K and V
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.fused = bool(switches["qkv-fusion"])
        self.attention = attention if switches["flash-attention"] else eager_attention

    @span("attention")
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [B, S, D] -> [B, S, D]
        with span("qkv_projection"):
            q, k, v = project(x, self.qkv_proj.weight, self.sizes, self.fused)  # [B, S, D or K Dh]
        heads = (-1, self.head_dim)
        q, k, v = (t.unflatten(-1, heads).transpose(1, 2) for t in (q, k, v))  # [B, H or K, S, Dh]
        q, k = apply_rope(q, k, cos, sin)
        with span("attention_core"):
            out = self.attention(q, k, v)  # [B, H, S, Dh]
        with span("output_projection"):
            return self.o_proj(out.transpose(1, 2).flatten(2))  # [B, S, D]


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig, switches: Switches) -> None:
        super().__init__()
        self.sizes = (config.intermediate_size, config.intermediate_size)  # of gate and up
        self.gate_up_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.fused = bool(switches["swiglu-fusion"])

    @span("mlp")
    def forward(self, x: Tensor) -> Tensor:  # [B, S, D] -> [B, S, D]
        with span("gate_up"):
            gate, up = project(x, self.gate_up_proj.weight, self.sizes, self.fused)  # 2 x [B, S, F]
        with span("activation"):
            hidden = swiglu(gate, up)  # [B, S, F]
        with span("down"):
            return self.down_proj(hidden)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, switches: Switches) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, switches)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config, switches)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [B, S, D] -> [B, S, D]
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class TinyLlama(nn.Module):
    """Decoder-only language model with tied input and output embeddings."""

    def __init__(self, config: ModelConfig, switches: Switches = SWITCHES) -> None:
        super().__init__()
        self.switches = switches
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, switches) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        cos, sin = rope_tables(config.head_dim, config.max_sequence_length, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)  # [S_max, Dh]
        self.register_buffer("sin", sin, persistent=False)
        weights.initialize(self.baseline_state_dict(), config.initializer_std)
        self.register_load_state_dict_pre_hook(weights.fuse_on_load)

    def hidden_states(self, input_ids: Tensor) -> Tensor:  # [B, S] -> [B, S, D]
        with span("embed"):
            x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.norm(x)

    def forward(self, input_ids: Tensor) -> Tensor:  # [B, S] -> logits [B, S, V]
        return self.lm_head(self.hidden_states(input_ids))

    def loss(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats; `targets` [B, S] are the next tokens, already shifted."""
        x = self.hidden_states(input_ids)
        with span("loss"):
            return linear_cross_entropy(x, self.lm_head.weight, targets)

    def baseline_state_dict(self) -> dict[str, Tensor]:
        """The weights under Version 1's names, from any version."""
        return weights.baseline_state_dict(self)


def make_model(options: Options) -> TinyLlama:
    return TinyLlama(options.model, options.switches)


def make_optimizer(model: TinyLlama, options: Options) -> torch.optim.Optimizer:
    # False would also keep PyTorch from its default, which on a GPU is foreach.
    fused = True if model.switches["fused-adamw"] else None
    return torch.optim.AdamW(model.parameters(), lr=options.learning_rate, fused=fused)


def make_step(model: TinyLlama, optimizer: torch.optim.Optimizer, precision: Precision) -> Step:
    """A function of a batch: one optimizer step that returns the loss before it, on the device."""
    loss_of = devices.compiled(model.loss, precision.device, model.switches["torch-compile"])

    def step(batch: Batch) -> Tensor:
        with precision.autocast():
            loss = loss_of(*batch)
        with span("backward"):
            precision.scale(loss).backward()
        with span("optimizer"):
            precision.step(optimizer)
            optimizer.zero_grad()
        return loss.detach()

    return step


def train(options: RunOptions, make_model=make_model, make_step=make_step) -> Run:
    """A whole training run. An exercise or a test may replace how its model or its step is made."""
    with Run(options, "v2") as run:
        # Where there are several processes, model and optimizer are wrapped for them.
        model = run.move_model(make_model(options))
        optimizer = run.wrap_optimizer(make_optimizer(model, options))
        # Gradients are checked, the step is warmed up, and captured if asked for.
        step = run.check_and_capture(make_step(model, optimizer, run.precision))
        # The loop ends at --num-steps, at a signal, or where the processes agree to stop.
        for number in run.steps():
            batch = run.data[number]
            run.clock.mark()  # an event on the GPU, which nothing waits for
            loss = step(batch)
            run.clock.mark()
            run.finished(loss)  # keeps the loss; prints and saves where that is due
    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    cli.add_model_flags(parser)
    cli.add_training_flags(parser)
    cli.add_profiling_flags(parser)
    cli.add_switches(parser, SWITCHES)
    arguments = cli.parse(parser)
    options = cli.resolve(RunOptions, arguments, SWITCHES)
    return train(options).exit_code


if __name__ == "__main__":
    cli.command(main)
