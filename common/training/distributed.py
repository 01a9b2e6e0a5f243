"""Training in several processes that torchrun has started, one a GPU (or one a share of a CPU).

    ddp    DistributedDataParallel: every process has the whole model, and gradients are averaged while the backward pass runs
    zero1  the same, but each process updates its share of the weights and then sends them to the others (Rajbhandari et al. 2020,
           arXiv:1910.02054, stage 1), so the moments of AdamW are stored once in the whole job
    fsdp   fully_shard: also weights and gradients are stored once; a block's weights are gathered before they are used

Processes whose code, options, data or models differ are refused. They agree about everything that one of them could decide
alone: the loss that is shown (the mean over all sequences), a signal that ends the run, a gradient that is missing. They do so
between steps, at `Meetings` about a second apart, so no measured step has a collective that training does not need. Mixed
precision is the same autocast in every form, so all compute the same numbers; fully_shard gathers the float32 weights, twice the
bytes of weights in bf16.

Without torchrun nothing here starts anything, and every function returns what it was given.
"""

import contextlib
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

from common import device as devices
from common import ranks, signals, spans
from common.errors import RunError, UsageError, first_line
from common.options import RunOptions
from common.precision import Precision
from common.timing import Clock, summarize

import torch
import torch.distributed as dist
from torch import Tensor, nn

