"""A block, and the head with the loss, whose matrix products are in FP8 (`--enable-fp8`);
`kernels/fp8/casts.py` says how a tensor becomes 8 bits wide.

The residual stream, the norms, attention, the embedding and the master weights are as in
`tiny_llama_v4.py`. x and W of a product x W^T are in e4m3, and the gradient of its result is in
e5m2, which has a wider range. Their scales are those of `kernels/fp8/scales.py`, but for that of
the gradient of logits (`kernels/fp8/logits.py`).
"""

from common.spans import span
from version4_ultra_fused.functions import norm_gradients
from version4_ultra_fused.kernels.attention import CausalAttention
from version4_ultra_fused.kernels.fp8.scales import GRADIENT, WEIGHT, X
from version4_ultra_fused.kernels.reference import Slot
from version4_ultra_fused.memory.memory_plan import MemoryPlan, saved

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Product:
    """One product x W^T in FP8 and, later, its two gradients; it keeps x and W as these need them,
    transposed.
    """

    def __init__(self, plan: MemoryPlan, parameter: Tensor) -> None:
        assert plan.scales
        self.plan = plan
        self.operations = plan.operations
        self.parameter = parameter
        self.x, self.weight, self.gradient = (
            plan.scales.slot(parameter, which) for which in (X, WEIGHT, GRADIENT)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [N, I] -> x W^T [N, O]."""
        return self.forward_stored(*self.operations.quantize(x, self.x))

    def forward_stored(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The same of an x that is in FP8, by rows and transposed."""
        weight, self.weight_columns = self.operations.quantize(
            self.plan.buffers.weight(self.parameter, torch.bfloat16), self.weight
        )
        self.x_columns = columns
        return self._multiply(rows, weight, self.x, self.weight, fast=True)

    def backward(self, dy: Tensor) -> Tensor:
        """dy [N, O] -> the gradient of x [N, I]; that of W goes to the plan."""
        return self.backward_stored(*self.operations.quantize(dy, self.gradient))

    def backward_stored(self, rows: Tensor, columns: Tensor) -> Tensor:
        out = self.plan.buffers.gradient[self.parameter]
        x = self.x_columns

        def write() -> None:
            self._multiply(columns, x, self.gradient, self.x, out=out)

        ready = self.plan.schedule.mark()
        dx = self._multiply(rows, self.weight_columns, self.gradient, self.weight)
        # The head's gradient has a scale of this step alone.
        read = (columns, x, self.gradient.scale)
        self.plan.schedule.on_products(self.parameter, write, *read, after=ready)
        return dx

    @staticmethod
    def _multiply(
        a: Tensor,
        b: Tensor,
        a_slot: Slot,
        b_slot: Slot,
        out: Tensor | None = None,
        fast: bool = False,
    ) -> Tensor:
        """a [M, K] b [N, K]^T in out's dtype, or bfloat16; fast: with sums of about 14 bits in the
        tensor cores, not float32.
        """
        return torch._scaled_mm(
            a,
            b.T,
            scale_a=a_slot.scale,
            scale_b=b_slot.scale,
            out_dtype=torch.bfloat16 if out is None else out.dtype,
            use_fast_accum=fast,
            out=out,
        )


class FP8AttentionFunction(torch.autograd.Function):
    """`AttentionFunction` of tiny_llama_v4.py, with its two products in FP8."""

    @staticmethod
    def forward(ctx, x, branch, block, shared, *weights: Tensor):
        norm_weight, qkv, output = weights
        plan = shared.plan
        operations = plan.operations
        attn = block.self_attn
        with span("norm"):
            x, y, norm = operations.add_norm(x, branch, norm_weight, shared.eps, torch.bfloat16)
        with span("attention"):
            into = Product(plan, qkv)
            out_of = Product(plan, output)
            with span("qkv_projection"):
                packed = operations.rotate(into.forward(y), shared.rope, attn.rotated)
            attended = CausalAttention(packed, shared.rope, attn.heads, shared.switches, operations)
            ctx.saved = (norm, attended, into, out_of)
            ctx.sublayer = attn
            ctx.plan = plan
            with span("output_projection"):
                return shared.residual(ctx, x), out_of.forward(attended.out)

    @staticmethod
    @once_differentiable
    @span("attention")
    def backward(ctx, dtotal: Tensor | None, dbranch: Tensor):  # type: ignore[override]
        norm, attended, into, out_of = saved(ctx)
        dy = into.backward(attended.gradient(out_of.backward(dbranch))[0])
        dx, dprevious, dnorm = norm_gradients.of_norm(ctx, ctx.plan, dy, dtotal, dbranch, norm)
        ctx.plan.sublayer_done(ctx.sublayer)
        return dx, dprevious, None, None, dnorm, None, None


class FP8FeedForwardFunction(torch.autograd.Function):
    """`FeedForwardFunction` of tiny_llama_v4.py, with its two products in FP8."""

    @staticmethod
    def forward(ctx, x, branch, block, shared, *weights: Tensor):
        norm_weight, gate_up, down = weights
        plan = shared.plan
        operations = plan.operations
        with span("norm"):
            x, y, norm = operations.add_norm(x, branch, norm_weight, shared.eps, torch.bfloat16)
        with span("mlp"):
            into = Product(plan, gate_up)
            out_of = Product(plan, down)
            with span("gate_up"):
                gates = into.forward(y)  # [N, 2 F]
            with span("activation"):
                hidden = operations.swiglu_quantized(gates, out_of.x)
            ctx.saved = (norm, gates, into, out_of)
            ctx.sublayer = block.mlp
            ctx.plan = plan
            with span("down"):
                return shared.residual(ctx, x), out_of.forward_stored(*hidden)

    @staticmethod
    @once_differentiable
    @span("mlp")
    def backward(ctx, dtotal: Tensor | None, dbranch: Tensor):  # type: ignore[override]
        norm, gates, into, out_of = saved(ctx)
        operations = ctx.plan.operations
        dgates = operations.swiglu_backward_quantized(
            out_of.backward(dbranch), gates, into.gradient
        )
        dy = into.backward_stored(*dgates)
        dx, dprevious, dnorm = norm_gradients.of_norm(ctx, ctx.plan, dy, dtotal, dbranch, norm)
        ctx.plan.sublayer_done(ctx.sublayer)
        return dx, dprevious, None, None, dnorm, None, None


class FP8LossFunction(torch.autograd.Function):
    """`LossFunction` of ends.py, with the head's product in FP8."""

    @staticmethod
    def forward(ctx, x, branch, targets: Tensor, model, *weights: Tensor) -> Tensor:
        norm_weight, head = weights
        plan = model.plan
        operations = plan.operations
        product = Product(plan, head)
        _, y, norm = operations.add_norm(x, branch, norm_weight, model.norm.eps, torch.bfloat16)
        logits = product.forward(y)  # [N, V]
        # Under no_grad the weights need a gradient all the same, x and branch need none.
        if not any(ctx.needs_input_grad[:2]):
            return operations.cross_entropy(logits, targets, False)
        dtype = product.gradient.dtype
        loss, scale, *dlogits = operations.cross_entropy_quantized(logits, targets, dtype)
        ctx.saved = (product, norm, scale, dlogits)
        ctx.plan = plan
        ctx.one = model.one
        return loss

    @staticmethod
    @once_differentiable
    @span("loss")
    def backward(ctx, dloss: Tensor):  # type: ignore[override]
        product, norm, scale, dlogits = saved(ctx)
        if dloss is not ctx.one:
            scale = scale * dloss
        product.gradient = product.gradient._replace(scale=scale)
        dy = product.backward_stored(*dlogits)
        dx, dprevious, dnorm = norm_gradients.of_norm(ctx, ctx.plan, dy, None, None, norm)
        return dx, dprevious, None, None, dnorm, None


FUNCTIONS = FP8AttentionFunction, FP8FeedForwardFunction  # of a block
