"""Six parts, each of which makes a GPU wait: mend one at a time, with the same results."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

LETTERS = "".join(map(chr, range(128)))


class Samples(torch.utils.data.Dataset):
    """Pieces of `length` letters, each as numbers below 128: [length]."""

    def __init__(self, text: str, length: int) -> None:
        self.text = text
        self.length = length

    def __len__(self) -> int:
        return len(self.text) // self.length

    def __getitem__(self, index: int) -> Tensor:
        piece = self.text[index * self.length :][: self.length]
        return torch.tensor([LETTERS.index(letter) for letter in piece])


def host_tensor(*shape: int) -> Tensor:
    """The memory of the host from which features are copied to the GPU in each step."""
    return torch.zeros(shape)


def gradient_norms(gradients: Sequence[Tensor]) -> Tensor:
    """The L2 norm of each gradient: [P], for a log that is written every 100 steps."""
    return torch.tensor([gradient.norm().item() for gradient in gradients])


def tidy_memory() -> None:
    """Gives memory that no tensor uses back to the GPU."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def checksum(batch: Tensor) -> int:
    """CRC-32 of the batch's bytes, by which two runs can tell that they read the same data."""
    remainder = 0xFFFFFFFF
    for byte in batch.numpy().tobytes():
        remainder ^= byte
        for _ in range(8):
            remainder = (remainder >> 1) ^ (0xEDB88320 * (remainder & 1))
    return remainder ^ 0xFFFFFFFF


def save(model: nn.Module, step: int, path: Path) -> None:
    """Keeps the weights, so that at most 1,000 steps are lost."""
    torch.save(model.state_dict(), path)
