"""AdamW for master weights in float32, with working copies in the dtype of the matrix products.

Weights, moments and gradients lie in flat buffers, so a launch serves all tensors of a kind. The matrices inside the blocks get
gradients in the products' dtype, as the products write them. The embedding, to which two gradients are added, and the norms get
theirs in float32. With bf16 the update also writes each weight in bf16, for the products: a step casts no weights. Gradients are
overwritten by the next step, so nothing is set to zero and nothing is added up.

The matrices of a block can be updated as soon as their gradients are there, beside the backward pass of the blocks before.
"""

from version4_ultra_fused import kernels

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # elements: every tensor in a flat buffer begins at a multiple of 128 bytes


class Flat:
    """Parameters in flat buffers: `master`, `exp_avg`, `exp_avg_sq`, `gradient` and, where its dtype differs, `working`.

    Each parameter becomes a view of `master` and gets `gradient`, where the backward pass writes, `working`, which the products
    read, and `moments`.
    """

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype, gradient_dtype: torch.dtype) -> None:
        offsets, size = [], 0
        for parameter in parameters:
            offsets.append(size)
            size += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        self.master = torch.zeros(size, dtype=parameters[0].dtype, device=parameters[0].device)
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.gradient = torch.zeros_like(self.master, dtype=gradient_dtype)
        self.working = None if dtype == self.master.dtype else torch.zeros_like(self.master, dtype=dtype)
        for parameter, start in zip(parameters, offsets, strict=True):

            def view(buffer: Tensor, start: int = start, like: Tensor = parameter.data) -> Tensor:
                return buffer[start : start + like.numel()].view(like.shape)

            view(self.master).copy_(parameter.data)
            parameter.data, parameter.gradient = view(self.master), view(self.gradient)
            parameter.working = parameter.data if self.working is None else view(self.working)
            parameter.moments = view(self.exp_avg), view(self.exp_avg_sq)
        self.copy()

    def copy(self) -> None:
        if self.working is not None:
            self.working.copy_(self.master)


class MasterAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) for a model that writes gradients into `parameter.gradient`.

    Args:
        model: its parameters move into flat buffers; loading a state dict into it afterwards renews the working copies.
        dtype: of the working copies and of the matrices' gradients.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:  # fmt: skip
        super().__init__(model.parameters(), dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, capturable=True))
        blocks = [[parameter for parameter in block.parameters() if parameter.dim() == 2] for block in model.layers]
        inner = {id(parameter) for block in blocks for parameter in block}
        others = [parameter for parameter in model.parameters() if id(parameter) not in inner]
        matrices, rest = Flat(sum(blocks, []), dtype, dtype), Flat(others, dtype, others[0].dtype)
        self.flats, size = (matrices, rest), matrices.master.numel() // len(blocks)
        self.blocks = [slice(i * size, (i + 1) * size) for i in range(len(blocks))]  # of `matrices`; all blocks are alike
        self.steps = torch.zeros((), dtype=torch.float32, device=others[0].device)  # on the device, for a captured step
        self.updated = 0  # blocks, from the last, in the step under way
        for parameter in model.parameters():
            self.state[parameter] = {"step": self.steps, **dict(zip(("exp_avg", "exp_avg_sq"), parameter.moments, strict=True))}
        model.register_load_state_dict_post_hook(self.renew)

    def renew(self, *_) -> None:
        """Writes the working copies anew, after weights were loaded."""
        for flat in self.flats:
            flat.copy()

    def update_block(self) -> None:
        """Updates the matrices of the last block that was not updated yet; the following `step` leaves them out."""
        if not self.updated:
            self.steps += 1
        self.updated += 1
        self._update(self.flats[0], self.blocks[-self.updated])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        if not self.updated:
            self.steps += 1
        if self.updated < len(self.blocks):
            self._update(self.flats[0], slice(0, self.blocks[-self.updated - 1].stop))
        self._update(self.flats[1], slice(None))
        self.updated = 0

    def _update(self, flat: Flat, part: slice) -> None:
        (group,) = self.param_groups
        buffers = (flat.master, flat.exp_avg, flat.exp_avg_sq, flat.gradient, flat.working)
        kernels.adamw(
            *(None if buffer is None else buffer[part] for buffer in buffers), self.steps,
            group["lr"], *group["betas"], group["eps"], group["weight_decay"],
        )  # fmt: skip
