"""What the processes of a job agree about. A process that is alone gets back what it gave.

An optimizer of several processes may hold the state of some parameters only, or a part of each
tensor.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def active() -> bool:
    """Whether this process belongs to a group that has been started."""
    return dist.is_available() and dist.is_initialized()


def lost(error: BaseException) -> bool:
    """Whether a collective has failed: another process has ended, or has not answered for
    --distributed-timeout seconds.
    """
    return active() and (isinstance(error, dist.DistError) or "gloo" in str(error))


def wait_for_all() -> None:
    if active():
        dist.barrier()


def total(tensor: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if active():
        dist.all_reduce(tensor)
    return tensor


def mean(tensor: Tensor) -> Tensor:
    """The mean over all processes, in place."""
    return total(tensor).div_(dist.get_world_size()) if active() else tensor


def anywhere(condition: bool, device: torch.device) -> bool:
    """Whether the condition holds in any process."""
    return (
        bool(total(torch.tensor(float(condition), device=device))) if active() else bool(condition)
    )


def gathered(value: Any) -> list:
    """The value of each process, in the order of the ranks."""
    if not active():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def states(optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Tensor]]:
    """The state of each parameter that this process updates."""
    return getattr(optimizer, "optim", optimizer).state


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, which shares its memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
