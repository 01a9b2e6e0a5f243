"""Version 4: ultra-fused. A block is a few large operations, its backward pass written by hand.

Changes from Version 3, in two stages, of which `--disable-memory-plan` leaves the first:

- The step is one captured graph. On sm_90, in 16 bits, epilogues of products apply SwiGLU, and in
  small products RoPE and gradients of norms.
- The memory plan (`memory/memory_plan.py`): AdamW writes bf16 weights for the products, and
  gradients get buffers of their own.

Without a GPU all is PyTorch's, and a line says so. TRITON_INTERPRET=1 runs kernels on a CPU.

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
from version4_ultra_fused import kernels
from version4_ultra_fused.functions import ends, norm_gradients
from version4_ultra_fused.kernels import Operations
from version4_ultra_fused.kernels.attention import CausalAttention
from version4_ultra_fused.memory.interleaved import QKV, GateUp
from version4_ultra_fused.memory.memory_plan import MemoryPlan, Shared, saved
from version4_ultra_fused.memory.optimizer import MasterAdamW

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.nn import RMSNorm

CAPTURED = True  # on a GPU, without --no-capture-step
PARALLEL = ("ddp", "zero1")  # forms of --parallel
SWITCHES = {
    "memory-plan": True,
    "side-stream": True,
    "early-update": True,
    "fa4": False,
    "fp8": False,
    "fp32-residual-gradient": False,
    "bf16-moments": False,
}

Pair = tuple[Tensor, Tensor]  # both [N, D]
Table = Operations | None  # None: what `choose` gives
# Shapes: B batch, S sequence, D hidden, H heads, K kv heads, Dh head dim, F ffn, V vocabulary.
# N = B S tokens.


class AttentionFunction(Function):
    """x + branch, if there is one, and what attention on its norm adds to that sum; all [N, D].

    The sum has one gradient: `norm_gradients` says whether x or the branch is given it, or both.
    """

    @staticmethod
    def forward(ctx, x, branch, block: "Block", shared: Shared, *weights: Tensor):
        norm_weight, qkv, output = weights
        operations = shared.plan.operations
        attn = block.self_attn
        with span("norm"):
            total, y, norm = operations.add_norm(x, branch, norm_weight, shared.eps, shared.dtype)
        with span("attention"):
            with span("qkv_projection"):
                packed = operations.qkv_rope(y, shared.weight(qkv), shared.rope, attn.rotated)
            attended = CausalAttention(packed, shared.rope, attn.heads, shared.switches, operations)
            ctx.saved = (block, shared.plan, qkv, output, y, norm, attended)
            with span("output_projection"):
                return shared.residual(ctx, total), attended.out @ shared.weight(output).T

    @staticmethod
    @once_differentiable
    @span("attention")
    def backward(ctx, dtotal: Tensor | None, dbranch: Tensor):  # type: ignore[override]
        block, plan, qkv, output, y, norm, attended = saved(ctx)
        dattended, doutput = plan.product_gradients(output, dbranch, attended.out)
        product = (qkv, *attended.gradient(dattended), y)
        del dattended  # frees its memory for what follows
        dinputs, dqkv = norm_gradients.through_product(ctx, plan, product, dtotal, dbranch, norm)
        plan.sublayer_done(block.self_attn)
        dx, dprevious, dnorm = dinputs
        return dx, dprevious, None, None, dnorm, dqkv, doutput


class FeedForwardFunction(Function):
    """x + branch, and what the feed-forward network on its norm adds to that; all [N, D]."""

    @staticmethod
    def forward(ctx, x, branch, block: "Block", shared: Shared, *weights: Tensor):
        norm_weight, gate_up, down = weights
        operations = shared.plan.operations
        with span("norm"):
            total, y, norm = operations.add_norm(x, branch, norm_weight, shared.eps, shared.dtype)
        with span("mlp"):
            with span("gate_up"):  # [N, 2 F], [N, F]
                gates, hidden = operations.gate_up_swiglu(y, shared.weight(gate_up))
            ctx.saved = (block, shared.plan, gate_up, down, y, norm, gates, hidden)
            with span("down"):
                return shared.residual(ctx, total), hidden @ shared.weight(down).T

    @staticmethod
    @once_differentiable
    @span("mlp")
    def backward(ctx, dtotal: Tensor | None, dbranch: Tensor):  # type: ignore[override]
        block, plan, gate_up, down, y, norm, gates, hidden = saved(ctx)
        dhidden, ddown = plan.product_gradients(down, dbranch, hidden)
        dgates, dots = plan.operations.swiglu_backward(dhidden, gates, norm.total)
        del dhidden  # frees its memory for what follows
        product = (gate_up, dgates, dots, y)
        dinputs, dgate_up = norm_gradients.through_product(
            ctx, plan, product, dtotal, dbranch, norm
        )
        plan.sublayer_done(block.mlp)
        dx, dprevious, dnorm = dinputs
        return dx, dprevious, None, None, dnorm, dgate_up, ddown


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        kv_heads = config.num_key_value_heads
        self.heads = (config.num_attention_heads, kv_heads, kv_heads)  # of Q, K and V
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

    def forward(self, x: Tensor, branch: Tensor | None, shared: Shared) -> Pair:
        """The residual stream and what the layer before adds to it -> the same for the next."""
        attention: type[Function] = AttentionFunction
        feed_forward: type[Function] = FeedForwardFunction
        if shared.plan.in_fp8(self.mlp.down_proj.weight, shared.dtype):  # with --enable-fp8
            from version4_ultra_fused.functions import fp8_block

            attention, feed_forward = fp8_block.FUNCTIONS
        norm = self.input_layernorm.weight
        weights = (self.self_attn.qkv_proj.weight, self.self_attn.o_proj.weight)
        x, branch = attention.apply(x, branch, self, shared, norm, *weights)
        norm = self.post_attention_layernorm.weight
        weights = (self.mlp.gate_up_proj.weight, self.mlp.down_proj.weight)
        return feed_forward.apply(x, branch, self, shared, norm, *weights)


class TinyLlama(nn.Module):
    """Decoder-only language model with tied input and output embeddings."""

    def __init__(
        self, config: ModelConfig, switches: Switches = SWITCHES, operations: Table = None
    ) -> None:
        super().__init__()
        self.switches = switches
        self.operations = operations = operations or kernels.choose(switches)
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
        self.plan = MemoryPlan(operations)  # without buffers until the optimizer makes some
        # Otherwise DistributedDataParallel would find no gradients.
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
        weight = self.plan.buffers.weight(self.lm_head.weight, products_dtype(x))
        norm = (self.norm.weight, self.norm.eps)
        y = self.operations.add_norm(x, branch, *norm, weight.dtype)[1]
        return (y @ weight.T).unflatten(0, input_ids.shape)

    def loss(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats; `targets` [B, S] are the next tokens, already shifted."""
        x, branch = self.hidden_states(input_ids)
        with span("loss"):
            return ends.loss(x, branch, targets.flatten(), self)

    def kernel_flops(self, input_ids: Tensor) -> dict[str, int]:
        """FLOPs of the kernels, which counters of operators do not see."""
        from version4_ultra_fused.kernels import kernel_flops

        return kernel_flops.kernel_flops(self, input_ids)

    def baseline_state_dict(self) -> dict[str, Tensor]:
        """The weights under Version 1's names, from any version."""
        return weights.baseline_state_dict(self)


def make_model(options: Options, operations: Table = None) -> TinyLlama:
    return TinyLlama(options.model, kernels.available(options), operations)


def make_optimizer(model: TinyLlama, options: Options) -> torch.optim.Optimizer:
    if model.switches["memory-plan"]:
        return MasterAdamW(model, lr=options.learning_rate)
    return torch.optim.AdamW(model.parameters(), lr=options.learning_rate, fused=True)


def make_step(model: TinyLlama, optimizer: torch.optim.Optimizer, precision: Precision) -> Step:
    """A function of a batch: one optimizer step that returns the loss before it, on the device."""
    if precision.dtype == torch.float16:
        reason = "Version 4 does not scale the loss, which float16 needs"
        raise UsageError(f"{reason}: leave out --amp-dtype float16")
    if isinstance(optimizer, MasterAdamW):
        optimizer.plan_memory(precision.dtype, early=bool(model.switches["early-update"]))

    def step(batch: Batch) -> Tensor:
        with model.plan.step(batch[0], bool(model.switches["side-stream"])):
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
