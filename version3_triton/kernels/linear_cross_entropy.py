"""The loss straight from hidden states and the head's weight, without all logits in memory at once.

With z = x W^T for a token (x [D], W [V, D]), target t, m = max z and s = sum_v exp(z_v - m), for N
tokens that count:

    loss = mean (log s - (z_t - m))        dz = (exp(z - m) / s - onehot(t)) / N
    dx = dz W                              dW = sum dz^T x

m and log s stay apart: their sum, rounded at the size of the logits, would lose the digits that a
confident token's loss is made of. A token with target -100 does not count: its dz is 0.

Tokens go in chunks. For a chunk the product gives its logits, one kernel turns each row into its
loss and, in place, N dz (online softmax: one pass for maximum and sum, one to write), and two
products give N dx and the chunk's part of N dW. So the backward pass happens inside the forward:
only these are kept, and scaled by the incoming gradient over N. This is Liger-Kernel's idea (Hsu et
al. 2024, arXiv:2410.10989).

Memory: the eager version holds logits, their float32 log-softmax and its gradient, at least 3 N V
numbers; this one N V / chunks, N D for dx, and V D for dW from the forward to the backward pass,
which writes its result beside it; a dW of several chunks, or in float16, is in float32. FLOPs are
the same 6 N D V. dW's sum is in a fixed order. Each chunk after the first reads and writes it once
more: 8 V D bytes where the BLAS adds, otherwise 12 V D in bfloat16. So chunks cost time, and few
are best.
"""

from common.precision import adds_in_float32, products_dtype
from tracepage.errors import UsageError
from version3_triton.kernels.checks import checked
from version3_triton.kernels.launch_sizes import ceil_div, tile
from version3_triton.kernels.memory import read

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 1 << 27  # logits of a chunk: 256 MiB in 16 bits
IGNORE_INDEX = tl.constexpr(-100)  # the target of a token that does not count, as in PyTorch
COUNT = tl.constexpr(512)  # Targets counted at a time: more would take registers from all programs.


