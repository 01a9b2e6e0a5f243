"""Problem 3 (zero1) of ../README.md: AdamW whose moments are stored once in the whole job (ZeRO
stage 1).

Replace each line that names its problem, and run `pytest test_exercises.py -k problem3` in the
folder above.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class ShardedAdamW:
    """AdamW that updates this rank's share of the weights, and gathers the shares of the other
    ranks.

    Attributes:
        weights: all weights in one flat tensor, padded with zeros to a multiple of the number of
            ranks.
        share: this rank's part of `weights`; it shares their memory.
        optimizer: a torch.optim.AdamW that holds `share` alone.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        """Moves the model's weights into one flat tensor; the parameters become views of it."""
        self.parameters = list(model.parameters())
        flat = torch.cat([parameter.detach().flatten() for parameter in self.parameters])
        self.weights = F.pad(flat, (0, -len(flat) % dist.get_world_size()))
        # The share and its optimizer are missing here.
        begin = 0
        for parameter in self.parameters:
            parameter.data = self.weights[begin : begin + parameter.numel()].view_as(parameter)
            begin += parameter.numel()
        raise NotImplementedError("ShardedAdamW.__init__: problem 3 of README.md")

    @torch.no_grad()
    def step(self) -> None:
        """A reduce-scatter of the gradients, AdamW on the own share, and an all-gather of the
        weights.
        """
        raise NotImplementedError("ShardedAdamW.step: problem 3 of README.md")
