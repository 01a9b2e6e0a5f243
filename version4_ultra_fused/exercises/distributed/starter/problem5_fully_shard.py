"""Problem 5 (fully_shard) of ../README.md: PyTorch's FSDP2 on the small model.

Replace each line that names its problem, and run `pytest test_exercises.py -k problem5` in the folder above.
"""

import torch.distributed as dist  # noqa: F401  (for your code)
from small_model import SmallModel
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh  # noqa: F401
from torch.distributed.fsdp import fully_shard  # noqa: F401
from torch.distributed.tensor import DTensor  # noqa: F401


def shard(model: SmallModel) -> None:
    """Shards weights and gradients over all ranks: each block is gathered as a whole, and so is what is outside of the blocks."""
    raise NotImplementedError("shard: problem 5 of README.md")


def held_bytes(model: SmallModel) -> int:
    """Bytes of the weights that this rank holds between two steps."""
    raise NotImplementedError("held_bytes: problem 5 of README.md")


def whole_gradients(model: SmallModel) -> dict[str, Tensor]:
    """Every gradient by name, gathered from all ranks."""
    raise NotImplementedError("whole_gradients: problem 5 of README.md")
