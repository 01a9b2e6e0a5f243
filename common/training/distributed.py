"""Training in several processes that torchrun has started, one a GPU (or one a share of a CPU).

    ddp    DistributedDataParallel: every process has the whole model, and gradients are averaged
           while the backward pass runs
    zero1  the same, but each process updates its share of the weights and then sends them to the
           others (Rajbhandari et al. 2020, arXiv:1910.02054, stage 1), so the moments of AdamW are
           stored once in the whole job
    fsdp   fully_shard: also weights and gradients are stored once; the matrices of a block are
           gathered before they are used

The processes agree about everything that one of them could decide alone: the loss that is shown
(the mean over all sequences), a signal that ends the run, a gradient that is missing. They do so
between steps, at `Meetings` about a second apart, so no measured step has a collective that
training does not need. Mixed precision is the same autocast in every form, so all compute the same
numbers: what fully_shard gathers has the format that autocast would cast it to.
"""

import contextlib
import inspect
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from common import cli, ranks
from common import device as devices
from common.options import RunOptions
from common.training.preparation import CommunicatingOptimizer, Model, Optimizer
from tracepage.errors import RunError, UsageError, first_line

import torch
import torch.distributed as dist
from torch import Tensor, nn

PERIOD = 1.0  # seconds between two meetings, about
# Seconds after a signal, from which on the record is written without waiting for the device.
PATIENCE = 5.0


# ---------------------------------------------------------------------------------- start and end


def form(options: RunOptions, forms: Sequence[str] = ranks.FORMS) -> str | None:
    """The form asked for, or the first that the version supports; None for one process. UsageError:
    another flag forbids it.
    """
    if ranks.here().world_size == 1 and not options.parallel:
        return None
    chosen = options.parallel or forms[0]
    if chosen not in forms:
        raise UsageError(f"this script takes --parallel {' or '.join(forms)}")
    compiled = options.switches.get("torch-compile")
    if chosen == "fsdp" and (compiled or options.enable_deepspeed_flops):
        raise UsageError(
            "--parallel fsdp gathers weights in each step: leave --enable-torch-compile and "
            "--enable-deepspeed-flops out, or take ddp or zero1"
        )
    return chosen


def start(device: torch.device, timeout: float, captured: bool = False) -> None:
    """Starts the process group: NCCL (RCCL) with one GPU a process, or gloo; `captured`: its
    collectives will be.

    A process waits `timeout` seconds for another. UsageError: there are more processes than GPUs.
    RunError: they do not meet.
    """
    local_rank = ranks.here().local_rank
    gpu: dict[str, Any] = {}
    if devices.is_gpu(device):
        if local_rank >= torch.cuda.device_count():
            raise UsageError(
                f"this node has {torch.cuda.device_count()} GPUs: "
                "lower --nproc-per-node to one process a GPU"
            )
        torch.cuda.set_device(local_rank)
        gpu = {"device_id": torch.device("cuda", local_rank)}
        # NCCL's errors may not be polled during a capture (PyTorch's notes on CUDA graphs).
        if captured:
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    try:
        with cli.signals_immediate():
            dist.init_process_group(
                "nccl" if gpu else "gloo", timeout=timedelta(seconds=timeout), **gpu
            )
    except RuntimeError as error:
        raise RunError(
            f"the processes have not met within {timeout} s (--distributed-timeout): "
            f"{first_line(error)}"
        ) from error
    ranks.gloo_started = not gpu


@contextlib.contextmanager
def joined(options: RunOptions, device: torch.device) -> Iterator[None]:
    """Starts the group, and ends it after a run without an error: others may wait for a process
    that had one.

    Within it, only the first process prints.
    """
    with contextlib.ExitStack() as stack:
        if not ranks.here().main_process:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        start(device, options.distributed_timeout, bool(options.capture_step))
        batch = options.batch_size
        world_size = ranks.here().world_size
        processes = f"{options.parallel} on {world_size} processes ({dist.get_backend()})"
        print(
            f"{processes}: batch {world_size} x {batch} = {world_size * batch} sequences a step",
            flush=True,
        )
        yield
        dist.destroy_process_group()


def check_alike(options: RunOptions, sha256: str) -> None:
    """UsageError, in all processes: one of them has other options than the first, which it names,
    or other data.
    """
    everyone = ranks.gathered((sha256, _options_by_flag(options)))
    text, expected = everyone[0]
    for rank, (other_text, values) in enumerate(everyone):
        differing = [
            f"{flag} ({values.get(flag)} for rank {rank}, {value} for rank 0)"
            for flag, value in expected.items()
            if values.get(flag) != value
        ]
        if other_text != text:
            differing.insert(0, "--data is another text for another process")
        if differing:
            raise UsageError(f"{', '.join(differing)}: give all the same", shared=True)


def _options_by_flag(options: RunOptions) -> dict[str, str]:
    """What must be alike. A file or a folder may have another name on another node."""
    values = vars(options) | dict(options.model)
    values |= {f"enable_{name}": value for name, value in options.switches.items()}
    for name in ("model", "switches", "config", "data", "metrics_out"):
        del values[name]
    result = {}
    for name, value in values.items():
        text = "a path" if isinstance(value, Path) else str(value)
        result[f"--{name.replace('_', '-')}"] = text
    return result


