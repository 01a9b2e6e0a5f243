"""FLOPs and minimum bytes of a call of an ATen operator, from the shapes and types that a trace
records.

Bytes are a minimum: every input is read once, every output is written once, and nothing stays in a
cache between calls. The shapes hide two things: a tensor that was expanded counts in full, though
its memory is smaller, and a sum counts only the bytes that it reads. A multiplication and an
addition count as two FLOPs; functions (exp, rsqrt, division) count as one. FLOPs matter only for
matrix products: all other operators are memory-bound.

Work is counted once, in the operator that does it. `aten::linear` calls `aten::matmul` calls
`aten::mm`, and only `mm` has a cost. Operators that call others, make views or allocate have the
cost (0, 0); the time that they take is overhead. On a GPU
`aten::_scaled_dot_product_flash_attention` calls `aten::_flash_attention_forward`, which launches
the kernel and has the cost; the counterpart for the CPU does the work itself. Code of torch.compile
(`CompiledFunction`, Triton kernels) has no known cost, because a trace does not record what it
computes.

Cost and ceilings give a lower bound on the time (Williams, Waterman and Patterson 2009, the
roofline model), with the time of one small operation as a third ceiling:

    seconds >= max(FLOPs / peak FLOP/s, bytes / peak bytes/s, seconds per operation)
"""

import itertools
import json
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from tracepage.records.fields import Ceilings
from tracepage.records.run_record import AnyRun
from tracepage.records.step_profile import Profile

Shape = Sequence[int]

ELEMENT_BYTES = {
    "float": 4,
    "double": 8,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "long int": 8,
    "long": 8,
    "int": 4,
    "short int": 2,
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
}
# In the lists of an optimizer; a trace does not record the types of tensors in a list.
LIST_ELEMENT_BYTES = 4

# FLOPs for each output element, of operators whose output has the shape that their inputs broadcast
# to.
ONE_FLOP = """
    add sub rsub mul div neg abs pow sqrt rsqrt reciprocal exp log sin cos clamp_min relu
    threshold_backward where masked_fill eq ne lt le gt ge bitwise_not logical_not triu tril
"""
ELEMENTWISE = dict.fromkeys(ONE_FLOP.split(), 1) | {
    "addcmul": 3,
    "addcdiv": 3,
    "lerp": 3,
    "sigmoid": 3,
    "silu": 4,
    "silu_backward": 7,
    "_softmax": 5,
    "_softmax_backward_data": 4,
    "_log_softmax": 5,
    "_log_softmax_backward_data": 4,
}
# `x * 2` makes a tensor of the 2 and calls `mul` again, which does the work
WRAPS_NUMBERS = ("add", "sub", "mul", "div")
REDUCTIONS = ("sum", "mean", "amax", "amin", "linalg_vector_norm")
MATRIX_PRODUCTS = {"mm": 2, "addmm": 2, "bmm": 3, "baddbmm": 3}  # Dimensions of the factors.
ADDS = ("addmm", "baddbmm")  # A matrix product is added to their first argument.
TENSOR_LIST = "TensorList"
# Operators, and their kernels.
COMMUNICATION = re.compile(r"nccl|rccl|^(?:gloo:|c10d::|record_param_comms)", re.IGNORECASE)
# Operators that launch fused attention: True if q is [B, H, S, Dh], False if it is [B, S, H, Dh]; k
# and v likewise.
ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": True,
    "_cudnn_attention": True,
    "_flash_attention": False,
    "_efficient_attention": False,
}
VIEWS_AND_BOOKKEEPING = """
    view _unsafe_view reshape _reshape_alias t transpose permute expand expand_as slice select
    narrow unsqueeze squeeze split split_with_sizes chunk unbind detach detach_ alias unflatten
    flatten as_strided lift_fresh empty empty_like empty_strided resize_ resolve_conj resolve_neg
    result_type promote_types item _local_scalar_dense broadcast_tensors
"""
CALLS_OTHERS = """
    linear matmul masked_fill to _to_copy clone contiguous softmax log_softmax cross_entropy_loss
    nll_loss nll_loss_nd embedding embedding_backward square ones zeros ones_like zeros_like full
    repeat_interleave index_put_ scaled_dot_product_attention _fused_sdp_choice
    _scaled_dot_product_attention_math
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
"""
WORK_IN_OTHERS = frozenset(VIEWS_AND_BOOKKEEPING.split() + CALLS_OTHERS.split())
# Frames of torch.compile do no work.
COMPILER_FRAMES = ("TorchDynamo", "Torch-Compiled Region", "Pregraph bytecode", "AOTDispatcher")
COMPOSITE_ON_CPU = ("aten::mean",)  # On a CPU it calls `sum` and `div_`; on a GPU it is a kernel.
# Autograd nodes of PyTorch's own operators, and two names from `chrome_trace`.
_OVERHEAD = re.compile(r"\w+Backward\d+|torch::autograd::\w+|detach_?|autograd engine|redispatch")


