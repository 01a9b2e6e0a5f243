"""Fused matrices in the order that the epilogues of `kernels/matmul.py` want: rows that are
combined are neighbours.
"""

import torch
from torch import Tensor, nn


class GateUp(nn.Linear):
    """The rows of gate and up take turns; weight [2 F, D]."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__(hidden_size, 2 * intermediate_size, bias=False)

    def fused(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.stack((gate, up), 1).flatten(0, 1)

    def parts(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return weight[0::2].contiguous(), weight[1::2].contiguous()


class QKV(nn.Linear):
    """Within each head of Q and K the two rows of a rotation, i and i + Dh / 2, are neighbours;
    weight [(H + 2 K) Dh, D].

    Scores are sums over a head's elements, which their order does not change as long as Q and K
    share it.
    """

    def __init__(self, hidden_size: int, heads: tuple[int, int, int], head_dim: int) -> None:
        super().__init__(hidden_size, sum(heads) * head_dim, bias=False)
        self.heads = heads
        self.head_dim = head_dim

    def fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (
            x.unflatten(0, (-1, 2, self.head_dim // 2)).transpose(1, 2).flatten(0, 2)
            for x in (q, k)
        )
        return torch.cat((q, k, v))

    def parts(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = weight.split([heads * self.head_dim for heads in self.heads])
        q, k = (
            x.unflatten(0, (-1, self.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
            for x in (q, k)
        )
        return q, k, v
