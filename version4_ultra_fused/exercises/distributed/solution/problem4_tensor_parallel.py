"""Problem 4 (tensor parallel) of ../README.md: one feed-forward layer whose matrices are split over the ranks."""

import torch
import torch.distributed as dist
from small_model import FeedForward
from torch import Tensor, nn


class CopyToRanks(torch.autograd.Function):
    """Hands x to every rank's part of the layer (f of Shoeybi et al. 2019, arXiv:1909.08053)."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        """x itself: every rank has it already."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx: Tensor) -> Tensor:
        """The sum of dx over the ranks."""
        total = dx.clone()
        dist.all_reduce(total)
        return total


class SumOverRanks(torch.autograd.Function):
    """Adds up the partial outputs of all ranks (g of Shoeybi et al. 2019)."""

    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        """The sum of y over the ranks."""
        total = y.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        """dy itself: each term of a sum has the gradient of the sum."""
        return dy


class ParallelFeedForward(nn.Module):
    """A feed-forward layer; gate and up are column-parallel, down is row-parallel."""

    def __init__(self, whole: FeedForward) -> None:
        """Takes this rank's part of the weights of `whole`, which is the same on all ranks. The ranks must divide F."""
        super().__init__()
        ranks, rank = dist.get_world_size(), dist.get_rank()

        def part(weight: Tensor, dimension: int) -> nn.Parameter:
            return nn.Parameter(weight.detach().chunk(ranks, dim=dimension)[rank].clone())

        self.mlp = FeedForward(whole.gate_proj.in_features, whole.gate_proj.out_features // ranks)
        self.mlp.gate_proj.weight = part(whole.gate_proj.weight, 0)  # [F / n, D]
        self.mlp.up_proj.weight = part(whole.up_proj.weight, 0)  # [F / n, D]
        self.mlp.down_proj.weight = part(whole.down_proj.weight, 1)  # [D, F / n]

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D], the same on all ranks; one all-reduce here and one in the backward pass."""
        return SumOverRanks.apply(self.mlp(CopyToRanks.apply(x)))
