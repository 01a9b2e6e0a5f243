"""The six parts, mended."""

import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn


class Samples(torch.utils.data.Dataset):
    """All letters become numbers once, before the first step."""

    def __init__(self, text: str, length: int) -> None:
        letters = torch.tensor(list(text.encode("ascii")))
        self.samples = letters.unfold(0, length, length)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        return self.samples[index]


def host_tensor(*shape: int) -> Tensor:
    """Pinned: the GPU reads it by itself, and the host goes on."""
    return torch.zeros(shape, pin_memory=torch.cuda.is_available())


def gradient_norms(gradients: Sequence[Tensor]) -> Tensor:
    """The norms stay on the GPU until the log is written."""
    return torch.stack([gradient.norm() for gradient in gradients])


def tidy_memory() -> None:
    """The allocator keeps the memory, which the next step needs again."""


def checksum(batch: Tensor) -> int:
    """The same sum, in C."""
    return zlib.crc32(batch.numpy().tobytes())


def save(model: nn.Module, step: int, path: Path) -> None:
    """As often as the promise asks."""
    if step % 1000 == 999:
        torch.save(model.state_dict(), path)
