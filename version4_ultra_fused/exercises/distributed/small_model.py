"""The small model of these exercises: an embedding, blocks of RMSNorm and SwiGLU, and a head that
shares the embedding's weight.

It is Version 1 without attention. Its forward pass returns the loss.
"""

from version3_triton.kernels.reference import linear_cross_entropy, swiglu

import torch
from torch import Tensor, nn

# Shapes: B batch, S sequence, D hidden, F ffn, V vocabulary.


class Block(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)  # weight [F, D]
        self.up_proj = nn.Linear(hidden, ffn, bias=False)  # weight [F, D]
        self.down_proj = nn.Linear(ffn, hidden, bias=False)  # weight [D, F]

    def forward(self, x: Tensor) -> Tensor:  # [B, S, D] -> [B, S, D]
        normed = self.norm(x)
        return x + self.down_proj(swiglu(self.gate_proj(normed), self.up_proj(normed)))


class SmallModel(nn.Module):
    def __init__(self, vocabulary: int, hidden: int, ffn: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, ffn) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-5)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats; ids and targets [B, S]."""
        x = self.embedding(ids)  # [B, S, D]
        for block in self.blocks:
            x = block(x)
        return linear_cross_entropy(self.norm(x), self.embedding.weight, targets)


def random_batch(seed: int, vocabulary: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Token ids and targets [B, S] each, the same for the same seed on every rank."""
    ids = torch.randint(
        vocabulary, (2, batch, length), generator=torch.Generator().manual_seed(seed)
    )
    return ids[0], ids[1]
