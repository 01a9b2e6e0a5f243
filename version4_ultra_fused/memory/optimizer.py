"""AdamW for master weights in float32, with working copies in the dtype of the matrix products.

Weights, moments and gradients lie in flat buffers, so a launch serves all tensors of a kind. The
matrices inside the blocks get gradients in the products' dtype, as the products write them. The
embedding, to which two gradients are added, and the norms get theirs in float32. With bf16 the
update also writes each weight in bf16, for the products: a step casts no weights. Gradients are
overwritten by the next step, so nothing is set to zero and nothing is added up.

The matrices of a sublayer, attention or the feed-forward network of a block, can be updated as soon
as their gradients are there, beside the rest of the backward pass. In a job of several processes
their gradients are added up over the processes first, in the products' dtype:

    ddp      one all-reduce; every process updates the sublayer
    zero1    each process gets the sum of its share of the sublayer alone, has the moments of that
             share and updates it; then the shares of the new weights are gathered, in the dtype
             that the products read (Rajbhandari et al. 2020, arXiv:1910.02054, stage 1). The bytes
             are those of ddp, and the update is shared out.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from common import ranks
from version4_ultra_fused.kernels.fp8.scales import Scales
from version4_ultra_fused.memory.memory_plan import Buffers, MemoryPlan

import torch
import torch.distributed as dist
from torch import Tensor, nn

# PyTorch 2.13 has renamed them.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
MOMENTS = ("exp_avg", "exp_avg_sq")
ALIGNMENT = 64  # elements: every tensor in a flat buffer begins at a multiple of 128 bytes


def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class Flat:
    """Groups of parameters in flat buffers: `master`, `exp_avg`, `exp_avg_sq`; after `allocate`
    also `gradient` and `working`.

    Each parameter becomes a view of `master`. The products read `working`, and the backward pass
    writes `gradient`. Without a dtype of their own the working weights are the masters.

    Attributes:
        parts: the place of each group in the buffers. Every part can be divided into `shares` of
            equal size.
        start: the number of the first element among those of all buffers.
    """

    def __init__(
        self,
        groups: list[list[nn.Parameter]],
        shares: int,
        *,
        moments: torch.dtype | None = None,
        start: int = 0,
    ) -> None:
        self.start = start
        self.moments_dtype = moments  # None: that of the parameters
        self.parameters = [parameter for group in groups for parameter in group]
        self.offsets = []
        self.parts = []
        end = 0
        for group in groups:
            begin = end
            for parameter in group:
                self.offsets.append(end)
                end = _rounded_up(end + parameter.numel(), ALIGNMENT)
            end = begin + _rounded_up(end - begin, ALIGNMENT * shares)
            self.parts.append(slice(begin, end))
        self.master = torch.zeros(
            end, dtype=self.parameters[0].dtype, device=self.parameters[0].device
        )
        self.gradient: Tensor = self.master.new_empty(0)
        self.working: Tensor | None = None
        for parameter, [master] in self.views(self.master):
            master.copy_(parameter.data)
            parameter.data = master
        self.shard(0, 1)

    def shard(self, rank: int, shares: int) -> None:
        """Holds moments, of zeros, for one share of each part alone."""
        self.rank = rank
        self.shares = shares
        size = self.master.numel() // shares
        self.exp_avg = self.master.new_zeros(size, dtype=self.moments_dtype)
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)

    def share(self, part: slice) -> slice:
        """The share of a part that this process updates."""
        size = (part.stop - part.start) // self.shares
        return slice(part.start + self.rank * size, part.start + (self.rank + 1) * size)

    def moments(self, part: slice) -> tuple[Tensor, Tensor]:
        """The moments of this process's share of a part."""
        held = slice(part.start // self.shares, part.stop // self.shares)
        return self.exp_avg[held], self.exp_avg_sq[held]

    def fragments(self) -> Iterator[tuple[nn.Parameter, slice, list[Tensor]]]:
        """What this process updates of each parameter: the parameter, a slice of its elements, and
        their moments.
        """
        for parameter, start in zip(self.parameters, self.offsets, strict=True):
            part = next(part for part in self.parts if start < part.stop)
            share = self.share(part)
            begin = max(start, share.start)
            end = min(start + parameter.numel(), share.stop)
            if begin >= end:
                continue
            held = slice(begin - share.start, end - share.start)
            moments = [moment[held] for moment in self.moments(part)]
            if end - begin == parameter.numel():
                moments = [moment.view_as(parameter) for moment in moments]
            yield parameter, slice(begin - start, end - start), moments

    def views(self, *buffers: Tensor) -> Iterator[tuple[nn.Parameter, list[Tensor]]]:
        """Each parameter, and its part of each buffer in its shape."""
        for parameter, start in zip(self.parameters, self.offsets, strict=True):
            place = slice(start, start + parameter.numel())
            yield parameter, [buffer[place].view(parameter.shape) for buffer in buffers]

    def allocate(self, working: torch.dtype, gradient: torch.dtype) -> None:
        self.gradient = torch.zeros_like(self.master, dtype=gradient)
        self.working = None if working == self.master.dtype else self.master.to(working)

    @property
    def read(self) -> Tensor:
        """What the products read."""
        return self.master if self.working is None else self.working

    def renew(self) -> None:
        """Writes the working weights anew."""
        if self.working is not None:
            self.working.copy_(self.master)


class MasterAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) for a model with a memory plan.

    Args:
        model: of tiny_llama_v4.py. Its parameters move into flat buffers. Loading a state dict
            renews the working weights.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.

    Switches of the model: with `fp8` the scales of its products are part of the state, and with
    `bf16-moments` the moments are kept in bfloat16, rounded stochastically (`kernels/adamw.py`).
    """

    def __init__(
        self,
        model: Any,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, capturable=True)
        super().__init__(model.parameters(), defaults)
        shares = ranks.here().world_size
        self.model = model
        moments = torch.bfloat16 if model.switches["bf16-moments"] else None
        sublayers = [part for block in model.layers for part in (block.self_attn, block.mlp)]
        matrices = [list(sublayer.parameters()) for sublayer in sublayers]
        self.matrices = Flat(matrices, shares, moments=moments)
        inner = set(self.matrices.parameters)
        others = [p for p in model.parameters() if p not in inner]
        self.others = Flat([others], shares, moments=moments, start=self.matrices.master.numel())
        self.sublayers = dict(zip(sublayers, self.matrices.parts, strict=True))
        self.updated: set[nn.Module] = set()  # sublayers, in the step under way
        # It is on the device, for a captured step.
        self.steps = torch.zeros((), dtype=torch.float32, device=self.others.master.device)
        products = list(self.matrices.parameters)
        if model.lm_head.out_features % 16 == 0:  # else tensor cores cannot take it in FP8
            products.append(model.lm_head.weight)
        self.scales = Scales(products) if model.switches["fp8"] else None
        self.form: str | None = None  # of --parallel
        self.world_size = 1
        self.stream: torch.cuda.Stream | None = None  # of the sublayers' collectives
        self._hold_states()
        model.register_load_state_dict_post_hook(self.renew)

    def _hold_states(self) -> None:
        self.state.clear()
        for flat in (self.matrices, self.others):
            for parameter, _, moments in flat.fragments():
                self.state[parameter] = self._state_of(moments)

    def _state_of(self, moments: list[Tensor]) -> dict[str, Tensor]:
        """The state of a parameter: what all share, and its moments."""
        state = {"step": self.steps}
        if self.scales:
            state["fp8_largest"] = self.scales.largest
            state["fp8_saturated"] = self.scales.saturated
        return state | dict(zip(MOMENTS, moments, strict=True))

    def communicate(self, form: str) -> None:
        """From now on an update adds up the gradients of all processes first, in the form `ddp` or
        `zero1`; before the first.
        """
        self.form = form
        self.world_size = dist.get_world_size()
        if form == "zero1":
            for flat in (self.matrices, self.others):
                flat.shard(dist.get_rank(), self.world_size)
            self._hold_states()

    def whole_states(self) -> dict[Tensor, dict[str, Tensor]]:
        """The state of every parameter, in new memory if the processes share it; then all must call
        this.
        """
        if self.form != "zero1":
            return dict(self.state)
        states: dict[Tensor, dict[str, Tensor]] = {}
        for flat in (self.matrices, self.others):
            whole = [flat.exp_avg.new_empty(flat.master.numel()) for _ in MOMENTS]
            for part in flat.parts:
                for buffer, moment in zip(whole, flat.moments(part), strict=True):
                    all_gather(buffer[part], moment)
            for parameter, moments in flat.views(*whole):
                states[parameter] = self._state_of(moments)
        return states

    def take_states(self, states: dict[Tensor, dict[str, Tensor]]) -> None:
        """Copies what this process updates out of `whole_states`, after these have changed.

        Only zero1 needs it. Otherwise `whole_states` holds the states themselves.
        """
        if self.form != "zero1":
            return
        for flat in (self.matrices, self.others):
            for parameter, elements, moments in flat.fragments():
                for name, moment in zip(MOMENTS, moments, strict=True):
                    moment.copy_(states[parameter][name].flatten()[elements].view_as(moment))

    def gather_weights(self) -> None:
        """Makes every float32 weight the newest: under zero1 a process has its share of the blocks'
        alone. All must call it.
        """
        if self.form == "zero1":
            master = self.matrices.master
            for part in self.matrices.parts:
                all_gather(master[part], master[self.matrices.share(part)].clone())

    def plan_memory(self, dtype: torch.dtype, early: bool = False) -> None:
        """Gives the model buffers (`MemoryPlan`), after `communicate` and before the first step.

        Args:
            dtype: of the products; float32 stands for the weights' own.
            early: update a sublayer as soon as its gradients are there, where they are written
                beside the backward pass.
        """
        dtype = self.others.master.dtype if dtype == torch.float32 else dtype
        self.matrices.allocate(dtype, dtype)
        self.others.allocate(dtype, self.others.master.dtype)
        working: dict[Tensor, Tensor] = {}
        gradient: dict[Tensor, Tensor] = {}
        for flat in (self.matrices, self.others):
            for parameter, views in flat.views(flat.read, flat.gradient):
                working[parameter], gradient[parameter] = views
        update = self.update_sublayer if early else None
        buffers = Buffers(working, gradient)
        communicates = self.form is not None
        self.model.plan = MemoryPlan(
            self.model.operations, buffers, update, communicates, self.scales
        )

    def load_state_dict(self, state_dict: dict) -> None:
        """As in PyTorch, but copies the state to where it is: kernels, and a captured step, read
        the flat buffers.
        """
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

    def update_sublayer(self, sublayer: nn.Module) -> None:
        """Updates the matrices of a sublayer of the model; the following `step` leaves them out."""
        if not self.updated:
            self.steps += 1
        self.updated.add(sublayer)
        with self._on_collectives_stream():
            self._update(self.matrices, self.sublayers[sublayer])

    @contextmanager
    def _on_collectives_stream(self) -> Iterator[None]:
        """Makes a third stream current. Collectives wait there for other processes while the
        products of the next sublayer go on.
        """
        if not (self.form and self.steps.is_cuda):
            yield
            return
        self.stream = self.stream or torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if not self.updated and not self.form:
            self.steps += 1
            # All are updated in one launch.
            self._update(self.matrices, slice(0, self.matrices.master.numel()))
        else:
            for sublayer in reversed(self.sublayers):
                if sublayer not in self.updated:
                    self.update_sublayer(sublayer)
        self._update(self.others, *self.others.parts)
        self.updated.clear()
        if self.stream:
            torch.cuda.current_stream().wait_stream(self.stream)

    def _update(self, flat: Flat, part: slice) -> None:
        share = flat.share(part)
        if self.form == "ddp":
            dist.all_reduce(flat.gradient[part])
        elif self.form == "zero1":
            reduce_scatter(flat.gradient[share], flat.gradient[part])
        working = None if flat.working is None else flat.working[share]
        (group,) = self.param_groups
        self.model.operations.adamw(
            flat.master[share],
            flat.moments(part),
            flat.gradient[share],
            working,
            self.steps,
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            scale=1 / self.world_size,
            start=flat.start + share.start,
        )
        if self.form == "zero1":
            # The others' working weights are made of whole masters.
            read = flat.master if flat is self.others else flat.read
            all_gather(read[part], read[share])
            if flat is self.others:
                flat.renew()
