"""Version 4: ultra-fused. A block is a few large operations with a backward pass written by hand, in one captured graph.

Changes from Version 3:

- RoPE, SwiGLU and its gradient run in epilogues of matrix products, where these are small (`kernels/matmul.py`).
- Products read weights in bf16 that AdamW writes beside its fp32 masters: no weight is cast, no gradient set to zero or added up.
- Gradients of weights run on a side branch of the graph, beside the rest of the backward pass.
- The whole step is one CUDA or HIP graph; `--no-capture-step` launches its kernels one by one.

Without a GPU every operation is PyTorch's, and a line says so; TRITON_INTERPRET=1 runs the kernels on a CPU, slowly.

    python tiny_llama_v4.py --use-amp
"""

from common import cli, weights
from common.config import ModelConfig
from common.errors import UsageError
from common.options import Options, RunOptions, Switches
from common.precision import Precision
from common.rope import rope_tables
from common.spans import span
from common.training.capture import Batch, Step
from common.training.run import Run
from version3_triton.kernels import available
from version4_ultra_fused import kernels
from version4_ultra_fused.kernels import costs
from version4_ultra_fused.kernels.attention import CausalAttention
from version4_ultra_fused.kernels.gradients import Gradients, backward_of, products_dtype, store, working
from version4_ultra_fused.kernels.interleaved import QKV, GateUp
from version4_ultra_fused.kernels.optimizer import MasterAdamW

import torch
from torch import Tensor, nn

CAPTURED, PARALLEL = True, ("ddp", "zero1")  # on a GPU, without --no-capture-step; forms of --parallel
SWITCHES = {"side-branch": True, "early-update": True, "exact-attention": False}
BRANCH_TOKENS = 4096  # most tokens of a batch whose products leave multiprocessors idle
# Shapes: B batch, S sequence, N = B S tokens, D hidden, H heads, K kv heads, Dh head dim, F ffn, V vocabulary.


class AttentionFunction(torch.autograd.Function):
    """x, with `branch` added if there is one, and what attention on its norm adds to that; all [N, D]."""

    @staticmethod
    def forward(ctx, x: Tensor, branch: Tensor | None, block: "Block", model: "TinyLlama", length: int):
        attn, norm, dtype = block.self_attn, block.input_layernorm, products_dtype(x)
        with span("norm"):
            x, y, rstd = kernels.add_norm(x, branch, norm.weight, norm.eps, dtype)
        with span("attention"):
            turned = sum(attn.heads[:2]) * attn.head_dim
            qkv = kernels.qkv_rope(y, working(attn.qkv_proj.weight, dtype), model.cos, model.sin, length, turned)
            heads = CausalAttention(qkv, model.cos, model.sin, length, attn.heads, model.switches["exact-attention"])
            ctx.saved, ctx.block, ctx.model = (x, y, rstd, heads), block, model
            with span("output_projection"):
                return x, heads.out @ working(attn.o_proj.weight, dtype).T

    @staticmethod
    @backward_of("attention")
    def backward(ctx, dx: Tensor, dbranch: Tensor):
        (x, y, rstd, heads), attn, model, ctx.saved = ctx.saved, ctx.block.self_attn, ctx.model, None
        model.gradients.matrix(attn.o_proj.weight, dbranch, heads.out)
        dqkv = heads.gradient(dbranch @ working(attn.o_proj.weight, dbranch.dtype))
        model.gradients.matrix(attn.qkv_proj.weight, dqkv, y)
        dy = dqkv @ working(attn.qkv_proj.weight, dqkv.dtype)
        gradients = model.gradients.norm(ctx.block.input_layernorm.weight, dy, dx, x, rstd, ctx.needs_input_grad[1])
        model.gradients.block_done()
        return *gradients, None, None, None