def element_bytes(run: AnyRun) -> int:
    """Bytes of a matrix element in a run's precision."""
    return 4 if run["precision"]["compute"] == "fp32" else 2


def cost(
    name: str, shapes: Sequence, types: Sequence[str], element: int = 4
) -> tuple[int, int] | None:
    """FLOPs and minimum bytes of one call.

    Args:
        name: as in the trace, such as `aten::mm`.
        shapes: of each argument; [] for numbers and scalar tensors, a list of shapes for a list of
            tensors.
        types: of each argument, such as `float`, `c10::BFloat16`, `Scalar`, `TensorList` or empty.
        element: bytes of an element in the run's precision, for `cat`, whose list of tensors has no
            types in a trace.

    Returns:
        FLOPs and bytes; (0, 0) for operators without work of their own; None where the cost is not
        known, as for shapes that the operator of PyTorch cannot have.
    """
    operator = name.removeprefix("aten::")
    is_aten = operator != name
    if _OVERHEAD.fullmatch(name) or name.startswith(COMPILER_FRAMES):
        return 0, 0
    if is_aten and operator in WORK_IN_OTHERS:
        return 0, 0
    if not is_aten or not shapes or not _consistent(shapes, types):
        return None
    kernel = operator.removesuffix("_forward").removesuffix("_backward")
    if operator in MATRIX_PRODUCTS or kernel in ATTENTION:
        first = int(operator in ADDS or operator.endswith("_backward"))
        factors = shapes[: first + 2]
        ranks = list(map(len, factors[first:]))
        rank = MATRIX_PRODUCTS.get(operator, 4)
        if ranks != [rank, rank] or not {*types[: first + 2]} <= {*ELEMENT_BYTES}:
            return None
        left, right = factors[first:]
        size = ELEMENT_BYTES[types[0]]
        if kernel in ATTENTION:
            return _attention(left, right, size, ATTENTION[kernel], bool(first))
        output = math.prod(left[:-1]) * right[-1]  # of [m, k] and [k, n], or with a batch before
        return 2 * output * left[-1], (sum(map(math.prod, factors)) + output) * size
    if operator in ("cat", "_fused_adamw_") or operator.startswith("_foreach_"):
        return _on_lists(operator, shapes, types, element)
    if operator.removesuffix("_") in WRAPS_NUMBERS and types[1:2] == ["Scalar"]:
        return 0, 0
    tensors = [
        (shape, ELEMENT_BYTES[kind])
        for shape, kind in zip(shapes, types, strict=True)
        if kind in ELEMENT_BYTES
    ]
    return _one_output(operator, tensors) if tensors else None


def _consistent(shapes: Sequence, types: Sequence[str]) -> bool:
    """Whether each argument has a type, each tensor one shape, and each list of tensors a list of
    shapes.
    """
    if len(shapes) != len(types):
        return False
    for shape, kind in zip(shapes, types, strict=True):
        sides = {type(side) for side in shape}
        if kind in ELEMENT_BYTES and not sides <= {int}:
            return False
        if kind == TENSOR_LIST and not sides <= {list}:
            return False
    return True


