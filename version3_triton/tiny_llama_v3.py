"""Version 3: the operations that memory limits as Triton kernels, with backward passes of their own.

Changes from Version 2:

- norms, RoPE, attention, SwiGLU and the loss are kernels (`kernels/`, a file each); matrix products stay with the BLAS;
- a residual addition and the norm after it are one kernel, so a layer hands on what it adds without adding it;
- the loss computes its gradient in place of the logits, and takes tokens in chunks where there are more than 2^27 logits;
- QKV and gate-up fusion are always on; `--disable-triton-X` gives an operation back to PyTorch, to see its share.

Where there is no GPU every operation is PyTorch's, and a line says so; TRITON_INTERPRET=1 runs the kernels on a CPU, slowly.

    python tiny_llama_v3.py --batch-size 8 --seq-len 128 --num-steps 20
    python tiny_llama_v3.py --use-amp --disable-triton-attention
    python tiny_llama_v3.py --use-amp --mode benchmark                  # times each kernel instead
"""

import sys
from argparse import ArgumentParser, Namespace

from common import cli
from common import device as devices
from common.config import ModelConfig
from common.rope import rope_tables
from common.spans import span
from common.training import run
from version3_triton import benchmark_kernels, kernels

import torch
import torch.nn as nn
from torch import Tensor

# Shapes: B batch, S sequence, D hidden, H heads, K kv heads, Dh head dim, F ffn, V vocabulary.


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}  # name: Version 1's names


def fuse_on_load(fused: str):
    """A hook that stacks Version 1's matrices into the fused one while a state dict is loaded."""

    def hook(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_) -> None:
        names = [f"{prefix}{part}.weight" for part in FUSED[fused]]
        if names[0] in state_dict:
            state_dict[f"{prefix}{fused}.weight"] = torch.cat([state_dict.pop(name) for name in names])

    return hook


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, operations: kernels.Operations) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.operations = operations

    @span("norm")
    def forward(self, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        """x, with `branch` added if there is one, and its norm; all [B, S, D]."""
        if branch is None:
            return x, self.operations.rms_norm(x, self.weight, self.eps)
        return self.operations.add_rms_norm(branch, x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, operations: kernels.Operations) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.sizes = (config.hidden_size, kv_size, kv_size)  # of Q, K and V
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.operations = operations
        self.register_load_state_dict_pre_hook(fuse_on_load("qkv_proj"))

    @span("attention")
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [B, S, D] -> [B, S, D]
        q, k, v = self.qkv_proj(x).split(self.sizes, dim=-1)  # [B, S, D], 2 x [B, S, K Dh]
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in (q, k, v))  # [B, H or K, S, Dh]
        q, k = self.operations.apply_rope(q, k, cos, sin)
        out = self.operations.attention(q, k, v)  # [B, H, S, Dh]
        return self.o_proj(out.transpose(1, 2).flatten(2))  # [B, S, D]


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig, operations: kernels.Operations) -> None:
        super().__init__()
        self.sizes = (config.intermediate_size, config.intermediate_size)  # of gate and up
        self.gate_up_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.operations = operations
        self.register_load_state_dict_pre_hook(fuse_on_load("gate_up_proj"))

    @span("mlp")
    def forward(self, x: Tensor) -> Tensor:  # [B, S, D] -> [B, S, D]
        gate, up = self.gate_up_proj(x).split(self.sizes, dim=-1)  # 2 x [B, S, F]
        return self.down_proj(self.operations.swiglu(gate, up))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, operations: kernels.Operations) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, operations)
        self.self_attn = Attention(config, operations)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, operations)
        self.mlp = FeedForward(config, operations)

    def forward(self, x: Tensor, branch: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream and what the layer before adds to it -> the same for the next; all [B, S, D]."""
        x, normalized = self.input_layernorm(x, branch)
        x, normalized = self.post_attention_layernorm(x, self.self_attn(normalized, cos, sin))
        return x, self.mlp(normalized)


class TinyLlama(nn.Module):
    """Decoder-only language model with tied input and output embeddings."""

    def __init__(self, config: ModelConfig, operations: kernels.Operations = kernels.REFERENCE) -> None:
        super().__init__()
        self.operations = operations
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, operations) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, operations)
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
            x, branch = self.embed_tokens(input_ids), None
        for layer in self.layers:
            x, branch = layer(x, branch, self.cos, self.sin)
        _, normalized = self.norm(x, branch)
        return normalized

    def forward(self, input_ids: Tensor) -> Tensor:  # [B, S] -> logits [B, S, V]
        return self.lm_head(self.hidden_states(input_ids))

    def loss(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats; `targets` [B, S] are the tokens that follow, already shifted."""
        x = self.hidden_states(input_ids)
        with span("loss"):
            return self.operations.linear_cross_entropy(x, self.lm_head.weight, targets)

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

    def kernel_flops(self, input_ids: Tensor) -> dict[str, int]:
        """What FLOP counters do not see: two products in the forward kernel of attention, seven in its backward kernels.

        As counters do for other fused attention, for all S x S pairs of query and key, of which the kernels leave half out.
        """
        if "flash_attention" not in vars(kernels) or self.operations.attention is not kernels.flash_attention.attention:
            return {"forward": 0, "backward": 0}
        product = 2 * input_ids.numel() * input_ids.shape[1] * self.embed_tokens.embedding_dim * len(self.layers)
        return {"forward": 2 * product, "backward": 7 * product}


def add_arguments(parser: ArgumentParser) -> None:
    """The switches of this version."""
    group = parser.add_argument_group("kernels (all on where there is a GPU)")
    for name in kernels.SWITCHES:
        group.add_argument(f"--disable-triton-{name}", action="store_true", help="take PyTorch's operations for it")


def switched_off(options: Namespace) -> list[str]:
    """Of `kernels.SWITCHES`."""
    return [name for name in kernels.SWITCHES if vars(options)[f"disable_triton_{name}"]]


def describe(options: Namespace) -> dict[str, bool | str]:
    """For the run's record: which kernels are on, and why none where that has a reason."""
    reason = kernels.missing(devices.select(options.device))
    on = {f"triton_{name}": not reason and name not in switched_off(options) for name in kernels.SWITCHES}
    return on | ({"no_kernels": reason} if reason else {})


def make_model(options: Namespace) -> nn.Module:
    device = devices.select(options.device)
    reason = kernels.missing(device)
    if reason:
        print(f"no Triton kernels: {reason}; PyTorch's operations run in their place", file=sys.stderr)
    elif vars(options).get("use_amp"):
        kernels.refuse_wrong(device, cli.amp_dtype(options))
    return TinyLlama(options.model, kernels.choose(device, switched_off(options)))


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
    parser = run.parser(sys.modules[__name__])
    parser.add_argument("--mode", choices=("train", "benchmark"), default="train", help="default: train")
    options = parser.parse_args()
    action = run.train if options.mode == "train" else benchmark_kernels.of_version
    cli.command(lambda: action(sys.modules[__name__], cli.parse(options)))
