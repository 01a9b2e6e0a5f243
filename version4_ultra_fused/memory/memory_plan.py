"""Where a product finds its weight, where the gradient of a weight goes, and on which stream.

A model starts without buffers: a product casts its weight, and gradients are returned to autograd,
which adds them to `.grad`. `MasterAdamW.plan_memory` makes buffers. A product then reads a copy of
the weight that AdamW keeps in the products' dtype, and each gradient is written to a buffer of its
own, which the next step overwrites. Autograd is given nothing.

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
                                      both are there  ------------>  AdamW of the two: moments,
                                                                     master, working
      d(attended)                -->  gradient[output]
      d(q k v)                   -->  gradient[qkv]
      d(total), parts            ---------------------------------> gradient[norm]
                                      both are there  ------------>  AdamW of the two
    the embedding: adds to       <--  gradient[head]
      gradient[head]
    join, AdamW of norms and head
      and of matrices not yet updated

Attention and the feed-forward network of a block are its two sublayers. Nothing reads `working` of
a sublayer after its backward pass, so its update may run beside the rest. Without side streams the
same work is done in line, in the order of issue.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from common.options import Switches
from common.precision import adds_in_float32, products_dtype
from common.spans import span
from version4_ultra_fused.kernels import Operations
from version4_ultra_fused.kernels.fp8.scales import Scales
from version4_ultra_fused.kernels.reference import Rope
from version4_ultra_fused.memory.side_stream import Schedule

import torch
from torch import Tensor, nn

# The most tokens of a batch whose products leave multiprocessors idle.
SIDE_STREAM_TOKENS = 4096


def saved(ctx) -> tuple[Any, ...]:
    """What a Function's forward pass saved for its backward pass, which gives it free.

    Raises:
        RuntimeError: a backward pass took it before.
    """
    if ctx.saved is None:
        raise RuntimeError(
            "Trying to backward through the graph a second time: "
            "Version 4 frees what it saved, and writes over some of it"
        )
    values = ctx.saved
    ctx.saved = None
    return values


class Buffers(NamedTuple):
    """The buffers of a model's parameters; none without the memory plan."""

    working: Mapping[Tensor, Tensor] = {}  # what products read
    gradient: Mapping[Tensor, Tensor] = {}

    def weight(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """The parameter's values in `dtype`."""
        working = self.working.get(parameter)
        if working is not None and working.dtype == dtype:
            return working
        return parameter.detach().to(dtype)


NO_BUFFERS = Buffers()


class MemoryPlan:
    """Who writes which gradient in a step, and on which stream.

    Args:
        operations: the model's.
        buffers: of its weights and gradients. Each method below that is named after a gradient
            returns it for autograd, or writes it to its buffer and returns None.
        update_sublayer: updates the matrices of attention or the feed-forward network of a block,
            beside the rest of the backward pass; None: not before its end.
        communicates: whether gradients are added up over processes as they are written.
        scales: of products in FP8; None: there are none.
    """

    def __init__(
        self,
        operations: Operations,
        buffers: Buffers = NO_BUFFERS,
        update_sublayer: Callable[[nn.Module], None] | None = None,
        communicates: bool = False,
        scales: Scales | None = None,
    ) -> None:
        self.operations = operations
        self.buffers = buffers
        self.update_sublayer = update_sublayer
        self.communicates = communicates
        self.scales = scales
        self.schedule = Schedule()

    @contextmanager
    def step(self, ids: Tensor, side_stream: bool) -> Iterator[None]:
        """Around the forward and backward pass of a training step on these tokens [B, S].

        Args:
            side_stream: whether gradients of weights are written on side streams, where small
                products leave multiprocessors idle, or collectives wait for other processes.
        """
        small = ids.numel() <= SIDE_STREAM_TOKENS
        self.schedule.begin(side_stream and ids.is_cuda and (small or self.communicates))
        if self.scales:
            self.scales.begin(ids.numel())
        yield
        self.schedule.join()
        if self.scales:
            self.scales.end()
        self.schedule.end()

    def in_fp8(self, weight: Tensor, dtype: torch.dtype) -> bool:
        """Whether the product with this weight is in FP8, where others are in `dtype`."""
        return self.scales is not None and weight in self.scales.place and dtype == torch.bfloat16

    def matrix_gradient(
        self, parameter: Tensor, dy: Tensor, x: Tensor, after: torch.cuda.Event | None = None
    ) -> Tensor | None:
        """The gradient dy^T x of a weight W [O, I] in the product x W^T.

        Args:
            dy, x: [N, O] and [N, I].
            after: of `Schedule.mark`, when both were there.
        """
        out = self.buffers.gradient.get(parameter)
        if out is None:
            return (dy.T @ x).to(parameter.dtype)

        def write() -> None:
            if out.dtype == dy.dtype:
                torch.mm(dy.T, x, out=out)
            elif out.dtype == torch.float32 and adds_in_float32(dy.device):
                torch.mm(dy.T, x, out_dtype=out.dtype, out=out)
            else:
                out.copy_(dy.T @ x)

        self.schedule.on_products(parameter, write, dy, x, after=after)
        return None

    def product_gradients(
        self, parameter: Tensor, dy: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The gradient dy W of x, and that of W, as of `matrix_gradient`."""
        ready = self.schedule.mark()
        dx = dy @ self.buffers.weight(parameter, dy.dtype)
        return dx, self.matrix_gradient(parameter, dy, x, ready)

    def norm_gradient(self, parameter: Tensor, parts: Tensor) -> Tensor | None:
        """The gradient of a norm's weight [D] from `parts` [parts, D] of `add_norm_backward`."""
        out = self.buffers.gradient.get(parameter)
        if out is None:
            gradient = torch.empty_like(parameter, requires_grad=False)
            self.operations.sum_parts(parts, gradient)
            return gradient
        self.schedule.on_updates(functools.partial(self.operations.sum_parts, parts, out), parts)
        return None

    def embedding_gradient(
        self, parameter: Tensor, ids: Tensor, order: Tensor, dx: Tensor
    ) -> Tensor | None:
        """The gradient of the embedding [V, D] from `ids` and `order` [N], sorted, and dx [N, D].

        In a buffer it is added to that of the head, which has the same weight. This runs on the
        main stream, beside the update of the first sublayer. The products' stream sorts the ids
        before it computes the head's gradient, so one event says that both are there.
        """
        out = self.buffers.gradient.get(parameter)
        if out is None:
            gradient = torch.zeros_like(parameter, requires_grad=False)
            self.operations.add_embedding_gradient(dx, ids, order, gradient)
            return gradient
        self.schedule.wait_for(parameter)
        self.operations.add_embedding_gradient(dx, ids, order, out)
        return None

    def sublayer_done(self, sublayer: nn.Module) -> None:
        """To be called when the backward pass of a sublayer has been issued: updates it, where that
        may run beside the rest.
        """
        beside = self.schedule.beside
        if beside and self.update_sublayer:
            beside.updates.wait(beside.products)
            with span("optimizer"):
                beside.updates.run(functools.partial(self.update_sublayer, sublayer))


class Shared(NamedTuple):
    """What all blocks share in one forward and backward pass."""

    plan: MemoryPlan
    rope: Rope
    switches: Switches
    eps: float  # of the norms
    dtype: torch.dtype  # of matrix products

    @classmethod
    def of(cls, model: Any, length: int) -> "Shared":
        """For a model of tiny_llama_v4.py and sequences of a length.

        Raises:
            UsageError: its rotary tables are shorter.
        """
        rope = Rope(model.cos, model.sin, length)
        dtype = products_dtype(model.one)
        return cls(model.plan, rope, model.switches, model.norm.eps, dtype)

    def residual(self, ctx, total: Tensor) -> Tensor:
        """The residual stream as a result of an autograd Function. With
        --enable-fp32-residual-gradient it has a gradient; otherwise the backward pass is given
        None for it.
        """
        ctx.set_materialize_grads(False)
        if not self.switches["fp32-residual-gradient"]:
            ctx.mark_non_differentiable(total)
        return total

    def weight(self, parameter: Tensor) -> Tensor:
        """A weight as products read it."""
        return self.plan.buffers.weight(parameter, self.dtype)
