"""The loss straight from hidden states and the head's weight, without all logits in memory at once.

With z = x W^T for a token (x [D], W [V, D]), target t, N tokens, p = softmax(z):

    loss = mean (log sum_v exp z_v - z_t)        dz = (p - onehot(t)) / N        dx = dz W        dW = sum dz^T x

Tokens go in chunks. For a chunk the product gives its logits, one kernel turns each row into its loss and, in place, N dz
(online softmax: one pass for maximum and sum, one to write), and two products give N dx and the chunk's part of N dW. So the
backward pass happens inside the forward: only these are kept, and scaled by the incoming gradient over N. This is Liger-Kernel's
idea (Hsu et al. 2024, arXiv:2410.10989).

Memory: the eager version holds logits, their float32 log-softmax and its gradient, at least 3 N V numbers; this one N V /
chunks, N D for dx, and V D for dW from the forward to the backward pass, which writes its result beside it; a dW of several
chunks, or in float16, is in float32. FLOPs are the same 6 N D V. dW's sum is in a fixed order. Each chunk after the first reads
and writes it once more: 8 V D bytes where the BLAS adds, 12 V D in bfloat16 on AMD. So chunks cost time, and few are best.
"""

from common.errors import UsageError
from version3_triton.kernels.blocks import autocast_dtype, ceil_div, tile

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 1 << 27  # logits of a chunk: 256 MiB in 16 bits


@triton.jit
def _linear_cross_entropy_loss_and_gradient(
        logits_ptr, targets_ptr, losses_ptr, vocabulary, row_stride,
        GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program a row: its loss, and p - onehot in place of its logits."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    target = tl.load(targets_ptr + row)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total, chosen = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(logits_ptr + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
        chosen += tl.where(column == target, z, 0.0)
        new = tl.maximum(highest, z)
        base = tl.where(new == float("-inf"), 0.0, new)  # a lane that has seen no logit yet
        total = total * tl.exp(highest - base) + tl.exp(z - base)
        highest = new
    maximum = tl.max(highest, axis=0)
    lse = maximum + tl.log(tl.sum(total * tl.exp(highest - maximum), axis=0))
    tl.store(losses_ptr + row, lse - tl.sum(chosen, axis=0))
    if GRADIENT:
        for start in range(0, vocabulary, BLOCK):
            column = start + tl.arange(0, BLOCK)
            z = tl.load(logits_ptr + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
            dz = tl.exp(z - lse) - tl.where(column == target, 1.0, 0.0)
            tl.store(logits_ptr + column, dz.to(logits_ptr.dtype.element_ty), mask=column < vocabulary)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b in float32; in bfloat16 on AMD each product is rounded before it is added.

    FLOP counters fail at `out_dtype`: they are for runs in float32, as this repository's are.
    """
    if a.is_cuda and a.dtype != torch.float32 and not torch.version.hip:  # cuBLAS adds to a sum of another type itself
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    with torch.autocast(a.device.type, enabled=False):  # which would make float16 of it again
        if a.dtype == torch.float16:  # a sum over tokens that are not yet divided by N can exceed float16
            a, b = a.float(), b.float()
        if total is None:
            return (a @ b).float()
        return torch.addmm(total, a, b, out=total) if a.dtype == torch.float32 else total.add_(a @ b)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, learn: bool) -> Tensor:
        tokens, (vocabulary, hidden) = targets.numel(), weight.shape
        rows, matrix, targets = x.reshape(tokens, hidden).to(dtype), weight.to(dtype), targets.reshape(tokens).contiguous()
        losses = torch.empty(tokens, dtype=torch.float32, device=x.device)
        learn = learn and any(ctx.needs_input_grad)
        dx = torch.empty_like(rows) if learn else None
        dweight = None
        blocks = tile("cross_entropy", vocabulary, x.device)
        chunks = ceil_div(tokens, max(1, CHUNK_ELEMENTS // vocabulary))
        chunk = 16 * ceil_div(ceil_div(tokens, chunks), 16)  # alike, and every part aligned
        buffer = rows.new_empty(min(chunk, tokens), vocabulary)
        for start in range(0, tokens, chunk):
            part = slice(start, min(start + chunk, tokens))
            logits = torch.mm(rows[part], matrix.T, out=buffer[: part.stop - start])
            _linear_cross_entropy_loss_and_gradient[logits.shape[0],](
                logits, targets[part], losses[part], vocabulary, logits.stride(0),
                GRADIENT=learn, BLOCK=blocks.columns, num_warps=blocks.warps,
            )  # fmt: skip
            if learn:
                torch.mm(logits, matrix, out=dx[part])
                if chunk >= tokens and dtype != torch.float16:  # nothing to add to, and nothing that can overflow
                    dweight = logits.T @ rows
                else:
                    dweight = _add_product(dweight, logits.T, rows[part])
        if learn:
            ctx.save_for_backward(dx.view(x.shape), dweight)
            ctx.dtypes, ctx.tokens = (x.dtype, weight.dtype), tokens
        return losses.mean()

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss: Tensor):
        dx, dweight = ctx.saved_tensors
        factor = (dloss / ctx.tokens).reshape(1)  # 1 / N comes last: it would underflow in float16; a 0-d factor would be rounded
        x_dtype, weight_dtype = ctx.dtypes
        gradients = torch.empty_like(dx, dtype=x_dtype), torch.empty_like(dweight, dtype=weight_dtype)
        for sum_, gradient in zip((dx, dweight), gradients, strict=True):
            torch.mul(sum_, factor, out=gradient)
        return *gradients, None, None, None


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean over the tokens of -log softmax(x @ weight.T)[target], in nats, float32.

    Args:
        x: [B, S, D], the last hidden states.
        weight: [V, D].
        targets: [B, S], the tokens that follow, each in 0 .. V - 1.

    Raises:
        UsageError: there are no tokens.
    """
    if not targets.numel():
        raise UsageError("the loss is a mean over tokens, and there are none")
    dtype = autocast_dtype(x, torch.promote_types(x.dtype, weight.dtype))
    return _LinearCrossEntropy.apply(x, weight, targets, dtype, torch.is_grad_enabled())
