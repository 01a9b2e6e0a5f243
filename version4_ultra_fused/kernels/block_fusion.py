"""A model's blocks in one kernel each, where that is asked for (`--block-fusion on`)."""

from common.errors import UsageError
from version3_triton.kernels import HAS_TRITON

from torch import Tensor, nn

if HAS_TRITON:
    from version4_ultra_fused.kernels import block


def fused_blocks(x: Tensor, model: nn.Module, length: int) -> Tensor:
    """The residual stream [B S, D] after all blocks of the model, from that before the first.

    Raises:
        UsageError: the kernel does not take the model's blocks, or cannot run here.
    """
    for layer in model.layers:
        if not HAS_TRITON or not block.takes(x, layer, length):
            limits = f": it {block.LIMITS}" if HAS_TRITON else ""
            raise UsageError(f"--block-fusion on: the kernel needs a GPU and a block that fits into it{limits}")
        x = block.FusedBlock.apply(x, layer, model, length)
    return x
