"""External baselines: transformers' LLaMA, compiled or with Liger's kernels, and a LLaMA that is
fused by hand.

    hf              transformers.LlamaForCausalLM, eager, with attention by
                    scaled_dot_product_attention
    hf-compile      its forward pass and loss in one torch.compile, in the default mode
    liger           hf with liger-kernel's RoPE, RMSNorm and SwiGLU, and its fused output head and
                    loss (NVIDIA or AMD GPU)
    liger-compile   the same compiled, with transformers' loss, as Liger's waits for the GPU; so its
                    step can also be captured
    captured        the model of `captured_peer` in one torch.compile, and its step captured (GPU)
    captured-bf16   the same with bf16 weights over fp32 masters, and an AdamW by torch.compile that
                    writes both (GPU)

A baseline is used like a version: it starts from Version 1's weights, in fp32, and is trained with
autocast and, but for captured-bf16, PyTorch's fused AdamW, the default of transformers' Trainer
(`adamw_torch_fused`). These choices keep transformers from doing extra work:

- `forward(labels=targets, shift_labels=targets)` asks for the model's own loss of targets that are
  already shifted.
- There is no key/value cache, no padding mask, no hidden states or attention weights returned, no
  dropout.
- Attention: the function behind `attn_implementation="sdpa"`, under another name. Under the name
  "sdpa", transformers 5.23 looks in each step for several documents in one row, which waits for the
  GPU, and compiled code always builds the [B, 1, S, S] mask, with which PyTorch cannot use its
  flash kernel. For a name without a mask function transformers builds no mask, and the same
  function then asks for causal attention.
- Liger replaces names inside transformers' module for the whole process, so each model needs a
  process of its own.
"""

import importlib.util
from collections.abc import Mapping
from typing import Any, NamedTuple

from common import device as devices
from common import weights
from common.config import ModelConfig
from common.options import Options
from common.precision import Precision
from common.spans import span
from common.training.preparation import Batch, Step
from studies.peers import captured_peer
from tracepage.errors import UsageError

import torch
from torch import Tensor, nn

# Each module with a line that installs it, without a torch or triton that would replace the one
# that is there.
TRANSFORMERS = {"transformers": "pip install 'transformers>=4.53'"}
LIGER = {
    "liger_kernel": "pip install --no-deps liger-kernel",
    "triton": "a GPU build of PyTorch, which brings triton",
}


class TinyLlama(nn.Module):
    """transformers' LlamaForCausalLM with the methods and the initial weights of a version."""

    def __init__(self, config: ModelConfig) -> None:
        from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        super().__init__()
        AttentionInterface.register("sdpa_causal", sdpa_attention_forward)  # see above
        more = {"use_cache": False, "attn_implementation": "sdpa_causal"}
        self.llama = LlamaForCausalLM(LlamaConfig(**config.for_transformers() | more))
        self.register_load_state_dict_pre_hook(rename_on_load)
        weights.initialize(self.baseline_state_dict(), config.initializer_std)

    def forward(self, input_ids: Tensor) -> Tensor:  # [B, S] -> logits [B, S, V]
        return self.llama(input_ids=input_ids).logits

    def loss(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats; `targets` [B, S] are the next tokens, already shifted."""
        return self.llama(input_ids=input_ids, labels=targets, shift_labels=targets).loss

    def baseline_state_dict(self) -> dict[str, Tensor]:
        """The weights under Version 1's names."""
        return {
            name.removeprefix("llama.").removeprefix("model."): weight
            for name, weight in self.state_dict().items()
        }


def rename_on_load(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_) -> None:
    """A pre-hook of `load_state_dict` that puts transformers' prefixes before Version 1's names."""
    for name in [name for name in state_dict if not name.startswith(f"{prefix}llama.")]:
        inner = name.removeprefix(prefix)
        if not inner.startswith("lm_head."):
            inner = f"model.{inner}"
        state_dict[f"{prefix}llama.{inner}"] = state_dict.pop(name)


class Peer(NamedTuple):
    """An external baseline; it has what the module of a version has."""

    name: str
    packages: Mapping[str, str] = {}
    compiled: bool = False
    liger: bool = False
    # as in a version: the model of `captured_peer`, whose step is captured unless asked otherwise
    CAPTURED: bool = False
    # of the weights that products read beside fp32 masters; None: they read the masters
    working: torch.dtype | None = None

    def check(self, device: torch.device, amp_dtype: torch.dtype | None) -> None:
        """Raises UsageError if the baseline cannot run here, or not in this precision
        (`precision.amp_dtype`).
        """
        missing = [
            install
            for module, install in self.packages.items()
            if importlib.util.find_spec(module) is None
        ]
        if missing:
            raise UsageError(f"{self.name} needs what is not installed here: {'; '.join(missing)}")
        if (self.liger or self.CAPTURED) and not devices.is_gpu(device):
            raise UsageError(f"{self.name} needs an NVIDIA or AMD GPU")
        if self.working and amp_dtype != torch.bfloat16:
            raise UsageError(f"{self.name} needs --use-amp with bfloat16")
        problem = devices.compile_problem(device) if self.CAPTURED else None
        if problem:
            raise UsageError(problem)

    def make_model(self, options: Options) -> nn.Module:
        if self.CAPTURED:
            return captured_peer.TinyLlama(options.model)
        model = TinyLlama(options.model)
        if self.liger:
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama(
                model=model.llama, fused_linear_cross_entropy=not self.compiled
            )
        return model

    def make_optimizer(self, model: nn.Module, options: Options) -> torch.optim.Optimizer:
        if self.working:
            assert isinstance(model, captured_peer.TinyLlama)
            return captured_peer.CompiledAdamW(
                model, self.working, options.learning_rate, self.compiled
            )
        return torch.optim.AdamW(model.parameters(), lr=options.learning_rate, fused=True)

    def make_step(self, model: Any, optimizer: torch.optim.Optimizer, precision: Precision) -> Step:
        """A function of a batch: one optimizer step as in Version 1, with the loss compiled if
        `compiled`.
        """
        loss_of = devices.compiled(model.loss, precision.device, self.compiled)

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


EVERY = (
    Peer("hf", TRANSFORMERS),
    Peer("hf-compile", TRANSFORMERS, compiled=True),
    Peer("liger", TRANSFORMERS | LIGER, liger=True),
    Peer("liger-compile", TRANSFORMERS | LIGER, compiled=True, liger=True),
    Peer("captured", compiled=True, CAPTURED=True),
    Peer("captured-bf16", compiled=True, CAPTURED=True, working=torch.bfloat16),
)
PEERS = {peer.name: peer for peer in EVERY}