class FeedForwardFunction(torch.autograd.Function):
    """x + branch, and what the feed-forward network on its norm adds to that; all [N, D]."""

    @staticmethod
    def forward(ctx, x: Tensor, branch: Tensor, block: "Block", model: "TinyLlama"):
        mlp, norm, dtype = block.mlp, block.post_attention_layernorm, products_dtype(x)
        with span("norm"):
            x, y, rstd = kernels.add_norm(x, branch, norm.weight, norm.eps, dtype)
        with span("mlp"):
            gate_up, activated = kernels.gate_up_swiglu(y, working(mlp.gate_up_proj.weight, dtype))  # [N, 2 F], [N, F]
            ctx.saved, ctx.block, ctx.model = (x, y, rstd, gate_up, activated), block, model
            with span("down"):
                return x, activated @ working(mlp.down_proj.weight, dtype).T

    @staticmethod
    @backward_of("mlp")
    def backward(ctx, dx: Tensor, dbranch: Tensor):
        (x, y, rstd, gate_up, activated), mlp, model, ctx.saved = ctx.saved, ctx.block.mlp, ctx.model, None
        model.gradients.matrix(mlp.down_proj.weight, dbranch, activated)
        dgate_up = kernels.swiglu_backward(dbranch, working(mlp.down_proj.weight, dbranch.dtype), gate_up)
        model.gradients.matrix(mlp.gate_up_proj.weight, dgate_up, y)
        dy = dgate_up @ working(mlp.gate_up_proj.weight, dgate_up.dtype)
        return *model.gradients.norm(ctx.block.post_attention_layernorm.weight, dy, dx, x, rstd), None, None


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)  # of Q, K and V
        self.qkv_proj = QKV(config.hidden_size, self.heads, self.head_dim)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = GateUp(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, branch: Tensor | None, model: "TinyLlama", length: int) -> tuple[Tensor, Tensor]:
        """The residual stream and what the layer before adds to it -> the same for the next; all [N, D]."""
        x, branch = AttentionFunction.apply(x, branch, self, model, length)
        return FeedForwardFunction.apply(x, branch, self, model)


class EmbeddingFunction(torch.autograd.Function):
    """Token ids [N] -> [N, D]. Its gradient comes last, and is added to that of the head, which has the same weight."""

    @staticmethod
    def forward(ctx, weight: Tensor, ids: Tensor, model: "TinyLlama"):
        ctx.sorted, ctx.model = [], model
        if ctx.needs_input_grad[0]:
            model.gradients.later(lambda: ctx.sorted.extend(ids.sort(stable=True)), ids)
        return weight.index_select(0, ids)

    @staticmethod
    @backward_of("embed")
    def backward(ctx, dx: Tensor):
        weight, (ids, order) = ctx.model.embed_tokens.weight, ctx.sorted
        ctx.model.gradients.later(
            lambda: store(weight, lambda out: kernels.add_embedding_gradient(ids, order, dx, out)), ids, order, dx
        )
        return None, None, None


class LossFunction(torch.autograd.Function):
    """The last norm, the head and the mean cross-entropy in nats: x and branch [N, D], targets [N] -> scalar."""

    @staticmethod
    def forward(ctx, x: Tensor, branch: Tensor | None, targets: Tensor, model: "TinyLlama"):
        weight = working(model.lm_head.weight, products_dtype(x))
        total, y, rstd = kernels.add_norm(x, branch, model.norm.weight, model.norm.eps, weight.dtype)
        logits = y @ weight.T  # [N, V]
        ctx.saved, ctx.model = (total, y, rstd, logits), model
        return kernels.cross_entropy(logits, targets, any(ctx.needs_input_grad))  # logits become their gradient

    @staticmethod
    @backward_of("loss")
    def backward(ctx, dloss: Tensor):
        (total, y, rstd, dlogits), model, ctx.saved = ctx.saved, ctx.model, None
        if dloss.data_ptr() != model.one.data_ptr():  # a training step passes `model.one`, which changes nothing
            dlogits = dlogits * dloss
        model.gradients.matrix(model.lm_head.weight, dlogits, y)
        dy = dlogits @ working(model.lm_head.weight, dlogits.dtype)
        return *model.gradients.norm(model.norm.weight, dy, None, total, rstd, ctx.needs_input_grad[1]), None, None


