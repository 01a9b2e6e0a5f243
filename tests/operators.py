"""What PyTorch's dispatcher runs, operator by operator."""

import math
from collections.abc import Sequence

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OperatorMode(TorchDispatchMode):
    """Inside it `note` hears of every operator that is not a view.

    `masked_fill` is heard of as the copy and the fill that it consists of, which the dispatcher does not show.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name == "masked_fill":
            with self:
                return args[0].clone().masked_fill_(*args[1:])
        out = function(*args, **(kwargs or {}))
        # Operators in place on lists return nothing, and write their first list.
        read, written = (
            [t for t in tree_leaves(tree) if isinstance(t, Tensor)] for tree in ((args, kwargs), args[0] if out is None else out)
        )
        if not function.is_view and written and name not in ("_unsafe_view", "detach"):
            self.note(name, read, written)
        return out

    def note(self, name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        raise NotImplementedError


def stored_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor in which what `expand` repeats counts once."""
    return tensor.element_size() * math.prod(n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