PERIOD = 1.0  # seconds between two meetings, about
SLOW = 1.1  # times the median of all ranks, from which on a rank is named
FORWARD_PASSES = 10  # by which ranks are compared
ROUNDING = 1e-3  # of a gradient's sum, relative to that of its absolute values
Model = TypeVar("Model", bound=nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


# ------------------------------------------------------------------------------------------------------ start and end


def form(options: RunOptions, forms: Sequence[str] = ranks.FORMS) -> str | None:
    """The form asked for, or the first that the version supports; None for one process. UsageError: another flag forbids it."""
    given, first = options.parallel, forms[0] if forms else None
    chosen = given or first
    if ranks.here().world_size == 1 and not given:
        return None
    if chosen not in forms:
        supported = f"takes --parallel {' or '.join(forms)}" if forms else "runs in one process: start it without torchrun"
        raise UsageError(f"this script {supported}")
    if chosen == "fsdp":
        refused = {
            "--capture-step": options.capture_step, "--enable-deepspeed-flops": options.enable_deepspeed_flops,
            "--enable-torch-compile": options.switches.get("torch-compile"),
        }  # fmt: skip
        if flag := next((flag for flag, given in refused.items() if given), None):
            raise UsageError(f"{flag} does not work with --parallel fsdp, which gathers weights in each step: take ddp or zero1")
    return chosen


def active() -> bool:
    """Whether this process belongs to a group that has been started."""
    return dist.is_available() and dist.is_initialized()


def start(form: str | None, device: torch.device, timeout: float, captured: bool = False) -> None:
    """Starts the process group if there is a form: NCCL (RCCL) with one GPU a process, or gloo; `captured`: the step will be.

    A process waits `timeout` seconds for another. UsageError: there are more processes than GPUs. RunError: they do not meet.
    """
    if not form:
        return
    here = ranks.here()
    place: dict[str, Any] = {}
    if devices.is_gpu(device):
        devices.take_gpu(here.local_rank, "--nproc-per-node")
        place = {"device_id": torch.device("cuda", here.local_rank)}
        if captured:  # PyTorch's notes on CUDA graphs: NCCL's errors may not be polled during a capture
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    with waiting_explained(timeout), signals.immediate():
        dist.init_process_group("nccl" if place else "gloo", timeout=timedelta(seconds=timeout), **place)
    ranks.gloo_started = not place


def end() -> None:
    """Ends the process group; after an error others may wait for this process, which torchrun ends."""
    if active():
        dist.destroy_process_group()


@contextlib.contextmanager
def waiting_explained(timeout: float) -> Iterator[None]:
    """Turns the error of a collective into a RunError: another process has ended, or has not answered for `timeout` seconds."""
    try:
        yield
    except RuntimeError as error:
        alone = not ranks.here().launched
        if alone or isinstance(error, RunError) or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise RunError(
            f"another process has ended, or has not answered for {timeout} s (--distributed-timeout): {first_line(error)}"
        ) from error


@contextlib.contextmanager
def first_alone_prints() -> Iterator[None]:
    """Within it, the other processes print nothing."""
    if ranks.here().main_process:
        yield
    else:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield


# ------------------------------------------------------------------------------------------------------------- training


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a version's model."""
    return cast(Callable[..., Tensor], model.loss)(*batch)


class Loss(nn.Module):
    """Makes `model.loss` a forward pass, which is what DistributedDataParallel and DeepSpeed watch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        return loss_of(self.model, (input_ids, targets))


class Replica:
    """A model whose `loss` runs under DistributedDataParallel; all else is the model's own."""

    def __init__(self, model: nn.Module) -> None:
        from torch.nn.parallel import DistributedDataParallel

        known = inspect.signature(DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # PyTorch before 2.13
        options: dict[str, Any] = {buffers: False}
        self.model = model
        self.parallel = DistributedDataParallel(Loss(model), gradient_as_bucket_view=True, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def loss(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        return self.parallel(input_ids, targets)


def parallel_model(model: Model, form: str | None) -> Model:
    """The model in the form that a training step calls; fully_shard changes it in place. Called before the optimizer is made.

    Args:
        model: on the process's device, with `layers`, its blocks, and `loss`. It stays as it is if its attribute
            `optimizer_communicates` is true.
        form: of `ranks.FORMS`, or None.
    """
    if getattr(model, "optimizer_communicates", False):
        return model
    if form in ("ddp", "zero1"):
        return cast(Model, Replica(model))
    if form == "fsdp":
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        for block in cast(nn.ModuleList, model.layers):
            fully_shard(block)
        fully_shard(model)
        register_fsdp_forward_method(model, "loss")
    return model


def parallel_optimizer(optimizer: Optimizer, form: str | None) -> Optimizer:
    """The optimizer, not stepped yet, in a form that stores its state once in the whole job if `form` is zero1.

    An optimizer with a method `communicate` averages gradients over all processes itself.
    """
    if form and hasattr(optimizer, "communicate"):
        optimizer.communicate(form)
        return optimizer
    if form != "zero1":
        return optimizer
    from torch.distributed.optim import ZeroRedundancyOptimizer

    known = inspect.signature(type(optimizer)).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in known}
    shared = ZeroRedundancyOptimizer(optimizer.param_groups, type(optimizer), parameters_as_bucket_view=True, **defaults)
    return cast(Optimizer, shared)


def states(optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Tensor]]:
    """The state of each parameter that this process updates."""
    return getattr(optimizer, "optim", optimizer).state


def whole_states(optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Tensor]]:
    """As `states`, but with tensors that are whole, or know their place in the whole; all processes must call it.

    An optimizer that shares out single tensors has methods for that: `whole_states`, `take_states` and `gather_weights`.
    """
    return optimizer.whole_states() if hasattr(optimizer, "whole_states") else states(optimizer)


def take_states(optimizer: torch.optim.Optimizer, states: dict[Tensor, dict[str, Tensor]]) -> None:
    """Hands `whole_states` back, after they have changed, to an optimizer that shares out single tensors."""
    if hasattr(optimizer, "take_states"):
        optimizer.take_states(states)


def gather_weights(optimizer: torch.optim.Optimizer) -> None:
    """Makes the weights complete that an optimizer leaves to other processes; all processes must call it."""
    if hasattr(optimizer, "gather_weights"):
        optimizer.gather_weights()


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, which shares its memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with every tensor gathered; all processes must call it."""
    return {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in state.items()}


# ------------------------------------------------------------------------------------------------------------ agreement


def total(tensor: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if active():
        dist.all_reduce(tensor)
    return tensor


def mean(tensor: Tensor) -> Tensor:
    """The mean over all processes, in place."""
    return total(tensor).div_(dist.get_world_size()) if active() else tensor


def anywhere(condition: bool, device: torch.device) -> bool:
    """Whether the condition holds in any process."""
    return bool(total(torch.tensor(float(condition), device=device))) if active() else bool(condition)


def equal(tensors: list[Tensor]) -> bool:
    """Whether all processes have the same tensors, but for rounding."""
    if not active():
        return True
    sums = torch.stack([torch.stack([tensor.double().sum(), tensor.double().abs().sum()]) for tensor in tensors])
    least, most = sums.clone(), sums.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return bool(((most - least).amax(1) <= ROUNDING * most[:, 1]).all())


def gathered(value: Any) -> list:
    """The value of each process, in the order of the ranks."""
    if not active():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def require_equal(facts: Mapping[str, object]) -> None:
    """Raises UsageError in all processes if a fact, named as in the message, is not alike: names the first such rank and fact."""
    with signals.immediate():
        first, *others = gathered({name: str(value) for name, value in facts.items()})
    for rank, other in enumerate(others, 1):
        for name in first | other:
            if first.get(name) != other.get(name):
                differing = f"{name} is {other.get(name)} on rank {rank}, and {first.get(name)} on rank 0"
                raise UsageError(f"{differing}: give all processes the same", shared=True)


def wait_for_all() -> None:
    if active():
        dist.barrier()


class Meetings:
    """Steps after which all processes hear whether one of them was told to stop, and whether it is time for a line.

    One process decides alone, after every step. Several meet after steps that they have agreed on, about PERIOD apart.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.next = device, 1
        self.last, self.seconds = (0, time.monotonic()), float("inf")  # step and time of the last meeting, and since then a step

    @contextlib.contextmanager
    def watched(self, captured: bool, timeout: float) -> Iterator[None]:
        """Ends this process if a captured step waits for another too long: nothing in NCCL watches the collectives of a graph."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(PERIOD):
                if time.monotonic() - self.last[1] > timeout:
                    limit = f"{timeout} s (--distributed-timeout)"
                    said = f"error: rank {ranks.here().rank}: no answer from another process for {limit}"
                    print(said, file=sys.stderr, flush=True)
                    os._exit(1)  # the main thread waits for the GPU, and cannot be interrupted

        if active() and captured:
            threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around work that may take longer than processes wait for each other, such as writing a checkpoint."""
        self.last = self.last[0], float("inf")
        yield
        self.last = self.last[0], time.monotonic()

    def agree(self, finished: int, signal: int, silent: float) -> tuple[int, float]:
        """The number of a signal (0: none) and the seconds since the last line, for all processes alike."""
        if not active():
            return signal, silent
        if finished < self.next:
            return 0, 0.0
        agreed = torch.tensor([signal, silent, self.seconds], device=self.device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        signal, silent, seconds = agreed.tolist()  # waits for the device, so the time below is that of finished steps
        step, since = self.last
        self.next = finished + max(1, int(PERIOD / seconds))
        self.last = finished, time.monotonic()
        self.seconds = (self.last[1] - since) / (finished - step)
        return int(signal), silent


# ----------------------------------------------------------------------------------------------------------- slow ranks


def forward_ms(model: nn.Module, batch: tuple[Tensor, Tensor], precision: Precision) -> float:
    """Median milliseconds in the spans of a forward pass, between which a sharded model communicates.

    A training step takes as long in every process, because each waits for the slowest; these times do not wait.
    """
    marks, depth, times = [], 0, []
    clock = Clock(precision.device)

    def observe(name: str, entering: bool) -> None:
        nonlocal depth
        depth += 1 if entering else -1
        if depth == (1 if entering else 0):  # the outermost span begins or ends
            marks.append(clock.mark())

    with torch.no_grad():
        for _ in range(FORWARD_PASSES):
            marks.clear()
            spans.observer = observe
            with precision.autocast():
                loss_of(model, batch)
            spans.observer = None
            times.append(sum(clock.milliseconds(*pair) for pair in zip(marks[::2], marks[1::2], strict=True)))
    return summarize(times)["median"]


def slow_ranks(forward_ms: list[float]) -> list[str]:
    """A line for each rank whose forward pass takes over SLOW times the median of all ranks (of two: the other's)."""
    middle = sorted(forward_ms)[(len(forward_ms) - 1) // 2]
    return [
        f"rank {rank} took {ms / middle:.1f} times the median of all ranks for a forward pass: all others wait for it"
        for rank, ms in enumerate(forward_ms)
        if ms > SLOW * middle
    ]