class TinyLlama(nn.Module):
    """Decoder-only language model with tied input and output embeddings."""

    kernel_flops = costs.kernel_flops
    optimizer_communicates = True  # gradients do not stand in `.grad`, where DistributedDataParallel would look for them

    def __init__(self, config: ModelConfig, switches: Switches = SWITCHES) -> None:
        super().__init__()
        self.switches = switches
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        cos, sin = rope_tables(config.head_dim, config.max_sequence_length, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)  # [S_max, Dh]
        self.register_buffer("sin", sin, persistent=False)
        self.register_buffer("one", torch.ones(()), persistent=False)  # the gradient of the loss
        self.register_load_state_dict_pre_hook(weights.fuse_on_load)
        self.load_state_dict(weights.initialize(self.baseline_state_dict(), config.initializer_std))
        self.gradients = Gradients()

    def hidden_states(self, input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """[B, S] -> the residual stream and, where it is not added yet, what the last layer adds to it, each [B S, D]."""
        with span("embed"):
            x, branch = EmbeddingFunction.apply(self.embed_tokens.weight, input_ids.flatten(), self), None
        for layer in self.layers:
            x, branch = layer(x, branch, self, input_ids.shape[1])
        return x, branch

    @torch.no_grad()
    def forward(self, input_ids: Tensor) -> Tensor:  # [B, S] -> logits [B, S, V]
        x, branch = self.hidden_states(input_ids)
        _, y, _ = kernels.add_norm(x, branch, self.norm.weight, self.norm.eps, products_dtype(x))
        return (y @ working(self.lm_head.weight, y.dtype).T).view(*input_ids.shape, -1)

    def loss(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats; `targets` [B, S] are the tokens that follow, already shifted."""
        x, branch = self.hidden_states(input_ids)
        with span("loss"):
            return LossFunction.apply(x, branch, targets.flatten(), self)

    def baseline_state_dict(self) -> dict[str, Tensor]:
        """The weights under Version 1's names, from any version."""
        return weights.baseline_state_dict(self)


def make_model(options: Options) -> TinyLlama:
    return TinyLlama(options.model, available(options))


def make_optimizer(model: TinyLlama, options: Options) -> MasterAdamW:
    return MasterAdamW(model, lr=options.learning_rate)


def make_step(model: TinyLlama, optimizer: MasterAdamW, precision: Precision) -> Step:
    """A function of a batch: one optimizer step; it returns the loss from before it, on the device."""
    if precision.dtype == torch.float16:
        raise UsageError("Version 4 does not scale the loss, which float16 needs: leave out --amp-dtype float16")
    optimizer.work_in(model.norm.weight.dtype if precision.dtype == torch.float32 else precision.dtype)

    def step(batch: Batch) -> Tensor:
        branching = model.switches["side-branch"] and batch[0].is_cuda and (optimizer.form or batch[0].numel() <= BRANCH_TOKENS)
        with model.gradients.on_side_branch(branching, optimizer.update_block if model.switches["early-update"] else None):
            with precision.autocast():
                loss = model.loss(*batch)
            with span("backward"):
                loss.backward(model.one)
        with span("optimizer"):
            optimizer.step()
        return loss.detach()

    return step


def train(options: RunOptions, make_model=make_model, make_step=make_step) -> Run:
    """A whole training run. An exercise or a test may replace how its model or its step is made."""
    with Run(options, "v4", captured=CAPTURED, forms=PARALLEL) as run:
        model = run.place(make_model(options))  # on its device and, where there are several processes, wrapped for them
        optimizer = run.adapt(make_optimizer(model, options))
        step = run.prepare(make_step(model, optimizer, run.precision))  # gradients checked, warmed up, captured if asked for
        for batch in run.batches():  # ends at --num-steps, at a signal, or where the processes agree to stop
            run.did(step(batch))  # takes time and loss; prints and saves where that is due
    return run


def main() -> int:
    parser = cli.parser(__doc__, SWITCHES)
    options = cli.parse(parser.parse_args(), SWITCHES)
    return train(options).exit_code


if __name__ == "__main__":
    cli.command(main)