@triton.jit
def _linear_cross_entropy_loss_and_gradient(
    logits_ptr,  # [chunk, V]: z, then N dz
    targets_ptr,  # [N]
    negative_losses_ptr,  # [N], float32
    classes_ptr,  # [N], int64
    scale_ptr,  # [1], float32: 1 / N
    first,  # the chunk's first token
    tokens,  # N, all of them
    vocabulary,  # V
    row_stride,  # elements between rows of logits
    GRADIENT: tl.constexpr,  # whether to write N dz and 1 / N
    BLOCK: tl.constexpr,  # logits at a time
):
    """A program a row: its loss, negated, and p - onehot in place of its logits. The first writes 1
    / N too.

    A token's class is 0 if it counts, and otherwise its target: -100, or one that is no token's id.
    """
    row = tl.program_id(0).to(tl.int64)
    token = first + row
    logits_ptr += row * row_stride
    target = tl.load(targets_ptr + token)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    chosen = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = read(logits_ptr + column, column < vocabulary, float("-inf"))
        chosen += tl.where(column == target, z, 0.0)
        new = tl.maximum(highest, z)
        base = tl.where(new == float("-inf"), 0.0, new)  # a lane that has seen no logit yet
        total = total * tl.exp(highest - base) + tl.exp(z - base)
        highest = new
    maximum = tl.max(highest, axis=0)
    normalizer = tl.sum(total * tl.exp(highest - maximum), axis=0)
    known = (target >= 0) & (target < vocabulary)
    tl.store(negative_losses_ptr + token, (tl.sum(chosen, axis=0) - maximum) - tl.log(normalizer))
    tl.store(classes_ptr + token, tl.where(known, 0, target))
    if GRADIENT:
        if token == 0:
            counted = tl.zeros((COUNT,), tl.int32)
            for start in range(0, tokens, COUNT):
                place = start + tl.arange(0, COUNT)
                other = tl.load(targets_ptr + place, mask=place < tokens, other=IGNORE_INDEX)
                counted += (other != IGNORE_INDEX).to(tl.int32)
            tl.store(scale_ptr, 1.0 / tl.maximum(tl.sum(counted, axis=0), 1))
        inverse = tl.where(
            known, 1.0 / normalizer, tl.where(target == IGNORE_INDEX, 0.0, float("nan"))
        )
        for start in range(0, vocabulary, BLOCK):
            column = start + tl.arange(0, BLOCK)
            z = read(logits_ptr + column, column < vocabulary, float("-inf"))
            dz = tl.exp(z - maximum) * inverse - tl.where(column == target, 1.0, 0.0)
            tl.store(logits_ptr + column, dz, mask=column < vocabulary)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b in float32; where the BLAS cannot write float32, a product in bfloat16 is
    rounded before it is added.

    FLOP counters fail at `out_dtype`: they are for runs in float32, as this repository's are.
    """
    if a.dtype != torch.float32 and adds_in_float32(a.device):
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    with torch.autocast(a.device.type, enabled=False):  # which would make float16 of it again
        # A sum over tokens that is not yet divided by N can exceed float16.
        if a.dtype == torch.float16:
            a = a.float()
            b = b.float()
        if total is None:
            return (a @ b).float()
        return (
            torch.addmm(total, a, b, out=total) if a.dtype == torch.float32 else total.add_(a @ b)
        )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, learn: bool
    ) -> Tensor:
        tokens = targets.numel()
        vocabulary, hidden = weight.shape
        rows = x.reshape(tokens, hidden).to(dtype)
        matrix = weight.to(dtype)
        targets = targets.reshape(tokens).contiguous()
        negative_losses, scale = (
            torch.empty(shape, dtype=torch.float32, device=x.device) for shape in ((tokens, 1), 1)
        )
        classes = torch.empty(tokens, dtype=torch.long, device=x.device)
        learn = learn and any(ctx.needs_input_grad)
        dx = torch.empty_like(rows) if learn else None
        dweight = None
        blocks = tile("cross_entropy", vocabulary, x.device)
        chunks = ceil_div(tokens, max(1, CHUNK_ELEMENTS // vocabulary))
        chunk = 16 * ceil_div(ceil_div(tokens, chunks), 16)  # Chunks are alike and aligned.
        buffer = rows.new_empty(min(chunk, tokens), vocabulary)
        for start in range(0, tokens, chunk):
            part = slice(start, min(start + chunk, tokens))
            logits = torch.mm(rows[part], matrix.T, out=buffer[: part.stop - start])
            _linear_cross_entropy_loss_and_gradient[logits.shape[0],](
                logits,
                targets,
                negative_losses,
                classes,
                scale,
                start,
                tokens,
                vocabulary,
                logits.stride(0),
                GRADIENT=learn,
                BLOCK=blocks.columns,
                num_warps=blocks.warps,
            )
            if dx is not None:
                torch.mm(logits, matrix, out=dx[part])
                # There is nothing to add to, and nothing can overflow.
                if chunk >= tokens and dtype != torch.float16:
                    dweight = logits.T @ rows
                else:
                    dweight = _add_product(dweight, logits.T, rows[part])
        if dx is not None:
            ctx.save_for_backward(dx.view(x.shape), dweight, scale)
            ctx.dtypes = x.dtype, weight.dtype
        # This is one kernel, which also refuses classes.
        return F.nll_loss(negative_losses, classes, ignore_index=IGNORE_INDEX.value)

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss: Tensor):
        dx, dweight, scale = ctx.saved_tensors
        # [1]. 1 / N comes last: it would underflow in float16; a 0-d factor would be rounded
        factor = dloss * scale
        x_dtype, weight_dtype = ctx.dtypes
        gradients = (
            torch.empty_like(dx, dtype=x_dtype),
            torch.empty_like(dweight, dtype=weight_dtype),
        )
        for sum_, gradient in zip((dx, dweight), gradients, strict=True):
            torch.mul(sum_, factor, out=gradient)
        return *gradients, None, None, None


@checked
def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean over the tokens of -log softmax(x @ weight.T)[target], in nats, float32; nan where no
    token counts.

    Args:
        x: [B, S, D], the last hidden states.
        weight: [V, D].
        targets: [B, S], the tokens that follow, each in 0 .. V - 1, or -100 for a token that does
            not count.

    Raises:
        UsageError: there are no tokens, D or V is 0, or the shapes don't fit.
        IndexError: another target, on a CPU. On a GPU PyTorch's kernel, which takes the mean,
            asserts on the device; where PyTorch is built without such assertions, as for ROCm, the
            gradient is nan.
    """
    if weight.ndim != 2 or not weight.numel() or x.shape != (*targets.shape, weight.shape[1]):
        shapes = [[*tensor.shape] for tensor in (x, weight, targets)]
        raise UsageError(
            "the loss takes x [B, S, D], a weight [V, D] and targets [B, S], V and D at least 1, "
            f"not {shapes}"
        )
    if not targets.numel():
        raise UsageError("the loss is a mean over tokens, and there are none")
    dtype = products_dtype(x, torch.promote_types(x.dtype, weight.dtype))
    return _LinearCrossEntropy.apply(x, weight, targets, dtype, torch.is_grad_enabled())
