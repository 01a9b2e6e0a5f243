"""What a call of an ATen operator has to compute and to move, from the shapes and types that a trace records.

Bytes are the minimum: every input read once, every output written once, nothing kept in a cache from call to call and
nothing read twice. Two things are not in the shapes: a tensor that was expanded counts in full, though its memory is smaller,
and of a sum only what is read counts. FLOPs count a multiplication and an addition as two; functions (exp, rsqrt, division)
count one. Only for matrix products do FLOPs matter: everything else moves memory long before it computes.

Work is counted once, in the operator that does it. `aten::linear` calls `aten::matmul` calls `aten::mm`, and only
`mm` has a cost; operators that call others, make views or allocate cost (0, 0). They still take time: overhead. On a GPU
`aten::_scaled_dot_product_flash_attention` calls `aten::_flash_attention_forward`, which launches the kernel and has the
cost; the twin for the CPU does the work itself. What torch.compile makes (`CompiledFunction`, Triton kernels) has no cost here:
a trace does not record what it computes.

From cost and ceilings follows a lower bound of the time (Williams, Waterman and Patterson 2009, the roofline model),
with the time of one small operation as a third ceiling:

    seconds >= max(FLOPs / peak FLOP/s, bytes / peak bytes/s, seconds per operation)
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Shape = Sequence[int]

ELEMENT_BYTES = {
    "float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "long": 8, "int": 4, "short int": 2,
    "bool": 1, "unsigned char": 1, "signed char": 1,
}  # fmt: skip
LIST_ELEMENT_BYTES = 4  # an optimizer's: a trace records no types of the tensors in a list

# Operators whose output has the shape that their inputs broadcast to, and the FLOPs for each element of it.
ELEMENTWISE = dict.fromkeys(
    ("add", "sub", "rsub", "mul", "div", "neg", "abs", "pow", "sqrt", "rsqrt", "reciprocal", "exp", "log", "sin", "cos",
     "clamp_min", "relu", "threshold_backward", "where", "masked_fill", "eq", "ne", "lt", "le", "gt", "ge",
     "bitwise_not", "logical_not", "triu", "tril"), 1,
) | {  # fmt: skip
    "addcmul": 3, "addcdiv": 3, "lerp": 3, "sigmoid": 3, "silu": 4, "silu_backward": 7,
    "_softmax": 5, "_softmax_backward_data": 4, "_log_softmax": 5, "_log_softmax_backward_data": 4,
}  # fmt: skip
WRAPS_NUMBERS = ("add", "sub", "mul", "div")  # `x * 2` makes a tensor of the 2 and calls `mul` again, which does the work
REDUCTIONS = ("sum", "mean", "amax", "amin", "linalg_vector_norm")
MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
# The operators that launch fused attention, and whether q is [B, H, S, Dh] (else [B, S, H, Dh]); k and v alike.
ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": True,
    "_cudnn_attention": True,
    "_flash_attention": False,
    "_efficient_attention": False,
}
WORK_IN_OTHERS = frozenset((
    # views, allocation and bookkeeping
    "view", "_unsafe_view", "reshape", "_reshape_alias", "t", "transpose", "permute", "expand", "expand_as", "slice", "select",
    "narrow", "unsqueeze", "squeeze", "split", "split_with_sizes", "chunk", "unbind", "detach", "detach_", "alias", "unflatten",
    "flatten", "as_strided", "lift_fresh", "empty", "empty_like", "empty_strided", "resize_", "resolve_conj", "resolve_neg",
    "result_type", "promote_types", "item", "_local_scalar_dense", "broadcast_tensors",
    # operators that call others
    "linear", "matmul", "masked_fill", "to", "_to_copy", "clone", "contiguous", "softmax", "log_softmax", "cross_entropy_loss",
    "nll_loss", "nll_loss_nd", "embedding", "embedding_backward", "square", "ones", "zeros", "ones_like", "zeros_like", "full",
    "repeat_interleave", "index_put_", "scaled_dot_product_attention", "_fused_sdp_choice", "_scaled_dot_product_attention_math",
    *(f"_scaled_dot_product_{kernel}_attention" for kernel in ("flash", "efficient", "cudnn")),
    *(f"_scaled_dot_product_{kernel}_attention_backward" for kernel in ("flash", "efficient", "cudnn")),
))  # fmt: skip
COMPILER_FRAMES = ("TorchDynamo", "Torch-Compiled Region", "Pregraph bytecode", "AOTDispatcher")  # of torch.compile: no work
COMPOSITE_ON_CPU = ("aten::mean",)  # there it calls `sum` and `div_`; on a GPU it is a kernel of its own
# nodes of PyTorch's own operators, and two names from `traces.py`
_OVERHEAD = re.compile(r"\w+Backward\d+|torch::autograd::\w+|detach_?|autograd engine|redispatch")


def element_bytes(run: dict[str, Any]) -> int:
    """Bytes of a number in a run's precision."""
    return 4 if run["precision"]["compute"] == "fp32" else 2


