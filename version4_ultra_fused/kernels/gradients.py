"""The weights that products read, the gradients that they write, and the branch of the graph on which they write them.

`optimizer.MasterAdamW` gives each parameter `working`, the weight in the products' dtype, and `gradient`, a buffer that every
backward pass overwrites. A model without that optimizer has neither: then products cast the weight, and gradients are added to
`.grad`, as everywhere in PyTorch.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common.spans import span
from version4_ultra_fused import kernels

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def backward_of(name: str) -> Callable[[Callable], Callable]:
    """Decorates the backward pass of an autograd.Function: it runs in the span `name`, and cannot be differentiated again."""
    return lambda backward: once_differentiable(span(name)(backward))


def working(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """The parameter's values in `dtype`."""
    copy = getattr(parameter, "working", parameter)
    return (copy if copy.dtype == dtype else parameter).detach().to(dtype)


def products_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products on x: autocast's, or x's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def store(parameter: nn.Parameter, write: Callable[[Tensor], None], dtype: torch.dtype | None = None) -> None:
    """Lets `write` fill the parameter's gradient, from which nothing of the last step may be read."""
    if hasattr(parameter, "gradient"):
        write(parameter.gradient)
        return
    out = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    write(out)
    parameter.grad = out.to(parameter.dtype) if parameter.grad is None else parameter.grad + out


def product(dy: Tensor, x: Tensor) -> Callable[[Tensor], None]:
    """For `store`: writes dy^T x, the gradient of a weight [O, I], from dy [N, O] and x [N, I]."""

    def write(out: Tensor) -> None:
        if out.dtype == dy.dtype:
            torch.mm(dy.T, x, out=out)
        elif out.dtype == torch.float32 and dy.is_cuda and not torch.version.hip:  # cuBLAS writes its float32 sum
            torch.mm(dy.T, x, out_dtype=out.dtype, out=out)
        else:
            out.copy_(dy.T @ x)

    return write


class SideBranch:
    """A second stream for work that nothing waits for before the optimizer.

    In a captured step it becomes a branch of the graph: a small product on it runs beside the kernels of the main branch, where
    either alone would leave multiprocessors idle.
    """

    DEPTH = 8  # works in flight; the tensors of an older one are given back, once the main branch has waited for it

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.flying: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    def run(self, work: Callable[[], object], *tensors: Tensor) -> None:
        """Runs `work`, which reads `tensors`, after all that the current stream has been given so far."""
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            work()
        self.flying.append((self.stream.record_event(), tensors))
        if len(self.flying) > self.DEPTH:
            current.wait_event(self.flying.popleft()[0])

    def join(self) -> None:
        """Makes the current stream wait for all work."""
        torch.cuda.current_stream().wait_stream(self.stream)
        self.flying.clear()


class Gradients:
    """Writes the gradients of a model's weights: at once or, inside `on_side_branch`, beside the rest of the backward pass."""

    def __init__(self) -> None:
        self.side: SideBranch | None = None  # one for all steps, because each stream has a workspace of its own
        self.branch: SideBranch | None = None
        self.update_block: Callable[[], None] | None = None

    @contextmanager
    def on_side_branch(self, wanted: bool, update_block: Callable[[], None] | None) -> Iterator[None]:
        """For a training step, if `wanted`. `update_block` updates the matrices of a block whose gradients have been written."""
        if not wanted:
            yield
            return
        self.side = self.side or SideBranch()
        self.branch, self.update_block = self.side, update_block
        yield
        self.branch.join()
        self.branch = self.update_block = None

    def later(self, work: Callable[[], object], *tensors: Tensor) -> None:
        """Does work that only the optimizer waits for, and that reads these tensors."""
        if self.branch:
            self.branch.run(work, *tensors)
        else:
            work()

    def matrix(self, weight: nn.Parameter, dy: Tensor, x: Tensor) -> None:
        """Writes dy^T x, for a product x W^T."""
        self.later(lambda: store(weight, product(dy, x)), dy, x)

    @span("norm")
    def norm(
        self, weight: nn.Parameter, dy: Tensor, dx: Tensor | None, x: Tensor, rstd: Tensor, branch: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Writes the gradient of a norm's weight.

        Args:
            dy: [N, D], the gradient of the norm's result.
            dx: [N, D], the gradient of x from elsewhere, or None.
            x, rstd: from `add_norm`.

        Returns:
            The gradients of the two addends of x, each [N, D]; None for the second without `branch`.
        """
        dx, dbranch, parts = kernels.add_norm_backward(dy, dx, x, weight, rstd)
        self.later(lambda: store(weight, lambda out: kernels.sum_parts(parts, out)), parts)
        return dx, dbranch if branch else None

    def block_done(self) -> None:
        """To be called when the backward pass of a block has been issued."""
        if self.branch and self.update_block:
            self.branch.run(self.update_block)
