"""Version 4: ultra-fused. A block is a few large operations with a backward pass written by hand,
in one captured graph.

Changes from Version 3, in two stages, of which `--disable-memory-plan` leaves the first:

- The step is one graph. On sm_90, in 16 bits, epilogues apply SwiGLU, and in small products RoPE
  and gradients of norms.
- The memory plan (`memory/memory_plan.py`): AdamW writes bf16 weights for the products, and
  gradients get buffers of their own.

Without a GPU every operation is PyTorch's, and a line says so; TRITON_INTERPRET=1 runs the kernels
on a CPU, slowly.

    python tiny_llama_v4.py --use-amp

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
from common.precision import Precision, products_dtype
from common.rope import rope_tables
from common.spans import span
from common.training.preparation import Batch, Step
from common.training.run import Run
from tracepage.errors import UsageError
from version3_triton.kernels import available
from version4_ultra_fused import kernels
from version4_ultra_fused.functions import ends, fp8_block
from version4_ultra_fused.kernels.attention import CausalAttention
from version4_ultra_fused.memory.interleaved import QKV, GateUp
from version4_ultra_fused.memory.memory_plan import MemoryPlan, Shared, saved, without_gradient
from version4_ultra_fused.memory.optimizer import MasterAdamW

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import RMSNorm

# on a GPU, without --no-capture-step; forms of --parallel
CAPTURED = True
PARALLEL = ("ddp", "zero1")
SWITCHES = {
    "memory-plan": True,
    "side-stream": True,
    "early-update": True,
    "exact-attention": False,
    "fa4": False,
    "fp8": False,
}
SIDE_STREAM_TOKENS = 4096  # most tokens of a batch whose products leave multiprocessors idle
# Shapes: B batch, S sequence, N = B S tokens, D hidden, H heads, K kv heads, Dh head dim, F ffn, V
# vocabulary.


class AttentionFunction(torch.autograd.Function):
    """x, with `branch` added if there is one, and what attention on its norm adds to that; all [N,
    D].

    The sum x + branch has one gradient, which is that of x and of branch alike. So only the branch
    is given it, and x is marked as not differentiable. The first block has no branch, so there x is
    given the gradient.
    """

    @staticmethod
    def forward(ctx, x, branch, block: "Block", shared: Shared, *weights: Tensor):
        (norm_weight, qkv, output), plan, attn, dtype = (
            weights,
            shared.plan,
            block.self_attn,
            products_dtype(x),
        )
        with span("norm"):
            total, y, norm = kernels.add_norm(
                x, branch, norm_weight, block.input_layernorm.eps, dtype
            )
        with span("attention"):
            packed = kernels.qkv_rope(y, plan.weight(qkv, dtype), shared.rope, attn.rotated)
            attended = CausalAttention(packed, shared.rope, attn.heads, shared.switches)
            ctx.saved = (y, norm, attended)
            ctx.weights = (qkv, output)
            ctx.block = block
            ctx.plan = plan
            with span("output_projection"):
                return without_gradient(ctx, total), attended.out @ plan.weight(output, dtype).T

    @staticmethod
    @once_differentiable
    @span("attention")
    def backward(ctx, _, dbranch: Tensor):  # type: ignore[override]  # PyTorch: any number of gradients
        (y, norm, attended) = saved(ctx)
        (qkv, output) = ctx.weights
        plan = ctx.plan
        doutput = plan.matrix_gradient(output, dbranch, attended.out)
        dpacked, dots = attended.gradient(dbranch @ plan.weight(output, dbranch.dtype))
        dqkv = plan.matrix_gradient(qkv, dpacked, y)
        dx, dbranch, dnorm = plan.norm_backward_through_product(
            (dpacked, dots), qkv, dbranch, norm, ctx.needs_input_grad
        )
        plan.block_done(ctx.block)
        return dx, dbranch, None, None, dnorm, dqkv, doutput


class FeedForwardFunction(torch.autograd.Function):
    """x + branch, and what the feed-forward network on its norm adds to that; all [N, D]."""

    @staticmethod
    def forward(ctx, x, branch, block: "Block", shared: Shared, *weights: Tensor):
        (norm_weight, gate_up, down), plan, dtype = weights, shared.plan, products_dtype(x)
        with span("norm"):
            total, y, norm = kernels.add_norm(
                x, branch, norm_weight, block.post_attention_layernorm.eps, dtype
            )
        with span("mlp"):
            # [N, 2 F], [N, F]
            gates, hidden = kernels.gate_up_swiglu(y, plan.weight(gate_up, dtype))
            ctx.saved = (y, norm, gates, hidden)
            ctx.weights = (gate_up, down)
            ctx.plan = plan
            with span("down"):
                return without_gradient(ctx, total), hidden @ plan.weight(down, dtype).T

    @staticmethod
    @once_differentiable
    @span("mlp")
    def backward(ctx, _, dbranch: Tensor):  # type: ignore[override]  # PyTorch: any number of gradients
        (y, norm, gates, hidden) = saved(ctx)
        (gate_up, down) = ctx.weights
        plan = ctx.plan
        ddown = plan.matrix_gradient(down, dbranch, hidden)
        dgates, dots = kernels.swiglu_backward(
            dbranch @ plan.weight(down, dbranch.dtype), gates, norm.total
        )
        dgate_up = plan.matrix_gradient(gate_up, dgates, y)
        dx, dbranch, dnorm = plan.norm_backward_through_product(
            (dgates, dots), gate_up, dbranch, norm, ctx.needs_input_grad
        )
        return dx, dbranch, None, None, dnorm, dgate_up, ddown


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # of Q, K and V
        self.heads = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.num_key_value_heads,
        )
        self.rotated = sum(self.heads[:2]) * config.head_dim  # columns of Q and K
        self.qkv_proj = QKV(config.hidden_size, self.heads, config.head_dim)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = GateUp(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, branch: Tensor | None, shared: Shared) -> tuple[Tensor, Tensor]:
        """The residual stream and what the layer before adds to it -> the same for the next; all
        [N, D].
        """
        # there are scales with --enable-fp8
        fp8 = shared.plan.scales and products_dtype(x) == torch.bfloat16
        attention, feed_forward = (
            fp8_block.FUNCTIONS if fp8 else (AttentionFunction, FeedForwardFunction)
        )
        norm = self.input_layernorm.weight
        attn = self.self_attn
        x, branch = attention.apply(
            x, branch, self, shared, norm, attn.qkv_proj.weight, attn.o_proj.weight
        )
        norm = self.post_attention_layernorm.weight
        mlp = self.mlp
        return feed_forward.apply(
            x, branch, self, shared, norm, mlp.gate_up_proj.weight, mlp.down_proj.weight
        )


class TinyLlama(nn.Module):
    """Decoder-only language model with tied input and output embeddings."""

    def __init__(self, config: ModelConfig, switches: Switches = SWITCHES) -> None:
        super().__init__()
        self.switches = switches
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        cos, sin = rope_tables(config.head_dim, config.max_sequence_length, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)  # [S_max, Dh]
        self.register_buffer("sin", sin, persistent=False)
        self.register_buffer("one", torch.ones(()), persistent=False)  # the gradient of the loss
        self.register_load_state_dict_pre_hook(weights.fuse_on_load)
        self.load_state_dict(weights.initialize(self.baseline_state_dict(), config.initializer_std))
        self.plan = MemoryPlan()  # empty until the optimizer makes buffers
        # DistributedDataParallel would find no gradients
        self.optimizer_communicates = bool(switches["memory-plan"])

    def hidden_states(self, input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """[B, S] -> the residual stream and what the last layer adds to it, each [N, D]."""
        with span("embed"):
            x = ends.embed(self.embed_tokens.weight, input_ids.flatten(), self.plan)
            branch = None
        shared = Shared.of(self, input_ids.shape[1])
        for layer in self.layers:
            x, branch = layer(x, branch, shared)
        return x, branch

    @torch.no_grad()
    def forward(self, input_ids: Tensor) -> Tensor:  # [B, S] -> logits [B, S, V]
        x, branch = self.hidden_states(input_ids)
        y = kernels.add_norm(x, branch, self.norm.weight, self.norm.eps, products_dtype(x))[1]
        return (y @ self.plan.weight(self.lm_head.weight, y.dtype).T).unflatten(0, input_ids.shape)

    def loss(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats; `targets` [B, S] are the tokens that follow, already shifted."""
        x, branch = self.hidden_states(input_ids)
        with span("loss"):
            return ends.LossFunction.apply(
                x, branch, targets.flatten(), self, self.norm.weight, self.lm_head.weight
            )

    def kernel_flops(self, input_ids: Tensor) -> dict[str, int]:
        """FLOPs of the kernels, which counters of operators do not see."""
        from version4_ultra_fused.kernels import kernel_flops

        return kernel_flops.kernel_flops(self, input_ids)

    def baseline_state_dict(self) -> dict[str, Tensor]:
        """The weights under Version 1's names, from any version."""
        return weights.baseline_state_dict(self)