def cost(name: str, shapes: Sequence, types: Sequence[str], element: int = 4) -> tuple[int, int] | None:
    """FLOPs and minimum bytes of one call.

    Args:
        name: as in the trace, such as `aten::mm`.
        shapes: of each argument; [] for numbers and scalar tensors, a list of shapes for a list of tensors.
        types: of each argument, such as `float`, `c10::BFloat16`, `Scalar`, `TensorList` or empty.
        element: bytes of a number in the run's precision, for `cat`, whose list of tensors has no types in a trace.

    Returns:
        (0, 0) for operators without work of their own; None for what is not known.
    """
    operator = name.removeprefix("aten::")
    if _OVERHEAD.fullmatch(name) or name.startswith(COMPILER_FRAMES) or (operator in WORK_IN_OTHERS and operator != name):
        return 0, 0
    if operator == name or not shapes:
        return None
    if operator in MATRIX_PRODUCTS:
        if types[0] not in ELEMENT_BYTES:
            return None
        flops, read, written = matrix_product(operator, shapes)
        return flops, (read + written) * ELEMENT_BYTES[types[0]]
    kernel, backward = operator.removesuffix("_forward").removesuffix("_backward"), operator.endswith("_backward")
    if kernel in ATTENTION:
        return _attention(shapes[1:3] if backward else shapes[:2], types[0], ATTENTION[kernel], backward)
    if operator == "_fused_adamw_":
        return _adamw(shapes[0])
    if operator.startswith("_foreach_"):
        return _foreach(operator.removeprefix("_foreach_"), shapes, types)
    if operator == "cat":
        return (0, 2 * sum(map(math.prod, shapes[0])) * element) if shapes[0] else None
    if operator.removesuffix("_") in WRAPS_NUMBERS and types[1] == "Scalar":
        return 0, 0
    tensors = [(shape, ELEMENT_BYTES[kind]) for shape, kind in zip(shapes, types, strict=True) if kind in ELEMENT_BYTES]
    return _one_output(operator, tensors) if tensors else None


def matrix_product(operator: str, shapes: Sequence[Shape]) -> tuple[int, int, int]:
    """FLOPs, elements read and elements written of [m, k] x [k, n] or [b, m, k] x [b, k, n]; addmm and baddbmm add to it."""
    *addend, left, right = shapes[:3] if operator in ("addmm", "baddbmm") else shapes[:2]
    output = math.prod(left[:-1]) * right[-1]
    return 2 * output * left[-1], sum(map(math.prod, (*addend, left, right))), output


def _attention(shapes: Sequence[Shape], kind: str, heads_first: bool, backward: bool) -> tuple[int, int] | None:
    """Causal attention that writes no [S, S] matrix (Dao et al. 2022, arXiv:2205.14135); `shapes` of q and k.

    Each product takes 2 Dh FLOPs for each of the S (S + 1) / 2 pairs of a head. Forward there are two (scores, weighted sum):
    q, k and v are read, the output and the fp32 log-sum-exp [B, H, S] written. Backward there are five (the scores again, the
    gradients of weights, v, q and k): all of these are read and the output's gradient, three gradients are written. A trace
    does not record whether a call was causal; all attention of this model is.
    """
    q, k = shapes
    if len(q) != 4 or kind not in ELEMENT_BYTES:
        return None
    length, rows = q[2] if heads_first else q[1], math.prod(q[:3])
    products, tensors = (5, 4) if backward else (2, 2)  # tensors of q's size, and as many of k's
    moved = tensors * (math.prod(q) + math.prod(k)) * ELEMENT_BYTES[kind] + 4 * rows
    return products * 2 * q[3] * rows * (length + 1) // 2, moved


def _adamw(parameters: Sequence[Shape]) -> tuple[int, int] | None:
    """One step of AdamW on all parameters: weight, gradient and two moments read, weight and moments written.

    FLOPs of each weight: decay 1, first moment 3, second 4, root, bias correction and epsilon 3, division, step size and
    subtraction 3. PyTorch records no shapes of a long list: None.
    """
    elements = sum(map(math.prod, parameters))
    return (14 * elements, 7 * elements * LIST_ELEMENT_BYTES) if elements else None


def _one_output(operator: str, tensors: list[tuple[Shape, int]]) -> tuple[int, int] | None:
    """Cost of an operator with one output tensor, from shape and element size of each input tensor."""
    first, size = tensors[0]
    elements = math.prod(first)
    read = sum(math.prod(shape) * each for shape, each in tensors)
    plain = operator.removesuffix("_")
    if plain in ELEMENTWISE:
        if operator != plain:  # in place
            return ELEMENTWISE[plain] * elements, read + elements * size
        output = math.prod(_broadcast([shape for shape, _ in tensors]))
        widest = max((each for shape, each in tensors if shape), default=size)  # scalar tensors do not widen a type
        return ELEMENTWISE[plain] * output, read + output * widest
    if operator in REDUCTIONS:
        return elements, read
    if operator == "copy_":
        return 0, read  # [target, source]: one is written, the other read
    if operator in ("fill_", "zero_"):
        return 0, elements * size
    if operator == "index_select":  # [table, indices]: one row for each index
        return 0, 2 * math.prod(tensors[-1][0]) * math.prod(first[1:]) * size
    if operator == "gather":  # [table, indices]: one element for each index
        return 0, 2 * math.prod(tensors[1][0]) * size
    if operator == "embedding_dense_backward":  # [gradient, indices]: each row is read, and added to a row of the table
        return elements, read + elements * size
    if operator == "_index_put_impl_":  # [table, values]: each row of values is read, and added to a row of the table
        values, size = tensors[-1]
        return math.prod(values), 2 * math.prod(values) * size
    if operator in ("nll_loss_forward", "nll_loss_backward"):  # one entry a row; `zero_` clears the rest of a gradient
        rows = math.prod(next(shape for shape, each in tensors if each == 8))
        return rows, rows * (8 + size)
    return None


