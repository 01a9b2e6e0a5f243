"""Problem 2 (overlap) of ../README.md: the all-reduces of problem 1 in buckets, while the backward
pass still runs.
"""

import functools

import torch
import torch.distributed as dist
from torch import nn


def fill_buckets(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """The parameters in reverse order, cut into buckets. A bucket is full when it holds
    `bucket_bytes` or more.
    """
    buckets: list[list[nn.Parameter]] = [[]]
    held = 0
    for parameter in reversed(parameters):
        if held >= bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(parameter)
        held += parameter.nbytes
    return buckets


class OverlappedGradients:
    """Averages a model's gradients over the ranks. Call `finish` after each backward pass."""

    def __init__(self, model: nn.Module, bucket_bytes: int) -> None:
        """Registers `ready` as a hook that runs as soon as a parameter has its whole gradient."""
        self.buckets = fill_buckets(list(model.parameters()), bucket_bytes)
        # The gradients that each bucket waits for.
        self.missing = [len(bucket) for bucket in self.buckets]
        # Of each bucket that was sent: its number, its flat gradients, and the handle to wait for.
        self.running: list[tuple[int, torch.Tensor, dist.Work]] = []
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(functools.partial(self.ready, number))

    def ready(self, number: int, parameter: nn.Parameter) -> None:
        """Starts the all-reduce of bucket `number` if this was the last gradient that it waited
        for.
        """
        self.missing[number] -= 1
        if self.missing[number] == 0:
            flat = torch.cat(
                [
                    parameter.grad.flatten()
                    for parameter in self.buckets[number]
                    if parameter.grad is not None
                ]
            )
            self.running.append((number, flat, dist.all_reduce(flat, async_op=True)))

    def finish(self) -> None:
        """Waits for all buckets, writes the means into the gradients, and prepares the next
        backward pass.
        """
        for number, flat, work in self.running:
            work.wait()
            flat /= dist.get_world_size()
            bucket = self.buckets[number]
            for parameter, mean in zip(
                bucket, flat.split([parameter.numel() for parameter in bucket]), strict=True
            ):
                parameter.grad = mean.view_as(parameter)
        self.missing = [len(bucket) for bucket in self.buckets]
        self.running.clear()
