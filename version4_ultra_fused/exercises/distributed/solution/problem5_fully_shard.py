"""Problem 5 (fully_shard) of ../README.md: PyTorch's FSDP2 on the small model."""

import torch.distributed as dist
from small_model import SmallModel
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def shard(model: SmallModel) -> None:
    """Shards weights and gradients over all ranks: each block is gathered as a whole, and so is what is outside of the blocks."""
    mesh = init_device_mesh(model.embedding.weight.device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def held_bytes(model: SmallModel) -> int:
    """Bytes of the weights that this rank holds between two steps."""
    return sum(parameter.to_local().nbytes for parameter in model.parameters() if isinstance(parameter, DTensor))


def whole_gradients(model: SmallModel) -> dict[str, Tensor]:
    """Every gradient by name, gathered from all ranks."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: gradient.full_tensor() for name, gradient in gradients.items() if isinstance(gradient, DTensor)}
