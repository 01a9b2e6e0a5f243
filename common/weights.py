"""Initial weights, fused weights, and Version 1's names for them.

Versions that fuse projections hold one matrix where Version 1 holds several: Q, K and V are stacked
in `qkv_proj`, gate and up in `gate_up_proj`. Version 1's state dict loads into every version, and
every version gives it back.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# A fused weight has these names in Version 1.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_drawn_on = "cpu"


@contextmanager
def drawn_on(device: torch.device) -> Iterator[None]:
    """Inside it `initialize` draws on the device, faster than a CPU and other numbers."""
    global _drawn_on
    before = _drawn_on
    _drawn_on = device.type
    try:
        yield
    finally:
        _drawn_on = before


def initialize(state: dict[str, Tensor], std: float) -> dict[str, Tensor]:
    """Draws every matrix from N(0, std^2) in Version 1's order, so that all versions start from the
    same weights.

    The head is tied to the embedding, and the norms' weights stay 1. The numbers are drawn on the
    CPU (but see `drawn_on`), the same for every device. `state`, under Version 1's names, is
    written in place; where it holds copies, load the result.
    """
    generator = torch.Generator(_drawn_on).manual_seed(torch.initial_seed())
    for name, weight in state.items():
        if weight.dim() == 2 and name != "lm_head.weight":
            drawn = weight
            if weight.device.type != _drawn_on:
                drawn = torch.empty_like(weight, device=_drawn_on)
            weight.copy_(nn.init.normal_(drawn, std=std, generator=generator))
    return state


def baseline_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The weights under Version 1's names.

    A fused matrix is the parts one below the other, of `sizes` that the module around it holds;
    then these are views. Or it has methods `fused(*parts)` and `parts(weight)`, which say how its
    rows are ordered; then they may be copies.
    """
    state: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        module, _, leaf = name.removesuffix(".weight").rpartition(".")
        if leaf in FUSED:
            owner = model.get_submodule(f"{module}.{leaf}")
            ordered = getattr(owner, "parts", None)
            parts = ordered(weight) if ordered else weight.split(model.get_submodule(module).sizes)
            for part, piece in zip(FUSED[leaf], parts, strict=True):
                state[f"{module}.{part}.weight"] = piece
        else:
            state[name] = weight
    return state


def fuse_on_load(model: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_) -> None:
    """A pre-hook of `load_state_dict` that stacks Version 1's matrices into the fused ones."""
    for fused, parts in FUSED.items():
        for name in [name for name in state_dict if name.endswith(f"{parts[0]}.weight")]:
            module = name.removesuffix(f"{parts[0]}.weight")
            pieces = [state_dict.pop(f"{module}{part}.weight") for part in parts]
            owner = model.get_submodule(f"{module}{fused}".removeprefix(prefix))
            ordered = getattr(owner, "fused", None)
            weight = ordered(*pieces) if ordered else torch.cat(pieces)
            state_dict[f"{module}{fused}.weight"] = weight