def _attention(q: Shape, k: Shape, size: int, heads_first: bool, backward: bool) -> tuple[int, int]:
    """Causal attention that writes no [S, S] matrix (Dao et al. 2022, arXiv:2205.14135).

    Each product takes 2 Dh FLOPs for each of the S (S + 1) / 2 pairs of a head. The forward pass
    has two products (scores, weighted sum): it reads q, k and v, and writes the output and the fp32
    log-sum-exp [B, H, S]. The backward pass has five (the scores again, the gradients of weights,
    v, q and k): it reads all of these and the gradient of the output, and writes three gradients. A
    trace does not record whether a call was causal; all attention in this model is.
    """
    length = q[2] if heads_first else q[1]
    rows = math.prod(q[:3])
    products, tensors = (5, 4) if backward else (2, 2)  # tensors of q's size, and as many of k's
    moved = tensors * (math.prod(q) + math.prod(k)) * size + 4 * rows
    return products * 2 * q[3] * rows * (length + 1) // 2, moved


def _on_lists(
    operator: str, shapes: Sequence, types: Sequence[str], element: int
) -> tuple[int, int] | None:
    """Operators on lists of tensors: `cat`, and those of optimizers. None for a long list, because
    PyTorch records no shapes of it.

    A step of AdamW reads weight, gradient and two moments, and writes weight and moments. Its FLOPs
    for each weight: decay 1, first moment 3, second moment 4, root, bias correction and epsilon 3,
    division, step size and subtraction 3.
    """
    lists = [shape for shape, kind in zip(shapes, types, strict=True) if kind == TENSOR_LIST]
    numels = [sum(map(math.prod, tensors)) for tensors in lists]
    plain = operator.removeprefix("_foreach_").removesuffix("_")
    if not lists or not numels[0]:
        return None
    if operator == "cat":
        return 0, 2 * numels[0] * element
    if operator == "_fused_adamw_":
        return 14 * numels[0], 7 * numels[0] * LIST_ELEMENT_BYTES
    if plain not in ELEMENTWISE or not all(lists):
        return None
    return ELEMENTWISE[plain] * numels[0], (sum(numels) + numels[0]) * LIST_ELEMENT_BYTES


def _one_output(operator: str, tensors: list[tuple[Shape, int]]) -> tuple[int, int] | None:
    """Cost of an operator with one output, from shape and element size of each input tensor."""
    first, size = tensors[0]
    last, last_size = tensors[-1]
    elements = math.prod(first)
    read = sum(math.prod(shape) * kind for shape, kind in tensors)
    plain = operator.removesuffix("_")
    if plain in ELEMENTWISE:
        if operator != plain:  # In place.
            return ELEMENTWISE[plain] * elements, read + elements * size
        # The output has the longest side of each dimension, aligned at the last.
        sides = itertools.zip_longest(*(reversed(shape) for shape, _ in tensors), fillvalue=1)
        output = math.prod(map(max, sides))
        # Scalar tensors do not widen a type.
        widest = max((kind for shape, kind in tensors if shape), default=size)
        return ELEMENTWISE[plain] * output, read + output * widest
    if operator in REDUCTIONS:
        return elements, read
    added = math.prod(last)
    targets = next((math.prod(shape) for shape, kind in tensors if kind == 8), 0)
    # One entry a row; `zero_` clears the rest of a gradient.
    nll_loss = targets, targets * (8 + size)
    costs = {
        "copy_": (0, read),  # [target, source]: one is written, the other read.
        "fill_": (0, elements * size),
        "zero_": (0, elements * size),
        # [table, indices]: one row, or one element, for each index.
        "index_select": (0, 2 * added * math.prod(first[1:]) * size),
        "gather": (0, 2 * added * size),
        # [gradient, indices]: each row is read, and added to a row of the table.
        "embedding_dense_backward": (elements, read + elements * size),
        # [table, values]: each row of values is read, and added to a row of the table.
        "_index_put_impl_": (added, 2 * added * last_size),
        "nll_loss_forward": nll_loss,
        "nll_loss_backward": nll_loss,
    }
    return costs.get(operator)