def _broadcast(shapes: Sequence[Shape]) -> list[int]:
    """The shape that all broadcast to: aligned at the last dimension, the longest side of each."""
    rank = max(len(shape) for shape in shapes)
    padded = [[1] * (rank - len(shape)) + list(shape) for shape in shapes]
    return [max(sides) for sides in zip(*padded, strict=True)]


def _foreach(operator: str, shapes: Sequence, types: Sequence[str]) -> tuple[int, int] | None:
    """Operators on lists of tensors (optimizers). PyTorch records no shapes of lists that are long: None."""
    lists = [shape for shape, kind in zip(shapes, types, strict=True) if kind == "TensorList"]
    plain = operator.removesuffix("_")
    if plain not in ELEMENTWISE or not lists or not all(lists):
        return None
    numels = [sum(math.prod(shape) for shape in each) for each in lists]
    return ELEMENTWISE[plain] * numels[0], (sum(numels) + numels[0]) * LIST_ELEMENT_BYTES


def bound(flops: float, bytes_: float, ceilings: Mapping[str, float]) -> tuple[float, str]:
    """Seconds that a call takes at least, and which ceiling sets them: `compute`, `memory` or `launch`.

    Args:
        flops, bytes_: from `cost`.
        ceilings: flops_per_second, bytes_per_second and operation_seconds, from `common.training.ceilings.measure`.
    """
    return max(
        (flops / ceilings["flops_per_second"], "compute"),
        (bytes_ / ceilings["bytes_per_second"], "memory"),
        (ceilings["operation_seconds"], "launch"),
    )


class Work(NamedTuple):
    """Calls of a kernel that need not exist yet: how many, and what each computes and moves."""

    calls: float
    flops: float
    bytes: float

    def us(self, ceilings: Mapping[str, float]) -> float:
        """What one call takes at least for its work alone, without the cost of calling it."""
        return 1e6 * max(self.flops / ceilings["flops_per_second"], self.bytes / ceilings["bytes_per_second"])


def linear_products(calls: float, tokens: int, inputs: int, outputs: int, element: int) -> list[Work]:
    """The products of linear layers, with `element` bytes a number: forward, gradients of input and of weight."""
    sizes = ((tokens, inputs, outputs), (tokens, outputs, inputs), (outputs, tokens, inputs))
    return [Work(calls, 2 * m * k * n, element * (m * k + k * n + m * n)) for m, k, n in sizes]


class Row(NamedTuple):
    """One operator with one set of shapes in one span and phase of a profile; calls and us (self time) are per step."""

    name: str
    span: str
    phase: str
    shapes: str
    types: str
    calls: float
    us: float
    flops: int | None  # of one call, and so are bytes; None where the cost is not known
    bytes: int | None
    bound: str  # compute, memory, launch, unknown, or not classed (no ceilings)
    percent: float | None  # of the ceiling that a compute- or memory-bound operator reaches

    @property
    def works(self) -> bool:
        """Whether it computes or moves something; the others (views, autograd's nodes, allocation) are overhead."""
        return (self.flops, self.bytes) != (0, 0)

    def rate(self, amount: int | None, unit: float = 1.0) -> float | None:
        """FLOPs or bytes per second, in `unit`; None where there are none, or they are not known."""
        return amount * self.calls / self.us * 1e6 / unit if amount else None


def rows(profile: dict[str, Any]) -> list[Row]:
    """The operators of a profile (schema tiny-llama-profile/1) that took time, the longest first."""
    steps, ceilings, on_gpu = profile["profiled_steps"], profile["run"]["ceilings"], bool(profile["kernels"])
    element = element_bytes(profile["run"])
    result = []
    for record in profile["operators"]:
        us, calls = record["self_device_us" if on_gpu else "self_cpu_us"] / steps, record["calls"] / steps
        if us <= 0:
            continue
        known = cost(record["name"], json.loads(record["input_shapes"]), json.loads(record["input_types"]), element)
        if record["name"] in COMPOSITE_ON_CPU and not on_gpu:
            known = (0, 0)
        kind, percent = "not classed" if known else "unknown", None
        if ceilings and known:
            seconds, kind = bound(*known, ceilings)
            percent = None if kind == "launch" else 100 * seconds * 1e6 * calls / us
        place = (record[key] for key in ("name", "span", "phase", "input_shapes", "input_types"))
        result.append(Row(*place, calls, us, *(known or (None, None)), kind, percent))
    return sorted(result, key=lambda row: -row.us)
