"""Which process of a job this is, as torchrun's environment says. A process that torchrun did not start is rank 0 of 1."""

import os
from typing import Literal, NamedTuple, get_args

Form = Literal["ddp", "zero1", "fsdp"]  # of --parallel
FORMS: tuple[Form, ...] = get_args(Form)
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Ranks(NamedTuple):
    """A process's place in its job.

    Attributes:
        rank: from 0 to world_size - 1, over all nodes.
        local_rank: among the processes of this node; also the number of the process's GPU.
        world_size: processes of the job.
        launched: whether torchrun started the process.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    launched: bool = False

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