def least_seconds(flops: float, bytes_: float, ceilings: Ceilings) -> float:
    """A lower bound on the seconds for this work alone, without the launch of its kernels."""
    return max(flops / ceilings["flops_per_second"], bytes_ / ceilings["bytes_per_second"])


def bound(flops: float, bytes_: float, ceilings: Ceilings) -> tuple[float, str]:
    """A lower bound on the seconds of a call of this cost, and the ceiling that sets it: `compute`,
    `memory` or `launch`.
    """
    return max(
        (flops / ceilings["flops_per_second"], "compute"),
        (bytes_ / ceilings["bytes_per_second"], "memory"),
        (ceilings["operation_seconds"], "launch"),
    )


class IdealCalls(NamedTuple):
    """Calls of a kernel that need not exist: their number, and the FLOPs and bytes of each."""

    calls: float
    flops: float
    bytes: float


def linear_products(
    calls: float, tokens: int, inputs: int, outputs: int, element: int
) -> list[IdealCalls]:
    """The products of linear layers: forward, gradient of the input, gradient of the weight;
    `element` is bytes per element.
    """
    sizes = ((tokens, inputs, outputs), (tokens, outputs, inputs), (outputs, tokens, inputs))
    return [
        IdealCalls(calls, 2 * m * k * n, element * (m * k + k * n + m * n)) for m, k, n in sizes
    ]


class OperatorCalls(NamedTuple):
    """The calls of an operator with one set of shapes in one span and phase; calls and us (self
    time) are per step.
    """

    name: str
    span: str
    phase: str
    shapes: str
    types: str
    calls: float
    us: float
    flops: int | None  # Of one call; None where the cost is not known.
    bytes: int | None  # Of one call.
    bound: str  # compute, memory, launch (on a CPU: call), unknown, not classed (no ceilings)
    percent: float | None  # What a compute- or memory-bound operator reaches of the ceiling.

    @property
    def works(self) -> bool:
        """Whether it computes or moves data; all others (views, autograd nodes, allocations) are
        overhead.
        """
        return (self.flops, self.bytes) != (0, 0)

    def rate(self, amount: int | None) -> float | None:
        """FLOPs or bytes per second; None where they are zero or not known."""
        return amount * self.calls / self.us * 1e6 if amount else None


def sums(calls: Sequence[OperatorCalls]) -> tuple[float, float, float, float]:
    """Calls, seconds, FLOPs and bytes of a mean step; a cost that is not known counts as 0."""
    number = sum(row.calls for row in calls)
    seconds = sum(row.us for row in calls) / 1e6
    flops = sum(row.calls * (row.flops or 0) for row in calls)
    return number, seconds, flops, sum(row.calls * (row.bytes or 0) for row in calls)


def rows(profile: Profile) -> list[OperatorCalls]:
    """The operators of a profile that took time, the longest first."""
    steps = profile["profiled_steps"]
    ceilings = profile["run"]["ceilings"]
    on_gpu = bool(profile["kernels"])
    element = element_bytes(profile["run"])
    result = []
    for record in profile["operators"]:
        us = record["self_device_us" if on_gpu else "self_cpu_us"] / steps
        if us <= 0:
            continue
        calls = record["calls"] / steps
        shapes = record["input_shapes"]
        types = record["input_types"]
        known = cost(record["name"], json.loads(shapes), json.loads(types), element)
        if record["name"] in COMPOSITE_ON_CPU and not on_gpu:
            known = (0, 0)
        kind = "not classed" if known else "unknown"
        percent = None
        if ceilings and known:
            seconds, kind = bound(*known, ceilings)
            percent = 100 * seconds * 1e6 * calls / us
        if kind == "launch":
            kind = "launch" if on_gpu else "call"
            percent = None
        flops, moved = known or (None, None)
        place = (record["name"], record["span"], record["phase"])
        result.append(OperatorCalls(*place, shapes, types, calls, us, flops, moved, kind, percent))
    return sorted(result, key=lambda row: -row.us)
