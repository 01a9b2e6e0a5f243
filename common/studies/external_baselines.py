"""External baselines: transformers' LLaMA, compiled or with Liger's kernels, and a LLaMA that is fused by hand.

    hf              transformers.LlamaForCausalLM, eager, with attention by scaled_dot_product_attention
    hf-compile      its forward pass and loss in one torch.compile, in the default mode
    liger           hf with liger-kernel's RoPE, RMSNorm and SwiGLU, and its fused output head and loss (NVIDIA or AMD GPU)
    liger-compile   the same compiled, with transformers' loss, as Liger's waits for the GPU; so its step can also be captured
    captured        the model of `captured_peer` in one torch.compile, with PyTorch's fused AdamW, and its step captured (GPU)
    captured-bf16   the same with bf16 weights over fp32 masters, and an AdamW by torch.compile that writes both (GPU)
    captured-tuned  captured-bf16 compiled with max-autotune and coordinate descent, which takes minutes (GPU)
    captured-fp8    captured with torchao's FP8 training of the blocks, one scale a tensor (GPU)

A baseline is used like a version: it starts from Version 1's weights, in fp32, and is trained with AdamW and autocast. Its step
drops the gradients (`zero_grad` sets them to None), so nothing is set to zero or added up. The benchmark runs a baseline as its
users do, without the deterministic algorithms that versions ask for. These choices keep transformers from doing extra work:

- Loss: `forward(labels=targets, shift_labels=targets)`. `labels` asks for the model's own loss, in the model's own precision.
  `shift_labels` says that the targets are already the next tokens, so nothing is shifted.
- There is no key/value cache (`use_cache=False`), no padding mask, no hidden states or attention weights returned, no dropout.
- Attention: the function behind `attn_implementation="sdpa"`, under another name. Under the name "sdpa", transformers 5.23 looks
  in each step for several documents in one row, which waits for the GPU, and compiled code always builds the [B, 1, S, S] mask,
  with which PyTorch cannot use its flash kernel. For a name without a mask function transformers builds no mask, and the same
  function then asks for causal attention. transformers 4.51 has no mask functions, and builds no mask for "sdpa".
- Liger replaces names inside transformers' module for the whole process: RoPE, and the classes of norm and feed-forward that
  later models are made of. The benchmark therefore gives each model a process of its own.
"""

import importlib.util
from dataclasses import dataclass

from common import device as devices
from common import weights
from common.config import ModelConfig
from common.errors import UsageError
from common.options import Options
from common.precision import Precision
from common.spans import span
from common.studies import captured_peer
from common.training.capture import Batch, Step

import torch
from torch import Tensor, nn

# Module to import: what installs it, without a torch or triton that would replace the one that is there.
TRANSFORMERS = {"transformers": "pip install 'transformers>=4.51'"}
TORCHAO = {"torchao": "pip install --no-deps torchao"}
TUNED = "max-autotune-no-cudagraphs"  # the mode of torch.compile
LIGER = {"liger_kernel": "pip install --no-deps liger-kernel", "triton": "a GPU build of PyTorch, which brings triton"}


def llama_config(config: ModelConfig, attention: str):
    """The transformers.LlamaConfig of the same architecture; `attention` names its attention function."""
    from transformers import LlamaConfig

    return LlamaConfig(**config.for_transformers() | {"use_cache": False, "attn_implementation": attention})


