"""The three additions to Version 2, in a form that torch.compile can keep in one graph."""

from collections.abc import Mapping

from common.config import ModelConfig
from common.options import Options
from version2_pytorch_fused import tiny_llama_v2 as v2

import torch
import torch.nn.functional as F
from torch import Tensor

LIMIT = 1e4


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, clipped to [-LIMIT, LIMIT], which can be fused too; all [..., F]."""
    return (F.silu(gate) * up).clamp(-LIMIT, LIMIT)


class TinyLlama(v2.TinyLlama):
    """Version 2 that counts its forward passes, `int(model.passes)`.

    The count is a tensor, whose value no guard depends on.
    """

    passes: Tensor

    def __init__(self, config: ModelConfig, switches: Mapping[str, bool | str]) -> None:
        super().__init__(config, switches)
        self.register_buffer("passes", torch.zeros((), dtype=torch.long), persistent=False)

    def hidden_states(self, input_ids: Tensor) -> Tensor:  # [B, S] -> [B, S, D]
        self.passes += 1
        return super().hidden_states(input_ids)


def make_optimizer(model: TinyLlama, options: Options) -> torch.optim.Optimizer:
    """AdamW, as in Version 2, in one operation for all parameters, on a CPU too."""
    return torch.optim.AdamW(model.parameters(), lr=options.learning_rate, fused=True)
