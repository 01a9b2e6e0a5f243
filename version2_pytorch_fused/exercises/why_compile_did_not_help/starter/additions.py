"""Three additions to Version 2 that keep torch.compile from helping: find and repair them."""

from common.options import Options
from version2_pytorch_fused import tiny_llama_v2 as v2

import torch
import torch.nn.functional as F
from torch import Tensor

LIMIT = 1e4


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, clipped to [-LIMIT, LIMIT]; all [..., F]."""
    hidden = F.silu(gate) * up
    if hidden.abs().max() > LIMIT:
        hidden = hidden.clamp(-LIMIT, LIMIT)
    return hidden


class TinyLlama(v2.TinyLlama):
    """Version 2 that counts its forward passes: `int(model.passes)`."""

    passes = 0

    def hidden_states(self, input_ids: Tensor) -> Tensor:  # [B, S] -> [B, S, D]
        self.passes += 1
        return super().hidden_states(input_ids)


def make_optimizer(model: TinyLlama, options: Options) -> torch.optim.Optimizer:
    """AdamW, as in Version 2, by a loop over the parameters."""
    return torch.optim.AdamW(model.parameters(), lr=options.learning_rate, foreach=False)
