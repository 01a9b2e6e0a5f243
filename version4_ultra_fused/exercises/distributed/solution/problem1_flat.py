"""Problem 1 (flat) of ../README.md: data parallelism by hand, one all-reduce of all gradients."""

import torch
import torch.distributed as dist
from torch import nn


@torch.no_grad()
def broadcast_weights(model: nn.Module) -> None:
    """Gives every rank the weights of rank 0."""
    for parameter in model.parameters():
        dist.broadcast(parameter, src=0)


@torch.no_grad()
def average_gradients(model: nn.Module) -> None:
    """Replaces every gradient by its mean over the ranks, with one all-reduce."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, mean in zip(
        gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
    ):
        gradient.copy_(mean.view_as(gradient))
