"""A training step captured as one CUDA or HIP graph (`--capture-step`), in every version.

A captured step launches all its kernels with one call of the host: forward pass, loss, backward
pass, optimizer and, in float16, the scaling of the loss. The batch is copied into buffers that the
graph reads, and every tensor of the step stays where it was while the graph was captured. So the
host's cost of launching is gone. The graph must repeat the eager step's loss and gradients.

A step can be captured if it never waits for the GPU and keeps its shapes. Only AdamW changes for
that. It counts its steps on the GPU (`capturable`), which rounds its two bias corrections to
float32 and, where it is not fused, launches more kernels. So eager time minus captured time is what
the waits for the host cost at least. In float16 it is PyTorch's fused AdamW, which also leaves out
a step whose gradients have overflowed without asking the host.
"""

import gc
import math

from common import device as devices
from common import ranks
from common.precision import Precision
from common.training import preparation
from common.training.preparation import Batch, Prepared, Step
from tracepage.errors import RunError, UsageError, first_line

import torch
from torch import Tensor

# Steps before the capture, on a stream of their own: libraries make their workspaces, compilers
# their kernels.
WARMUP = 3
# DistributedDataParallel may change its buckets until then (PyTorch's notes on CUDA graphs).
PARALLEL_WARMUP = 11
# Relative error of a first moment: in bf16, kernels that add in any order differ by less.
TOLERANCE = 5e-2
NUDGE = 1e-4  # relative


def check_supported(device: torch.device, compile_mode: bool | str | None = None) -> None:
    """Raises UsageError, with the reason, where a step cannot be captured."""
    if not devices.is_gpu(device):
        raise UsageError(
            "--capture-step needs a GPU: a CPU has no graphs, and its host launches nothing"
        )
    if compile_mode in ("reduce-overhead", "max-autotune"):
        raise UsageError(
            f"--capture-step: --torch-compile-mode {compile_mode} captures graphs of its own; "
            "leave one of the two out"
        )


class CapturedStep:
    """A step as a graph: `step(batch) -> loss`. The loss is one tensor, which the next call
    overwrites.
    """

    def __init__(self, step: Step, batch: Batch, parallel: bool = False) -> None:
        """Captures `step`, which has run before; the capture itself computes nothing.

        Args:
            batch: of the shape that all batches will have; its content does not matter.
            parallel: the step has collectives, whose library has a thread of its own that may ask
                for events meanwhile.
        """
        self._alive = step  # with the weights and moments that the graph reads
        self.batch = (batch[0].clone(), batch[1].clone())
        torch.cuda.synchronize()
        gc.collect()  # now, as what it frees is not the step's
        # 32 MiB for each stream that was used; the graph gets its own.
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
        # Bytes at once, as an eager step would have needed them.
        self.peak_bytes = torch.cuda.max_memory_allocated()

    def __call__(self, batch: Batch) -> Tensor:
        for static, tensor in zip(self.batch, batch, strict=True):
            if tensor.shape != static.shape:  # copy_ would repeat a smaller batch
                raise ValueError(
                    f"this step was captured for batches of {[*static.shape]}, "
                    f"not {[*tensor.shape]}"
                )
        torch._foreach_copy_(self.batch, batch)  # one launch
        self.graph.replay()
        return self.loss

    def release(self) -> None:
        """Destroys the graph, for which NCCL 2.26 and later wait, without end, before they end a
        communicator that it uses.
        """
        self.graph.reset()


def captured_step(prepared: Prepared, precision: Precision, batch: Batch) -> Prepared:
    """The same with its step as a graph, after `preparation.warm_up`; all weights are the initial
    ones afterwards.

    RunError: the step cannot be captured, or a replay gives another loss or gradients than the
    eager step.
    """
    model = prepared.model
    optimizer = prepared.optimizer
    step = prepared.step

    def results(step: Step) -> list[Tensor]:
        loss = preparation.repeat(step, optimizer, batch, passes=1)
        grads = preparation.gradients(model, optimizer).values()
        return [loss, *(grad for grad in grads if grad is not None)]

    parallel = ranks.joined()
    # On a stream of its own: a step's autograd graph that outlives it must not wait for the default
    # stream in the capture.
    with devices.stream_before_capture():
        with preparation.without_update(optimizer, precision):
            for _ in range(PARALLEL_WARMUP if parallel else WARMUP):
                step(batch)
        initial = {name: value.to("cpu", copy=True) for name, value in model.state_dict().items()}
        with preparation.without_update(optimizer, precision):
            # On the device they would count as the step's memory.
            expected = [tensor.cpu() for tensor in results(step)]
        model.load_state_dict(nudged(model.state_dict()))
        with preparation.without_update(optimizer, precision):
            spread = difference(expected, results(step))
        model.load_state_dict(initial)
    scaler = precision.scaler.state_dict()
    captured = CapturedStep(step, batch, parallel)
    # A replay changes weights: the graph holds the rate of its capture.
    error = difference(expected, results(captured))
    model.load_state_dict(initial)
    preparation.forget(optimizer, precision, scaler)
    if not (math.isfinite(error) and error <= max(TOLERANCE, 2 * spread)):
        raise RunError(
            f"the captured step differs from the eager one: relative error {error:.2g} "
            "of a loss or gradient"
        )
    torch.cuda.empty_cache()  # of what the check used
    return Prepared(model, optimizer, captured, captured.peak_bytes)


def nudged(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights, changed by less than bf16 rounds them by: a step on them rounds some of its
    numbers the other way.

    FP8 has few numbers: such a difference moves others in the layers that follow, and gradients by
    10 to 25%; in bf16 by 2%.
    """
    return {name: value * (1 + NUDGE * torch.sin(1e6 * value)) for name, value in state.items()}


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest relative error of a tensor, |a - b| / |a| in the Euclidean norm; infinite where
    that is no number.
    """
    pairs = ((a.to(b.device), b) for a, b in zip(ours, theirs, strict=True))
    errors = [((a - b).norm() / a.norm().clamp_min(1e-30)).item() for a, b in pairs]
    return float("inf") if any(map(math.isnan, errors)) else max(errors)
