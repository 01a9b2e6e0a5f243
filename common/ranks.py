"""Which process of a job this is, as torchrun's environment says. A process that torchrun did not
start is rank 0 of 1.
"""

import os
from typing import NamedTuple

FORMS = ("ddp", "zero1", "fsdp")  # of --parallel
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
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
