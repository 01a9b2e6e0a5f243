"""Which process of a job this is, as torchrun's environment says, and what the processes agree
about.

A process that torchrun did not start is rank 0 of 1, and gets back what it gave.
"""

import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

FORMS = ("ddp", "zero1", "fsdp")  # of --parallel
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ROUNDING = 1e-3  # of a gradient's sum, relative to that of its absolute values
gloo_started = False  # in this process; its threads outlive the process group


class Ranks(NamedTuple):
    """A process's place in its job."""

    rank: int = 0  # from 0 to world_size - 1, over all nodes
    local_rank: int = 0  # among the processes of this node; also the number of the process's GPU
    world_size: int = 1  # processes of the job
    launched: bool = False  # by torchrun

    @property
    def main_process(self) -> bool:
        """Whether this process prints, and writes files."""
        return self.rank == 0


def here() -> Ranks:
    """This process's place in its job."""
    if not all(name in os.environ for name in VARIABLES):
        return Ranks()
    rank, local_rank, world_size = (int(os.environ[name]) for name in VARIABLES[:3])
    return Ranks(rank, local_rank, world_size, launched=True)


def joined() -> bool:
    """Whether this process belongs to a group that has been started."""
    return dist.is_available() and dist.is_initialized()


def lost(error: BaseException) -> bool:
    """Whether a collective has failed: another process has ended, or does not answer."""
    return joined() and (isinstance(error, dist.DistError) or "gloo" in str(error))


def wait_for_all() -> None:
    if joined():
        dist.barrier()


def total(tensor: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if joined():
        dist.all_reduce(tensor)
    return tensor


def mean(tensor: Tensor) -> Tensor:
    """The mean over all processes, in place."""
    return total(tensor).div_(dist.get_world_size()) if joined() else tensor


def anywhere(condition: bool, device: torch.device) -> bool:
    """Whether the condition holds in any process."""
    return bool(total(torch.tensor(float(condition), device=device))) if joined() else condition


def gathered(value: Any) -> list:
    """The value of each process, in the order of the ranks."""
    if not joined():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def equal(tensors: list[Tensor]) -> bool:
    """Whether all processes have the same tensors, but for rounding."""
    sums = torch.stack(
        [torch.stack([tensor.double().sum(), tensor.double().abs().sum()]) for tensor in tensors]
    )
    least = sums.clone()
    most = sums.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return bool(((most - least).amax(1) <= ROUNDING * most[:, 1]).all())
