"""What autograd keeps."""

from collections import Counter

from common.config import ModelConfig
from version1_pytorch_baseline import tiny_llama_v1

import torch
from torch import Tensor, nn


def model_and_batch(
    config: ModelConfig, shape: tuple[int, int], device: str = "cpu"
) -> tuple[nn.Module, Tensor, Tensor]:
    """Version 1, token ids and targets."""
    ids = [torch.randint(config.vocab_size, shape, device=device) for _ in range(2)]
    return tiny_llama_v1.TinyLlama(config).to(device), *ids


def saved_bytes(
    config: ModelConfig,
    model: nn.Module,
    batch: list[Tensor],
    span: list[str],
    autocast: str | None = None,
) -> Counter:
    """Bytes of the distinct storages that autograd keeps after a forward pass, by part; not the
    model's own tensors.
    """
    own = {
        tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]
    }
    weights = {tuple(p.shape) for p in model.parameters()} | {
        tuple(p.shape[::-1]) for p in model.parameters()
    }
    length = batch[0].shape[1]
    tables = (length, config.head_dim)
    kept, parts = [], {}

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)  # so that no storage is used again under the same address
        address = tensor.untyped_storage().data_ptr()
        if address not in own and address not in parts:
            is_cast = (
                autocast
                and tensor.dtype == torch.bfloat16
                and (tuple(tensor.shape) in weights or tensor.shape == tables)
            )
            is_score = span[-1] == "attention" and tensor.shape[-2:] == (length, length)
            part = "casts" if is_cast else "scores" if is_score else span[-1]
            parts[address] = (part, tensor.untyped_storage().nbytes())
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast(autocast or "cpu", torch.bfloat16, enabled=autocast is not None),
    ):
        model.loss(*batch)
    total = Counter()
    for part, size in parts.values():
        total[part] += size
    return total
