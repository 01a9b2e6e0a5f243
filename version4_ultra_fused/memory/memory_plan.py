"""Where a product finds its weight, where the gradient of a weight goes, and what runs beside the
main stream.

A model starts with an empty plan: a product casts its weight, and gradients are returned to
autograd, which adds them to `.grad`. `MasterAdamW.plan_memory` makes a plan with buffers. A product
then reads a copy of the weight that AdamW keeps in the products' dtype, and each gradient is
written to a buffer of its own, which the next step overwrites. Autograd is given nothing.

Who writes which buffer, and when. Time runs down. Each column is a stream of a captured step. Work
at the head of an arrow starts when the work at its tail has ended, and the total is the sum x +
branch:

    main                              products                       updates
    ----                              --------                       -------
    forward: each block keeps
      total, y, q k v,
      attended, gates, hidden
    loss: logits, then their          sort the ids
      gradient over the logits
    backward: the head           -->  gradient[head]
      d(total), parts            ---------------------------------> gradient[last norm]
    for each block, last first:
      d(hidden)                  -->  gradient[down]
      d(gates) over gates        -->  gradient[gate, up]
      d(total), parts            ---------------------------------> gradient[norm]
      d(attended)                -->  gradient[output]
      d(q k v)                   -->  gradient[qkv]
      d(total), parts            ---------------------------------> gradient[norm]
                                      the block's gradients are there -->
                                                                     AdamW of the block: moments,
                                                                     master, working
    the embedding: adds to       <--  gradient[head]
      gradient[head]
    join, AdamW of norms and head
      and of blocks not yet updated

Nothing reads `working` of a block after its backward pass, so its update may run beside the
blocks before it. Without side streams the same work is done in line, in the order of issue.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from common.options import Switches
from common.precision import adds_in_float32
from common.spans import span
from version4_ultra_fused import kernels
from version4_ultra_fused.kernels.fp8.scales import Scales
from version4_ultra_fused.kernels.reference import Norm, Rope
from version4_ultra_fused.memory.side_stream import SideStream, SideStreams

import torch
from torch import Tensor, nn


def without_gradient(ctx, x: Tensor) -> Tensor:
    """x as a result of an autograd Function whose backward pass is given None for it."""
    ctx.mark_non_differentiable(x)
    ctx.set_materialize_grads(False)
    return x


def saved(ctx) -> tuple[Any, ...]:
    """What a Function's forward pass saved for its backward pass, which gives it free.

    Raises:
        RuntimeError: a backward pass took it before.
    """
    if ctx.saved is None:
        raise RuntimeError(
            "Trying to backward through the graph a second time: Version 4 frees what it saved, and writes over some of it"
        )
    taken = ctx.saved
    ctx.saved = None
    return taken


class MemoryPlan:
    """The buffers of a model's weights and gradients, and the streams of its step.

    Args:
        working: of each parameter, the weight that products read; empty without the memory plan.
        gradient: of each parameter, the buffer of its gradient; likewise. update_block: updates the
        matrices of a block, beside the backward pass of the blocks before it; None: not before its
        end. communicates: whether gradients are added up over processes as they are written.
        scales: of products in FP8.
    """

    def __init__(
        self,
        working: dict[Tensor, Tensor] | None = None,
        gradient: dict[Tensor, Tensor] | None = None,
        update_block: Callable[[nn.Module], None] | None = None,
        communicates: bool = False,
        scales: Scales | None = None,
    ) -> None:
        self.working = working or {}
        self.gradient = gradient or {}
        self.update_block = update_block
        self.communicates = communicates
        self.scales = scales
        # they stay for all steps, because a library has a workspace for each stream
        self.streams: SideStreams | None = None
        self.beside: SideStreams | None = None  # the same in a step that uses them
        self.waiting: list[tuple[Callable[[], object], tuple[Tensor, ...]]] = []  # for the loss
        self.written: dict[Tensor, torch.cuda.Event] = {}  # by the products' stream, in this step

    @contextmanager
    def step(self, tokens: int, beside: bool) -> Iterator[None]:
        """Around the forward and backward pass of a training step on so many tokens.

        Args:
            beside: whether gradients of weights are written on the side streams.
        """
        if beside:
            self.streams = self.streams or SideStreams(SideStream(), SideStream())
        self.beside = self.streams if beside else None
        self.waiting.clear()  # of a step that ended in an error
        if self.scales:
            self.scales.begin(tokens)
        yield
        for stream in self.beside or ():
            stream.join()
        if self.scales:
            self.scales.end()
        self.beside = None
        self.written.clear()

    def weight(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """The parameter's values in `dtype`."""
        working = self.working.get(parameter)
        return (
            working
            if working is not None and working.dtype == dtype
            else parameter.detach().to(dtype)
        )

    def on_products_stream(
        self, parameter: Tensor | None, work: Callable[[], object], *tensors: Tensor
    ) -> None:
        """Does work that reads `tensors` and writes the gradient of `parameter`, if any: in line
        without side streams.
        """
        if not self.beside:
            work()
            return
        done = self.beside.products.run(work, *tensors)
        if parameter is not None:
            self.written[parameter] = done

    def matrix_gradient(self, parameter: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
        """The gradient dy^T x of a weight W [O, I] in the product x W^T, from dy [N, O] and x [N,
        I].

        This and the following return it for autograd, or write it to its buffer and return None.
        """
        out = self.gradient.get(parameter)
        if out is None:
            return (dy.T @ x).to(parameter.dtype)

        def write() -> None:
            if out.dtype == dy.dtype:
                torch.mm(dy.T, x, out=out)
            elif out.dtype == torch.float32 and adds_in_float32(dy.device):
                torch.mm(dy.T, x, out_dtype=out.dtype, out=out)
            else:
                out.copy_(dy.T @ x)

        self.on_products_stream(parameter, write, dy, x)
        return None

    def norm_gradient(self, parameter: Tensor, parts: Tensor) -> Tensor | None:
        """The gradient of a norm's weight [D] from `parts` [parts, D] of `add_norm_backward`."""
        if not self.gradient:
            gradient = torch.empty_like(parameter, requires_grad=False)
            kernels.sum_parts(parts, gradient)
            return gradient
        work = functools.partial(kernels.sum_parts, parts, self.gradient[parameter])
        if self.beside:
            self.beside.updates.run(work, parts)
        else:
            work()
        return None

    def norm_backward(
        self, dy: Tensor, dtotal: Tensor | None, norm: Norm, needed: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The backward pass of `add_norm`.

        Args:
            dy: [N, D], the gradient of the norm's result.
            dtotal: [N, D], the gradient of the sum x + branch from elsewhere, or None.
            norm: from `add_norm`.
            needed: whether the gradients of x and of the branch are; of the two, one is.

        Returns:
            The gradients of x in its dtype and of the branch in dy's, [N, D] or None, and
            `norm_gradient`.
        """
        with span("norm"):
            dx, parts = kernels.add_norm_backward(
                dy, dtotal, norm, norm.weight.dtype if needed[0] else dy.dtype
            )
            return (
                dx if needed[0] else None,
                dx if needed[1] else None,
                self.norm_gradient(norm.weight, parts),
            )

    def norm_backward_through_product(
        self,
        product: tuple[Tensor, Tensor | None],
        matrix: Tensor,
        dtotal: Tensor,
        norm: Norm,
        needed: Sequence[bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """`norm_backward` of dy = dout W, W [C, D] being the parameter `matrix`; `product` is dout
        and `dots` of the kernel's.
        """
        dout, dots = product
        dtype = norm.weight.dtype if needed[0] else dout.dtype
        weight = self.weight(matrix, dout.dtype)
        dx, parts = kernels.product_norm_backward(dout, dots, weight, dtotal, norm, dtype=dtype)
        return (
            dx if needed[0] else None,
            dx if needed[1] else None,
            self.norm_gradient(norm.weight, parts),
        )

    def embedding_gradient(
        self, parameter: Tensor, ids: Tensor, order: Tensor, dx: Tensor
    ) -> Tensor | None:
        """The gradient of the embedding [V, D] from `ids` and `order` [N], sorted, and dx [N, D].

        In a buffer it is added to that of the head, which has the same weight. This runs on the
        main stream, beside the update of the first block. The products' stream sorts the ids before
        it computes the head's gradient, so one event says that both are there.
        """
        if not self.gradient:
            gradient = torch.zeros_like(parameter, requires_grad=False)
            kernels.add_embedding_gradient(dx, ids, order, gradient)
            return gradient
        if parameter in self.written:
            torch.cuda.current_stream().wait_event(self.written[parameter])
        kernels.add_embedding_gradient(dx, ids, order, self.gradient[parameter])
        return None

    def at_the_loss(self, work: Callable[[], object], *tensors: Tensor) -> None:
        """Does work that reads `tensors` and that only the backward pass needs: with buffers in
        `run_waiting`, otherwise now.
        """
        if self.gradient:
            self.waiting.append((work, tensors))
        else:
            work()

    def run_waiting(self) -> None:
        """Starts the work of `at_the_loss`; to be called when all blocks of the forward pass have
        been issued.
        """
        for work, tensors in self.waiting:
            self.on_products_stream(None, work, *tensors)
        self.waiting.clear()

    def block_done(self, block: nn.Module) -> None:
        """To be called when the backward pass of a block has been issued: updates it, where that
        may run beside the rest.
        """
        if self.beside and self.update_block:
            self.beside.updates.wait(self.beside.products)
            with span("optimizer"):
                self.beside.updates.run(functools.partial(self.update_block, block))


class Shared(NamedTuple):
    """What all blocks share in one forward and backward pass."""

    plan: MemoryPlan
    rope: Rope
    switches: Switches

    @classmethod
    def of(cls, model: Any, length: int) -> "Shared":
        """For a model of tiny_llama_v4.py and sequences of a length. UsageError: its rotary tables
        are shorter.
        """
        return cls(model.plan, Rope(model.cos, model.sin, length), model.switches)