# --------------------------------------------------------------------------------------- training


class Loss(nn.Module):
    """Makes `model.loss` the forward pass, which DistributedDataParallel and DeepSpeed watch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss(input_ids, targets)


class Replica:
    """A model whose `loss` runs under DistributedDataParallel; all else is the model's own."""

    def __init__(self, model: nn.Module) -> None:
        from torch.nn.parallel import DistributedDataParallel

        known = inspect.signature(DistributedDataParallel).parameters
        buffers = "forward_sync_buffers"
        if buffers not in known:  # before PyTorch 2.13
            buffers = "broadcast_buffers"
        options: dict[str, Any] = {buffers: False}
        self.model = model
        self.parallel = DistributedDataParallel(
            Loss(model), gradient_as_bucket_view=True, **options
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def loss(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        return self.parallel(input_ids, targets)


def parallel_model(model: Model, form: str, dtype: torch.dtype) -> Model:
    """The model in the form that a training step calls; fully_shard changes it in place. Called
    before the optimizer is made.

    Args:
        model: on the process's device, with `loss` and `layers`, its blocks of `self_attn` and
            `mlp`. It stays as it is if its attribute `optimizer_communicates` is true.
        form: of `ranks.FORMS`.
        dtype: of matrix products.
    """
    if getattr(model, "optimizer_communicates", False):
        return model
    if form in ("ddp", "zero1"):
        return cast(Model, Replica(model))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    # Without a mesh, fully_shard uses a machine's GPU even for a model on the CPU.
    mesh = init_device_mesh(next(model.parameters()).device.type, (ranks.here().world_size,))
    products = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in cast(nn.ModuleList, model.layers):
        sublayers = cast(list[nn.Module], [block.self_attn, block.mlp])  # all but its norms
        fully_shard(sublayers, mesh=mesh, mp_policy=products)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "loss")
    return model


def parallel_optimizer(optimizer: Optimizer, form: str) -> Optimizer:
    """The optimizer, not stepped yet, in a form that stores its state once in the whole job if
    `form` is zero1.

    A CommunicatingOptimizer does so itself.
    """
    if isinstance(optimizer, CommunicatingOptimizer):
        optimizer.communicate(form)
        return optimizer
    if form != "zero1":
        return optimizer
    from torch.distributed.optim import ZeroRedundancyOptimizer

    known = inspect.signature(type(optimizer)).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in known}
    shared = ZeroRedundancyOptimizer(
        optimizer.param_groups, type(optimizer), parameters_as_bucket_view=True, **defaults
    )
    return cast(Optimizer, shared)


# --------------------------------------------------------------------------------------- meetings


class Meetings:
    """Steps after which all processes hear whether one of them was told to stop.

    They meet after steps that they have agreed on, about PERIOD apart.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.next = 1
        self.last = (0, time.monotonic())  # step and time of the last meeting
        self.seconds = float("inf")  # a step since then

    def agree(self, finished: int, signal: int, overdue: bool) -> tuple[int, bool]:
        """The number of a signal (0: none), and whether a line is due, for all processes alike,
        after this many steps.
        """
        if finished < self.next:
            return 0, False
        agreed = torch.tensor([signal, self.seconds, overdue], device=self.device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        # This waits for the device, so the time below is that of finished steps.
        signal, seconds, overdue = agreed.tolist()
        step, since = self.last
        self.next = finished + max(1, int(PERIOD / seconds))
        self.last = finished, time.monotonic()
        self.seconds = (self.last[1] - since) / (finished - step)
        return int(signal), bool(overdue)

    @contextlib.contextmanager
    def watched(self, keep: Callable[[], None], timeout: float, captured: bool) -> Iterator[None]:
        """Calls `keep` from a thread where the main one waits for a device, in which no handler of
        a signal can run.

        That is PATIENCE seconds after a signal. A captured step also ends the process after
        `timeout` seconds without a meeting: nothing in NCCL watches the collectives of a graph.
        """
        reader, writer = socket.socketpair()
        reader.settimeout(PERIOD)
        writer.setblocking(False)  # as a wakeup fd must be

        def watch() -> None:
            signalled = float("inf")
            while True:
                with contextlib.suppress(TimeoutError):
                    if reader.recv(1) == b"\0":  # no signal, but the end of the loop
                        return
                    signalled = time.monotonic()
                if time.monotonic() - signalled > PATIENCE:
                    keep()
                    signalled = float("inf")
                if captured and time.monotonic() - self.last[1] > timeout:
                    keep()
                    print(
                        f"error: rank {ranks.here().rank}: no answer from another process "
                        f"for {timeout} s (--distributed-timeout)",
                        file=sys.stderr,
                        flush=True,
                    )
                    os._exit(1)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            writer.send(b"\0")
            thread.join()
            reader.close()
            writer.close()