def causal_attention() -> str:
    """The name of transformers' attention by scaled_dot_product_attention without a mask (see above)."""
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
        weights.initialize(self.baseline_state_dict(), config.initializer_std)

    def forward(self, input_ids: Tensor) -> Tensor:  # [B, S] -> logits [B, S, V]
        return self.llama(input_ids=input_ids).logits

    def loss(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats; `targets` [B, S] are the tokens that follow, already shifted."""
        return self.llama(input_ids=input_ids, labels=targets, shift_labels=targets).loss

    def baseline_state_dict(self) -> dict[str, Tensor]:
        """The weights under Version 1's names."""
        return {name.removeprefix("llama.").removeprefix("model."): weight for name, weight in self.state_dict().items()}


def rename_on_load(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_) -> None:
    """A pre-hook of `load_state_dict` that puts transformers' prefixes before Version 1's names."""
    for name in [name for name in state_dict if not name.startswith(f"{prefix}llama.")]:
        own = name.removeprefix(prefix)
        inner = own if own.startswith("lm_head.") else f"model.{own}"
        state_dict[f"{prefix}llama.{inner}"] = state_dict.pop(name)


Llama = TinyLlama | captured_peer.TinyLlama


@dataclass(frozen=True)
class Peer:
    """An external baseline; it has what the module of a version has."""

    name: str
    packages: dict[str, str]
    compiled: bool | str = False  # or a mode of torch.compile
    liger: bool = False

    CAPTURED = False  # as in a version: whether the step is captured unless asked otherwise

    def check(self, device: torch.device, amp_dtype: torch.dtype | None) -> None:
        """Raises UsageError if the baseline cannot run here, or not in this precision (`precision.amp_dtype`)."""
        missing = [install for module, install in self.packages.items() if importlib.util.find_spec(module) is None]
        if missing:
            raise UsageError(f"{self.name} needs what is not installed here: {'; '.join(missing)}")
        if self.liger and not devices.is_gpu(device):
            raise UsageError(f"{self.name} needs an NVIDIA or AMD GPU: its kernels do not run on a CPU")

    def make_model(self, options: Options) -> Llama:
        model = TinyLlama(options.model)
        if self.liger:
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama(model=model.llama, fused_linear_cross_entropy=not self.compiled)
        return model

    def make_optimizer(self, model: Llama, options: Options) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=options.learning_rate, fused=self.liger and bool(self.compiled))

    def make_step(self, model: Llama, optimizer: torch.optim.Optimizer, precision: Precision) -> Step:
        """A function of a batch: one optimizer step as in Version 1, with the loss compiled if `compiled`."""
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


@dataclass(frozen=True)
class HandFused(Peer):
    """An external baseline with the model of `captured_peer`, whose step is captured."""

    working: torch.dtype | None = None  # of the weights that products read beside fp32 masters; None: they read the masters
    fp8: bool = False  # products of the blocks

    CAPTURED = True

    def check(self, device: torch.device, amp_dtype: torch.dtype | None) -> None:
        super().check(device, amp_dtype)
        if not devices.is_gpu(device):
            raise UsageError(f"{self.name} needs an NVIDIA or AMD GPU: a CPU has no graph that could hold its step")
        if (self.working or self.fp8) and amp_dtype != torch.bfloat16:
            raise UsageError(f"{self.name} needs --use-amp with bfloat16")
        if problem := devices.compile_problem(device):
            raise UsageError(problem)

    def make_model(self, options: Options) -> Llama:
        from torch._inductor import config

        config.coordinate_descent_tuning = self.compiled == TUNED
        model = captured_peer.TinyLlama(options.model)
        if self.fp8:
            from torchao.float8 import convert_to_float8_training

            convert_to_float8_training(model.layers)  # the head and attention stay in 16 bits
        return model

    def make_optimizer(self, model: Llama, options: Options) -> torch.optim.Optimizer:
        if self.working and isinstance(model, captured_peer.TinyLlama):
            return captured_peer.CompiledAdamW(model, self.working, options.learning_rate, self.compiled)
        return torch.optim.AdamW(model.parameters(), lr=options.learning_rate, fused=True)  # capturable once it is captured


PEERS = {
    "hf": Peer("hf", TRANSFORMERS),
    "hf-compile": Peer("hf-compile", TRANSFORMERS, compiled=True),
    "liger": Peer("liger", TRANSFORMERS | LIGER, liger=True),
    "liger-compile": Peer("liger-compile", TRANSFORMERS | LIGER, compiled=True, liger=True),
    "captured": HandFused("captured", {}, compiled=True),
    "captured-bf16": HandFused("captured-bf16", {}, compiled=True, working=torch.bfloat16),
    "captured-tuned": HandFused("captured-tuned", {}, compiled=TUNED, working=torch.bfloat16),
    "captured-fp8": HandFused("captured-fp8", TORCHAO, compiled=True, fp8=True),
}