def make_model(options: Options) -> TinyLlama:
    # it works without kernels, so it stays on where `available` finds none
    plan = options.switches["memory-plan"]
    without = {} if plan else {"side-stream": False, "early-update": False}
    return TinyLlama(
        options.model, available(fp8_block.checked(options)) | {"memory-plan": plan} | without
    )


def make_optimizer(model: TinyLlama, options: Options) -> torch.optim.Optimizer:
    if model.switches["memory-plan"]:
        return MasterAdamW(model, lr=options.learning_rate, fp8=bool(model.switches["fp8"]))
    return torch.optim.AdamW(model.parameters(), lr=options.learning_rate)


def use_side_stream(model: TinyLlama, ids: Tensor) -> bool:
    """Where small products leave multiprocessors idle, or collectives wait for other processes."""
    return ids.is_cuda and bool(
        model.switches["side-stream"]
        and (ids.numel() <= SIDE_STREAM_TOKENS or model.plan.communicates)
    )


def make_step(model: TinyLlama, optimizer: torch.optim.Optimizer, precision: Precision) -> Step:
    """A function of a batch: one optimizer step; it returns the loss from before it, on the device."""
    if precision.dtype == torch.float16:
        raise UsageError(
            "Version 4 does not scale the loss, which float16 needs: leave out --amp-dtype float16"
        )
    if isinstance(optimizer, MasterAdamW):
        optimizer.plan_memory(precision.dtype, early=bool(model.switches["early-update"]))

    def step(batch: Batch) -> Tensor:
        with model.plan.step(batch[0].numel(), beside=use_side_stream(model, batch[0])):
            with precision.autocast():
                loss = model.loss(*batch)
            with span("backward"):
                loss.backward(model.one)
        with span("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def train(options: RunOptions, make_model=make_model, make_step=make_step) -> Run:
    """A whole training run. An exercise or a test may replace how its model or its step is made."""
    with Run(options, "v4", captured=CAPTURED, forms=PARALLEL) as run:
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
