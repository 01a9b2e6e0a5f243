"""Small models of the versions, all from the same seed, and what they compute on one batch."""

from argparse import Namespace
from types import ModuleType

from common.config import ModelConfig
from common.precision import Precision

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
FP8 = ModelConfig(  # sizes that products in FP8 take, that of the head too
    vocab_size=64,
    hidden_size=64,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
)


def config(kv_heads: int = 2) -> ModelConfig:
    return ModelConfig(
        vocab_size=61,
        hidden_size=48,
        num_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        intermediate_size=80,
    )


def build(
    version: ModuleType,
    *switches: dict[str, bool],
    kv_heads: int = 2,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """A version's model, with its own switches unless others are given; with PyTorch's operations
    where no kernel can run.
    """
    torch.manual_seed(0)
    table = {}
    kernels = getattr(version, "kernels", None)
    if kernels and (dtype == torch.float64 or kernels.missing(torch.device(device))):
        table["operations"] = kernels.REFERENCE
    return version.TinyLlama(config(kv_heads), *switches, **table).to(device, dtype)


def batch(device: torch.device | str = "cpu") -> Batch:
    """Two sequences of odd length and their targets, [2, 17] each."""
    ids = torch.randint(61, (2, 2, 17), generator=torch.Generator().manual_seed(1)).to(device)
    return ids[0], ids[1]


def gradients(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The gradients of the loss under Version 1's names; they take the place of the model's
    weights.
    """
    model.loss(*batch).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    return model.baseline_state_dict()


def losses(
    version: ModuleType,
    model: nn.Module,
    batches: list[Batch],
    precision: Precision,
    rate: float = 1e-2,
) -> list[float]:
    """The loss of each batch from before its step, in training as a run does it."""
    optimizer = version.make_optimizer(model, Namespace(learning_rate=rate))
    step = version.make_step(model, optimizer, precision)
    return [step(batch).item() for batch in batches]
