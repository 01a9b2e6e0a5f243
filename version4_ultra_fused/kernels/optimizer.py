"""AdamW for master weights in float32, with working copies in the dtype of the matrix products.

Weights, moments and gradients lie in flat buffers, so a launch serves all tensors of a kind. The matrices inside the blocks get
gradients in the products' dtype, as the products write them. The embedding, to which two gradients are added, and the norms get
theirs in float32. With bf16 the update also writes each weight in bf16, for the products: a step casts no weights. Gradients are
overwritten by the next step, so nothing is set to zero and nothing is added up.

The matrices of a block can be updated as soon as their gradients are there, beside the backward pass of the blocks before. In a
job of several processes the gradients of the block are added up over the processes first, in the products' dtype:

    ddp      one all-reduce; every process updates the block
    zero1    one process owns the block: it alone gets the sum, has the moments and updates, and sends the new float32 weights to
             the others (Rajbhandari et al. 2020, arXiv:1910.02054, stage 1, with whole blocks as shares)
"""

from collections.abc import Iterator

from version4_ultra_fused import kernels

import torch
import torch.distributed as dist
from torch import Tensor, nn

ALIGNMENT = 64  # elements: every tensor in a flat buffer begins at a multiple of 128 bytes


class Flat:
    """Parameters in flat buffers: `master`, `exp_avg`, `exp_avg_sq` and, once `allocate` was called, `gradient` and `working`.

    Each parameter becomes a view of `master` and gets `moments`, and from `allocate` on `gradient`, where the backward pass
    writes, and `working`, which the products read. Without a dtype of their own the working weights are the masters.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self.offsets, size = parameters, [], 0
        for parameter in parameters:
            self.offsets.append(size)
            size += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        self.master = torch.zeros(size, dtype=parameters[0].dtype, device=parameters[0].device)
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.gradient = self.working = self.kept = None
        for parameter, master, *moments in self.views(self.master, self.exp_avg, self.exp_avg_sq):
            master.copy_(parameter.data)
            parameter.data, parameter.moments = master, moments

    def keep(self, owned: list[slice]) -> None:
        """Drops the moments outside these parts of the buffers; the others move to memory of their own, in `kept`, by start."""
        self.kept = {part.start: (self.exp_avg[part].clone(), self.exp_avg_sq[part].clone()) for part in owned}
        for parameter, start in zip(self.parameters, self.offsets, strict=True):
            parameter.moments = None
            for part in owned:
                if part.start <= start < part.stop:
                    begin, end = start - part.start, start - part.start + parameter.numel()
                    parameter.moments = [moment[begin:end].view(parameter.shape) for moment in self.kept[part.start]]
        self.exp_avg = self.exp_avg_sq = None

    def moments(self, part: slice) -> tuple[Tensor, Tensor]:
        """The moments of a part of the buffers, which was kept if any were dropped."""
        return self.kept[part.start] if self.kept is not None else (self.exp_avg[part], self.exp_avg_sq[part])

    def views(self, *buffers: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Each parameter, and its part of each buffer in its shape."""
        for parameter, start in zip(self.parameters, self.offsets, strict=True):
            yield parameter, *(buffer[start : start + parameter.numel()].view(parameter.shape) for buffer in buffers)

    def allocate(self, working: torch.dtype, gradient: torch.dtype) -> None:
        self.gradient = torch.zeros_like(self.master, dtype=gradient)
        self.working = None if working == self.master.dtype else self.master.to(working)
        for parameter, *views in self.views(self.gradient, self.master if self.working is None else self.working):
            parameter.gradient, parameter.working = views

    def renew(self) -> None:
        """Writes the working weights anew."""
        if self.working is not None:
            self.working.copy_(self.master)


class MasterAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) for a model that writes gradients into `parameter.gradient`.

    Args:
        model: has `layers`, all alike. Its parameters move into flat buffers. Loading a state dict renews the working weights.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
    """

    def __init__(
        self, model: nn.Module, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:  # fmt: skip
        super().__init__(model.parameters(), dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, capturable=True))
        blocks = [[parameter for parameter in block.parameters() if parameter.dim() == 2] for block in model.layers]
        inner = {id(parameter) for block in blocks for parameter in block}
        self.matrices = Flat([parameter for block in blocks for parameter in block])
        self.others = Flat([parameter for parameter in model.parameters() if id(parameter) not in inner])
        size = self.matrices.master.numel() // len(blocks)
        self.blocks = [slice(i * size, (i + 1) * size) for i in range(len(blocks))]  # of the matrices' buffers
        self.steps = torch.zeros((), dtype=torch.float32, device=self.others.master.device)  # on the device, for a captured step
        self.updated = 0  # blocks, from the last, in the step under way
        self.form, self.rank, self.world_size = None, 0, 1  # of --parallel
        self._hold_states()
        model.register_load_state_dict_post_hook(self.renew)

    def _hold_states(self) -> None:
        self.state.clear()
        for parameter in self.matrices.parameters + self.others.parameters:
            if parameter.moments:
                self.state[parameter] = {"step": self.steps, "exp_avg": parameter.moments[0], "exp_avg_sq": parameter.moments[1]}

    def communicate(self, form: str) -> None:
        """From now on an update adds up the gradients of all processes first, in the form `ddp` or `zero1`; before the first."""
        self.form, self.rank, self.world_size = form, dist.get_rank(), dist.get_world_size()
        if form == "zero1":
            whole = slice(0, len(self.others.master))
            for flat, parts in ((self.matrices, self.blocks), (self.others, [whole])):
                flat.keep([part for part in parts if self.owner(flat, part) == self.rank])
            self._hold_states()

    def owner(self, flat: Flat, part: slice) -> int:
        """The process that updates a block under zero1; the embedding and the norms are one more block."""
        return (self.blocks.index(part) if flat is self.matrices else len(self.blocks)) % self.world_size

    def work_in(self, dtype: torch.dtype) -> None:
        """Makes the buffers that products read and write, in the products' dtype; before the first step."""
        self.matrices.allocate(dtype, dtype)
        self.others.allocate(dtype, self.others.master.dtype)

    def load_state_dict(self, state_dict: dict) -> None:
        """As in PyTorch, but copies the state to where it is: kernels, and a captured step, read the flat buffers."""
        held = dict(self.state)
        super().load_state_dict(state_dict)
        for parameter, state in held.items():
            for name, value in state.items():
                value.copy_(self.state[parameter][name])
            self.state[parameter] = state

    def renew(self, *_) -> None:
        """Writes the working weights anew, after others were loaded."""
        for flat in (self.matrices, self.others):
            flat.renew()

    def update_block(self) -> None:
        """Updates the matrices of the last block that was not updated yet; the following `step` leaves them out."""
        if not self.updated:
            self.steps += 1
        self.updated += 1
        self._update(self.matrices, self.blocks[-self.updated])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        while self.form and self.updated < len(self.blocks):
            self.update_block()
        if not self.updated:
            self.steps += 1
        if self.updated < len(self.blocks):
            self._update(self.matrices, slice(0, self.blocks[-self.updated - 1].stop))
        self._update(self.others, slice(0, len(self.others.master)))
        self.updated = 0

    def _update(self, flat: Flat, part: slice) -> None:
        owner = self.owner(flat, part) if self.form == "zero1" else self.rank
        if self.form == "ddp":
            dist.all_reduce(flat.gradient[part])
        elif self.form == "zero1":
            dist.reduce(flat.gradient[part], owner)
        working = None if flat.working is None else flat.working[part]
        if owner == self.rank:
            (group,) = self.param_groups
            kernels.adamw(
                flat.master[part], *flat.moments(part), flat.gradient[part], working, self.steps,
                group["lr"], *group["betas"], group["eps"], group["weight_decay"], 1 / self.world_size,
            )  # fmt: skip
        if self.form == "zero1":
            dist.broadcast(flat.master[part], owner)
            if owner != self.rank and working is not None:
                working.copy_(flat.master[part])
