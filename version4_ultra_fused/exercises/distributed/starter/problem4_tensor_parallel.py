"""Problem 4 (tensor parallel) of ../README.md: one feed-forward layer whose matrices are split over the ranks.

Replace each line that names its problem, and run `pytest test_exercises.py -k problem4` in the folder above.
"""

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
        raise NotImplementedError("CopyToRanks.backward: problem 4 of README.md")


class SumOverRanks(torch.autograd.Function):
    """Adds up the partial outputs of all ranks (g of Shoeybi et al. 2019)."""

    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        """The sum of y over the ranks."""
        raise NotImplementedError("SumOverRanks.forward: problem 4 of README.md")

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        """dy itself: each term of a sum has the gradient of the sum."""
        return dy


class ParallelFeedForward(nn.Module):
    """A feed-forward layer; gate and up are column-parallel, down is row-parallel."""

    def __init__(self, whole: FeedForward) -> None:
        """Takes this rank's part of the weights of `whole`, which is the same on all ranks. The ranks must divide F."""
        super().__init__()
        self.mlp = FeedForward(whole.gate_proj.in_features, whole.gate_proj.out_features // dist.get_world_size())
        raise NotImplementedError("ParallelFeedForward.__init__: problem 4 of README.md")

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D], the same on all ranks; one all-reduce here and one in the backward pass."""
        raise NotImplementedError("ParallelFeedForward.forward: problem 4 of README.md")
