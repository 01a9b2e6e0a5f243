"""Problem 2 (overlap) of ../README.md: the all-reduces of problem 1 in buckets, while the backward
pass still runs.

Replace each line that names its problem, and run `pytest test_exercises.py -k problem2` in the
folder above.
"""

import functools  # noqa: F401  (for your code)

import torch
import torch.distributed as dist
from torch import nn


def fill_buckets(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """The parameters in reverse order, cut into buckets. A bucket is full when it holds
    `bucket_bytes` or more.
    """
    raise NotImplementedError("fill_buckets: problem 2 of README.md")


class OverlappedGradients:
    """Averages a model's gradients over the ranks. Call `finish` after each backward pass."""

    def __init__(self, model: nn.Module, bucket_bytes: int) -> None:
        """Registers `ready` as a hook that runs as soon as a parameter has its whole gradient."""
        self.buckets = fill_buckets(list(model.parameters()), bucket_bytes)
        # The gradients that each bucket waits for.
        self.missing = [len(bucket) for bucket in self.buckets]
        # Of each bucket that was sent: its number, its flat gradients, and the handle to wait for.
        self.running: list[tuple[int, torch.Tensor, dist.Work]] = []
        raise NotImplementedError("OverlappedGradients.__init__: problem 2 of README.md")

    def ready(self, number: int, parameter: nn.Parameter) -> None:
        """Starts the all-reduce of bucket `number` if this was the last gradient that it waited
        for.
        """
        raise NotImplementedError("OverlappedGradients.ready: problem 2 of README.md")

    def finish(self) -> None:
        """Waits for all buckets, writes the means into the gradients, and prepares the next
        backward pass.
        """
        raise NotImplementedError("OverlappedGradients.finish: problem 2 of README.md")
