"""What a user would take instead of a version of ours: transformers' LLaMA, the same compiled, the same with Liger's kernels.

    hf           transformers.LlamaForCausalLM, eager, attention by scaled_dot_product_attention
    hf-compile   its forward pass and loss in one torch.compile, in the default mode
    liger        hf with liger-kernel's RoPE, RMSNorm, SwiGLU, and its output head and loss in one (NVIDIA or AMD GPU)

A peer is used like a version (`common.training.run` says what one is). It starts from Version 1's weights, in fp32, and is trained
with Version 1's AdamW and autocast. What was chosen so that a peer does its own work and no more:

- loss: `forward(labels=targets, shift_labels=targets)`. The model computes it by its own function, in its own precision.
  `labels` says that a loss is wanted; `shift_labels` says that the targets are already the next tokens, so nothing is shifted.
- no key/value cache (`use_cache=False`), no padding mask, no hidden states or attention weights returned, no dropout.
- attention: the function behind `attn_implementation="sdpa"`, under a name of its own. Under the name "sdpa", transformers
  (5.23) looks in each step for several documents in one row, which waits for the GPU, and compiled code always builds the
  [B, 1, S, S] mask, with which PyTorch cannot take its flash kernel. For a name that has no mask function transformers builds
  no mask, and the same function then asks for causal attention. 4.51 has no mask functions, and builds none for "sdpa".
- Liger's patch replaces names inside transformers' module for the whole process, not of one model alone: RoPE, and the
  classes of norm and feed-forward that later models are made of. A benchmark gives each model a process of its own.
"""

import importlib.util
from argparse import Namespace
from dataclasses import dataclass

from common import device as devices
from common.config import ModelConfig
from common.errors import UsageError
from common.spans import span

import torch
from torch import Tensor, nn

# Module to import: what installs it, without a torch or triton that would replace the one that is there.
TRANSFORMERS = {"transformers": "pip install 'transformers>=4.51'"}
LIGER = {"liger_kernel": "pip install --no-deps liger-kernel", "triton": "a GPU build of PyTorch, which brings triton"}


def llama_config(config: ModelConfig, attention: str):
    """The transformers.LlamaConfig of the same architecture; `attention` names its attention function."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        max_position_embeddings=config.max_sequence_length,
        rope_theta=config.rope_theta,
        rms_norm_eps=config.rms_norm_eps,
        initializer_range=config.initializer_std,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation=attention,
    )


def causal_attention() -> str:
    """The name of transformers' attention by scaled_dot_product_attention that builds no mask (see above)."""
    import transformers

    if not hasattr(transformers, "AttentionMaskInterface"):  # 4.51
        return "sdpa"
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    transformers.AttentionInterface.register("sdpa_causal", sdpa_attention_forward)
    return "sdpa_causal"


class TinyLlama(nn.Module):
    """transformers' LlamaForCausalLM with the methods and the initial weights of a version."""

    def __init__(self, config: ModelConfig) -> None:
        from transformers import LlamaForCausalLM

        super().__init__()
        self.llama = LlamaForCausalLM(llama_config(config, causal_attention()))
        self.register_load_state_dict_pre_hook(rename_on_load)
        generator = torch.Generator().manual_seed(torch.initial_seed())  # as in Version 1, matrix by matrix
        for name, weight in self.baseline_state_dict().items():
            if weight.dim() == 2 and name != "lm_head.weight":
                nn.init.normal_(weight, std=config.initializer_std, generator=generator)

    def forward(self, input_ids: Tensor) -> Tensor:  # [B, S] -> logits [B, S, V]
        return self.llama(input_ids=input_ids).logits

    def loss(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats; `targets` [B, S] are the tokens that follow, already shifted."""
        return self.llama(input_ids=input_ids, labels=targets, shift_labels=targets).loss

    def baseline_state_dict(self) -> dict[str, Tensor]:
        """The weights under Version 1's names."""
        return {name.removeprefix("llama.").removeprefix("model."): weight for name, weight in self.state_dict().items()}


def rename_on_load(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_) -> None:
    """Puts transformers' prefixes before Version 1's names while a state dict is loaded."""
    for name in [name for name in state_dict if not name.startswith(f"{prefix}llama.")]:
        own = name.removeprefix(prefix)
        inner = own if own.startswith("lm_head.") else f"model.{own}"
        state_dict[f"{prefix}llama.{inner}"] = state_dict.pop(name)


def make_optimizer(model: nn.Module, options: Namespace) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=options.learning_rate)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], precision) -> Tensor:
    """One optimizer step as in Version 1; returns the loss from before it, on the device."""
    with precision.autocast():
        loss = model.loss(*batch)
    with span("backward"):
        precision.scale(loss).backward()
    with span("optimizer"):
        precision.step(optimizer)
        optimizer.zero_grad()
    return loss.detach()


@dataclass(frozen=True)
class Peer:
    """Has what a version's module has."""

    name: str
    packages: dict[str, str]
    compiled: bool = False
    liger: bool = False

    TinyLlama = TinyLlama
    make_optimizer = staticmethod(make_optimizer)
    train_step = staticmethod(train_step)

    def check(self, device: torch.device) -> None:
        """Raises UsageError if the peer cannot run here."""
        missing = [install for module, install in self.packages.items() if importlib.util.find_spec(module) is None]
        if missing:
            raise UsageError(f"{self.name} needs what is not installed here: {'; '.join(missing)}")
        if self.liger and not devices.is_gpu(device):
            raise UsageError(f"{self.name} needs an NVIDIA or AMD GPU: its kernels do not run on a CPU")

    def make_model(self, options: Namespace) -> nn.Module:
        model = TinyLlama(options.model)
        if self.liger:
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama(model=model.llama)  # fused_linear_cross_entropy is on unless switched off
        if self.compiled:
            model.loss = torch.compile(model.loss)
        return model


PEERS = {
    peer.name: peer
    for peer in (
        Peer("hf", TRANSFORMERS),
        Peer("hf-compile", TRANSFORMERS, compiled=True),
        Peer("liger", TRANSFORMERS | LIGER, liger=True),
    )
}
