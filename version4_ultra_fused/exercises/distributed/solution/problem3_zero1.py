"""Problem 3 (zero1) of ../README.md: AdamW whose moments are stored once in the whole job (ZeRO
stage 1).
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class ShardedAdamW:
    """AdamW that updates this rank's share of the weights, and gathers the shares of the other
    ranks.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        """Moves the model's weights into one flat tensor; the parameters become views of it."""
        self.parameters = list(model.parameters())
        flat = torch.cat([parameter.detach().flatten() for parameter in self.parameters])
        self.weights = F.pad(flat, (0, -len(flat) % dist.get_world_size()))
        self.share = self.weights.chunk(dist.get_world_size())[dist.get_rank()]
        self.optimizer = torch.optim.AdamW([self.share], **options)
        begin = 0
        for parameter in self.parameters:
            parameter.data = self.weights[begin : begin + parameter.numel()].view_as(parameter)
            begin += parameter.numel()

    @torch.no_grad()
    def step(self) -> None:
        """A reduce-scatter of the gradients, AdamW on the own share, and an all-gather of the
        weights.
        """
        gradients = torch.cat(
            [
                parameter.grad.flatten()
                for parameter in self.parameters
                if parameter.grad is not None
            ]
        )
        gradients = F.pad(gradients, (0, len(self.weights) - len(gradients)))
        self.share.grad = torch.empty_like(self.share)
        dist.reduce_scatter(self.share.grad, list(gradients.chunk(dist.get_world_size())))
        self.share.grad /= dist.get_world_size()
        self.optimizer.step()
        dist.all_gather(list(self.weights.chunk(dist.get_world_size())), self.share)
