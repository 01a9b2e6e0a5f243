"""Version 3: the operations that memory limits as Triton kernels, with backward passes of their
own.

Changes from Version 2:

- Norms, RoPE, attention, SwiGLU and the loss are kernels (`kernels/`, one file each), chosen in one
  table when the model is made; `--disable-triton-X` gives an operation back to PyTorch.
- A residual addition and the next norm are one kernel: a layer hands on what it does not add.
- The loss computes its gradient in place of the logits, in chunks of at most 2^27 logits.
- QKV and gate-up fusion are always on; matrix products stay with the BLAS.

Without a GPU all is PyTorch's, and a line says so. TRITON_INTERPRET=1 runs kernels on a CPU.

    python tiny_llama_v3.py --use-amp --mode benchmark             # times each kernel instead

Flags that profile: --enable-pytorch-profiler (--profile-dir, --profile-steps, --profile-memory,
--profile-operators, --sort-by, --profile-attention-only, --profile-with-stack,
--profile-with-flops), --enable-deepspeed-flops, --enable-all-profiling, --measure-peak,
--time-phases.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of this clone

import argparse

from common import cli, weights
from common.config import ModelConfig
from common.options import Options, RunOptions, Switches
from common.precision import Precision
from common.rope import rope_tables
from common.spans import span
from common.training.preparation import Batch, Step
from common.training.run import Run
from version3_triton import kernels
from version3_triton.kernels import Operations

import torch
import torch.nn as nn
from torch import Tensor

SWITCHES = {
    "triton-norm": True,
    "triton-rope": True,
    "triton-attention": True,
    "triton-swiglu": True,
    "triton-loss": True,
    "fused-adamw": True,
}

Pair = tuple[Tensor, Tensor]  # both [B, S, D]
Table = Operations | None  # None: what `choose` gives
# Shapes: B batch, S sequence, D hidden, H heads, K kv heads, Dh head dim, F ffn, V vocabulary.


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, operations: Operations) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.operations = operations

    @span("norm")
    def forward(self, x: Tensor, branch: Tensor | None) -> Pair:
        """x, with `branch` added if there is one, and its norm; all [B, S, D]."""
        if branch is None:
            return x, self.operations.rms_norm(x, self.weight, self.eps)
        return self.operations.add_rms_norm(branch, x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, operations: Operations) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.sizes = (config.hidden_size, kv_size, kv_size)  # of Q, K and V
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.operations = operations

    @span("attention")
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [B, S, D] -> [B, S, D]
        with span("qkv_projection"):
            q, k, v = self.qkv_proj(x).split(self.sizes, dim=-1)  # [B, S, D or K Dh]
        heads = (-1, self.head_dim)
        q, k, v = (t.unflatten(-1, heads).transpose(1, 2) for t in (q, k, v))  # [B, H or K, S, Dh]
        q, k = self.operations.apply_rope(q, k, cos, sin)
        with span("attention_core"):
            out = self.operations.attention(q, k, v)  # [B, H, S, Dh]
        with span("output_projection"):
            return self.o_proj(out.transpose(1, 2).flatten(2))  # [B, S, D]


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig, operations: Operations) -> None:
        super().__init__()
        self.sizes = (config.intermediate_size, config.intermediate_size)  # of gate and up
        self.gate_up_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.operations = operations

    @span("mlp")
    def forward(self, x: Tensor) -> Tensor:  # [B, S, D] -> [B, S, D]
        with span("gate_up"):
            gate, up = self.gate_up_proj(x).split(self.sizes, dim=-1)  # 2 x [B, S, F]
        with span("activation"):
            hidden = self.operations.swiglu(gate, up)  # [B, S, F]
        with span("down"):
            return self.down_proj(hidden)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, operations: Operations) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, operations)
        self.self_attn = Attention(config, operations)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, operations)
        self.mlp = FeedForward(config, operations)

    def forward(self, x: Tensor, branch: Tensor | None, cos: Tensor, sin: Tensor) -> Pair:
        """The residual stream and what the layer before adds to it -> the same for the next."""
        x, normalized = self.input_layernorm(x, branch)
        x, normalized = self.post_attention_layernorm(x, self.self_attn(normalized, cos, sin))
        return x, self.mlp(normalized)


class TinyLlama(nn.Module):
    """Decoder-only language model with tied input and output embeddings."""

    def __init__(
        self, config: ModelConfig, switches: Switches = SWITCHES, operations: Table = None
    ) -> None:
        super().__init__()
        self.switches = switches
        self.operations = operations = operations or kernels.choose(switches)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, operations) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, operations)
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
            branch = None
        for layer in self.layers:
            x, branch = layer(x, branch, self.cos, self.sin)
        return self.norm(x, branch)[1]

    def forward(self, input_ids: Tensor) -> Tensor:  # [B, S] -> logits [B, S, V]
        return self.lm_head(self.hidden_states(input_ids))

    def loss(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats; `targets` [B, S] are the next tokens, already shifted."""
        x = self.hidden_states(input_ids)
        with span("loss"):
            return self.operations.linear_cross_entropy(x, self.lm_head.weight, targets)

    def kernel_flops(self, input_ids: Tensor) -> dict[str, int]:
        """FLOPs of the kernels, which counters of operators do not see."""
        from version3_triton.kernels import kernel_flops

        return kernel_flops.kernel_flops(self, input_ids)

    def baseline_state_dict(self) -> dict[str, Tensor]:
        """The weights under Version 1's names, from any version."""
        return weights.baseline_state_dict(self)


def make_model(options: Options, operations: Table = None) -> TinyLlama:
    return TinyLlama(options.model, kernels.available(options), operations)


def make_optimizer(model: TinyLlama, options: Options) -> torch.optim.Optimizer:
    fused = True if model.switches["fused-adamw"] else None
    return torch.optim.AdamW(model.parameters(), lr=options.learning_rate, fused=fused)


def make_step(model: TinyLlama, optimizer: torch.optim.Optimizer, precision: Precision) -> Step:
    """A function of a batch: one optimizer step that returns the loss before it, on the device."""

    def step(batch: Batch) -> Tensor:
        with precision.autocast():
            loss = model.loss(*batch)
        with span("backward"):
            precision.scale(loss).backward()
        with span("optimizer"):
            precision.step(optimizer)
            optimizer.zero_grad()
        return loss.detach()

    return step


def train(options: RunOptions, make_model=make_model, make_step=make_step) -> Run:
    """A whole training run. An exercise or a test may replace how its model or its step is made."""
    with Run(options, "v3") as run:
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
    parser.add_argument(
        "--mode", choices=("train", "benchmark"), default="train", help="default: train"
    )
    arguments = cli.parse(parser)
    options = cli.resolve(RunOptions, arguments, SWITCHES)
    if arguments.mode == "benchmark":
        from version3_triton import benchmark_kernels

        return benchmark_kernels.of_version(options)
    return train(options).exit_code


if __name__ == "__main__":
    cli.command(main)
