"""A training step captured as one CUDA or HIP graph (`--capture-step`), in every version.

A captured step launches all its kernels with one call of the host: forward pass, loss, backward
pass, optimizer and, in float16, the scaling of the loss. The batch is copied into buffers that the
graph reads, and every tensor of the step stays where it was while the graph was captured. So the
host's cost of launching is gone: it is eager time minus captured time.

A step can be captured if it never waits for the GPU and keeps its shapes. Only AdamW changes for
that. It counts its steps on the GPU (`capturable`), which rounds its two bias corrections to
float32. In float16 it is PyTorch's fused AdamW, which also leaves out a step whose gradients have
overflowed without asking the host.
"""

import gc
import math
from collections.abc import Callable
from typing import Any, TypeVar

from common import device as devices
from common.precision import Precision
from tracepage.errors import RunError, UsageError, first_line

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
Batch = tuple[Tensor, Tensor]
Step = Callable[[Batch], Tensor]
# steps before the capture, on a stream of their own: libraries make their workspaces, compilers
# their kernels
WARMUP = 3
# with DistributedDataParallel, which until then may change its buckets (PyTorch's notes on CUDA
# graphs)
PARALLEL_WARMUP = 11
# relative error of a first moment: in bf16, kernels that add in any order differ by less
TOLERANCE = 5e-2


def wanted(given: bool | None, default: bool, device: torch.device) -> bool:
    """Whether the step is to be captured: as the flag says, or else as the version does by default,
    where that can be.
    """
    return default and devices.is_gpu(device) if given is None else given


def check_supported(device: torch.device, compile_mode: bool | str | None = None) -> None:
    """Raises UsageError, with the reason, where a step cannot be captured."""
    if not devices.is_gpu(device):
        raise UsageError(
            "--capture-step needs a GPU: a CPU has no graphs, and its host launches nothing"
        )
    if compile_mode in ("reduce-overhead", "max-autotune"):
        raise UsageError(
            f"--capture-step: --torch-compile-mode {compile_mode} captures graphs of its own; leave one of the two out"
        )


def capturable(optimizer: Optimizer, precision: Precision) -> Optimizer:
    """The same AdamW, not stepped yet, as one that a graph can hold."""
    if optimizer.defaults.get("capturable"):
        return optimizer
    wanted: dict[str, Any] = {"capturable": True} | (
        {"fused": True} if precision.scaler.is_enabled() else {}
    )
    groups = [
        {key: value for key, value in group.items() if key not in wanted}
        for group in optimizer.param_groups
    ]
    return type(optimizer)(groups, **wanted)


class CapturedStep:
    """A step as a graph: `step(batch) -> loss`. The loss is one tensor, which the next call
    overwrites.
    """

    def __init__(self, step: Step, batch: Batch, parallel: bool = False) -> None:
        """Captures `step`, which has run before; the capture itself computes nothing.

        Args:
            batch: of the shape that all batches will have; its content does not matter. parallel:
            the step has collectives, whose library has a thread of its own that may ask for events
            meanwhile.
        """
        self._alive = step  # with the weights and moments that the graph reads
        self.batch = (batch[0].clone(), batch[1].clone())
        torch.cuda.synchronize()
        gc.collect()  # now, as what it frees is not the step's
        # 32 MiB for each stream that was used; the graph gets its own
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()  # so that what the pools hold afterwards is what the step needs
        torch.cuda.reset_peak_memory_stats()
        self.graph = torch.cuda.CUDAGraph()
        # Kernels keep the priority of the stream that they were captured on: where a step forks,
        # those of its main stream come first. Collectives have streams of their own, whose kernels
        # must not wait for the main stream's.
        stream = torch.cuda.Stream(priority=0 if parallel else -1)
        try:
            with devices.capturing(self.graph, parallel, stream):
                self.loss = step(self.batch)
        except RuntimeError as error:
            if devices.is_out_of_memory(error):
                raise
            raise RunError(
                f"this step cannot be captured, so give --no-capture-step: {first_line(error)}"
            ) from error
        # at once, as an eager step would have needed it
        self.peak_bytes = torch.cuda.max_memory_allocated()

    def __call__(self, batch: Batch) -> Tensor:
        for static, tensor in zip(self.batch, batch, strict=True):
            if tensor.shape != static.shape:  # copy_ would repeat a smaller batch
                raise ValueError(
                    f"this step was captured for batches of {[*static.shape]}, not {[*tensor.shape]}"
                )
        torch._foreach_copy_(self.batch, batch)  # one launch
        self.graph.replay()
        return self.loss

    def release(self) -> None:
        """Destroys the graph, for which NCCL 2.26 and later wait, without end, before they end a
        communicator that it uses.
        """
        self.graph.reset()


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest relative error of a tensor, |a - b| / |a| in the Euclidean norm; infinite where
    that is no number.
    """
    pairs = ((a.to(b.device), b) for a, b in zip(ours, theirs, strict=True))
    errors = [((a - b).norm() / a.norm().clamp_min(1e-30)).item() for a, b in pairs]
    return float("inf") if any(map(math.isnan, errors)) else max(errors)
