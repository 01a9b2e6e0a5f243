"""A LLaMA fused by hand with PyTorch alone, made for torch.compile and a captured step: `captured`
and `captured-bf16`.

It holds no kernel of its own, only PyTorch's fastest operations: one product for Q, K and V and one
for gate and up, `F.rms_norm`, `scaled_dot_product_attention`, and `F.linear_cross_entropy` where
PyTorch has it. torch.compile fuses the rest. The residual stream stays in fp32. So does the
embedding that is looked up, because PyTorch's kernel for its bf16 gradient cannot be captured.

`captured` runs under autocast, which casts each fp32 weight in each step. For `captured-bf16` the
parameters are masters: every matrix product reads a working copy in bf16, which `CompiledAdamW`
writes beside its fp32 master.
"""

from common import device as devices
from common import weights
from common.attention import attention
from common.config import ModelConfig
from common.rope import rope_tables, rotate_half

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Shapes: B batch, S sequence, N = B S tokens, D hidden, H heads, K kv heads, Dh head dim, F ffn, V
# vocabulary.


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats of x [B, S, D] against targets [B, S]; under autocast in fp32."""
    if hasattr(F, "linear_cross_entropy"):
        return F.linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten())
    logits = F.linear(x, weight).flatten(0, 1)  # [B S, V]
    return F.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten()
    )


class Linear(nn.Linear):
    """x @ weight.T, with the working copy of the weight where there is one."""

    working: Tensor | None = None  # a leaf with a gradient of its own; `CompiledAdamW` makes it

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def read(self) -> Tensor:
        return self.weight if self.working is None else self.working

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.read())


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.sizes = (config.hidden_size, kv_size, kv_size)  # of Q, K and V
        self.qkv_proj = Linear(config.hidden_size, sum(self.sizes))
        self.o_proj = Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [B, S, D] -> [B, S, D]
        q, k, v = self.qkv_proj(x).split(self.sizes, dim=-1)  # [B, S, D], 2 x [B, S, K Dh]
        # [B, H or K, S, Dh]
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        q, k = ((t * cos + rotate_half(t) * sin).to(t.dtype) for t in (q, k))  # rounded once
        return self.o_proj(attention(q, k, v).transpose(1, 2).flatten(2))  # [B, S, D]


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.sizes = (config.intermediate_size, config.intermediate_size)  # of gate and up
        self.gate_up_proj = Linear(config.hidden_size, sum(self.sizes))
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, D] -> [B, S, D]
        gate, up = self.gate_up_proj(x).split(self.sizes, dim=-1)  # 2 x [B, S, F]
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [B, S, D] -> [B, S, D]
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class TinyLlama(nn.Module):
    """Decoder-only language model with tied input and output embeddings; Version 1's weights load
    into it.
    """

    cos: Tensor  # [S_max, Dh]
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.lm_head.weight = self.embed_tokens.weight
        cos, sin = rope_tables(config.head_dim, config.max_sequence_length, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        weights.initialize(self.baseline_state_dict(), config.initializer_std)
        self.register_load_state_dict_pre_hook(weights.fuse_on_load)

    def hidden_states(self, input_ids: Tensor) -> Tensor:  # [B, S] -> [B, S, D]
        x = self.embed_tokens(input_ids)
        length = input_ids.shape[1]
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return self.norm(x)

    def forward(self, input_ids: Tensor) -> Tensor:  # [B, S] -> logits [B, S, V]
        return self.lm_head(self.hidden_states(input_ids))

    def loss(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats; `targets` [B, S] are the next tokens, already shifted."""
        return linear_cross_entropy(self.hidden_states(input_ids), self.lm_head.read(), targets)

    def baseline_state_dict(self) -> dict[str, Tensor]:
        """The weights under Version 1's names."""
        return weights.baseline_state_dict(self)


# A master, its working copy or None, its first and second moment, and its gradients: of the copy,
# of the master, or of both.
Row = tuple[Tensor, Tensor | None, Tensor, Tensor, list[Tensor]]


def adamw(
    rows: list[Row], steps: Tensor, rate: Tensor, numbers: tuple[float, float, float, float]
) -> None:
    """One AdamW update in place (Loshchilov and Hutter 2019, arXiv:1711.05101), which also writes
    the working copies.

    Args:
        steps: updates made before this one, on the device; counted up here.
        rate: the learning rate, on the device.
        numbers: beta1, beta2, eps and the weight decay.
    """
    beta1, beta2, eps, decay = numbers
    steps.add_(1)
    correction1 = 1 - beta1**steps
    correction2 = 1 - beta2**steps
    for master, working, exp_avg, exp_avg_sq, gradients in rows:
        gradient = gradients[0].to(master.dtype)
        for other in gradients[1:]:
            gradient = gradient + other
        exp_avg.lerp_(gradient, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (exp_avg_sq / correction2).sqrt() + eps
        master.mul_(1 - rate * decay).sub_(rate * (exp_avg / correction1) / root)
        if working is not None:
            working.copy_(master)


class CompiledAdamW(torch.optim.Optimizer):
    """AdamW over all tensors of a TinyLlama in one torch.compile. UsageError: torch.compile does
    not work here.

    It makes the working copies (of `dtype`) of the model's matrices and keeps them up to date, also
    when the model loads weights.
    """

    def __init__(self, model: TinyLlama, dtype: torch.dtype, lr: float, compiled: bool) -> None:
        # The other numbers are torch.optim.AdamW's.
        numbers = dict(lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, capturable=True)
        super().__init__(model.parameters(), numbers)
        self.working = {}  # parameter: its copy
        for module in model.modules():
            if isinstance(module, Linear):
                module.working = module.weight.detach().to(dtype, copy=True).requires_grad_()
                self.working[module.weight] = module.working
        model.register_load_state_dict_post_hook(self.copy_weights)
        device = model.embed_tokens.weight.device
        # Both are on the device, for a captured step.
        self.steps = torch.zeros((), device=device)
        self.rate = torch.zeros((), device=device)
        for parameter in model.parameters():
            self.state[parameter] = {
                "step": self.steps,
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
        self.update = devices.compiled(adamw, device, compiled)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        rows = []
        for parameter in group["params"]:
            copy = self.working.get(parameter)
            leaves = [parameter] if copy is None else [copy, parameter]
            gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
            working = None if copy is None else copy.detach()
            moments = self.state[parameter]["exp_avg"], self.state[parameter]["exp_avg_sq"]
            rows.append((parameter.detach(), working, *moments, gradients))
        self.rate.fill_(group["lr"])
        numbers = (*group["betas"], group["eps"], group["weight_decay"])
        self.update(rows, self.steps, self.rate, numbers)

    @torch.no_grad()
    def copy_weights(self, model: nn.Module, keys: object) -> None:
        """A hook: writes the working copies after the model has loaded weights."""
        for parameter, copy in self.working.items():
            copy.copy_(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, those of the working copies too."""
        super().zero_grad()
        for copy in self.working.values():
            copy.grad = None
