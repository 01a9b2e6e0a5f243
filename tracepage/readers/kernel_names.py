"""Kinds and short names of kernels: those of PyTorch and its libraries on NVIDIA and AMD, and ATen
operators.
"""

import functools
import re
from collections.abc import Mapping

from tracepage.cost import operators

# The first pattern that is found in a kernel's own name decides. torch.compile names a Triton
# kernel after all operators that it replaces, so its prefixes come first. A library's attention or
# convolution can have `gemm` in its name, so both come before matrix products.
PATTERNS = (
    ("communication", operators.COMMUNICATION),
    (
        "communication",
        r"all_?reduce|all_?gather|all_?to_?all|reduce_?scatter|^cross_device_reduce|^two_shot"
        r"|^nvshmem",
    ),
    ("elementwise", r"^triton_(poi|for)_"),
    # Versions 3 and 4; the patterns below match their norms and attention.
    ("elementwise", r"^_(rope|swiglu)_|^_(rotate|swiglu|swiglu_backward|adamw|quantize)$"),
    ("reductions", r"^_(linear_)?cross_entropy|^_embedding_backward$"),
    ("matrix products", r"^_matmul(_ogs|_norm|$)"),
    ("reductions", r"^triton_(red|per)_"),
    (
        "attention",
        r"[Aa]ttention|[Ff]lash_?([Aa]ttn|fwd|bwd)|[Ff]mha|sdpa|attn_(fwd|bwd)|compute_dot_do_o"
        r"|convert_dq",
    ),
    # AOTriton, in ROCm builds of PyTorch, and others.
    (
        "attention",
        r"^bwd_(kernel_(dk_dv|dq|fuse)|preprocess)|^sage_fwd|^mla_(decode|prefill|fwd)|kernel_mha",
    ),
    (
        "convolutions",
        r"scudnn|[Cc]onvolv|implicit_gemm|(fprop|[dw]grad)_optimized|miopenSp3AsmConv|[Cc]onv\dd"
        r"|(^|_)conv_|igemm_",
    ),
    (
        "matrix products",
        r"[Gg]emm|gemv|MatMul|Cijk_|cutlass|nvjet|[sS]plitK(?!ernel)|^bmm_"
        r"|^triton_tem_fused_(add)?(mm|bmm)",
    ),
    ("reductions", r"[Ss]oft_?[Mm]ax|[Nn]orm(?!al)|nll_loss|reduce_kernel"),
    (
        "copies",
        r"Mem(cpy|set)|rocclr_(copy|fill)|copy_kernel|CatArray|FillFunctor|CopyFunctor"
        r"|reshape_and_cache|gather_kernel|gpu_index_kernel|indexSelect(Large|Small)Index"
        r"|batched_transpose_|^permute_|^transpose_|_to_(jagged|padded|dense)|bucketize",
    ),
    # Sums of rows by index.
    ("reductions", r"embedding_backward|compute_grad_weight|sum_and_scatter|^onesweep_iteration"),
    (
        "elementwise",
        r"elementwise|multi_tensor_apply|_fused_adam|triu_tril|act_and_mul|[Rr]otary|^SubTensorOp",
    ),
    ("copies", r"^\w*embedding"),
)
COPY = re.compile(r"Memcpy|__amd_rocclr_copyBuffer")
FILL = re.compile(r"Memset|__amd_rocclr_fillBuffer")
# Functions that run another one, which their template arguments name.
GENERIC = re.compile(
    r"elementwise_kernel|multi_tensor_apply|^[Kk]ernel\d?$|^device_kernel$|^kentry$"
    r"|^trampoline_kernel$"
)
# A library whose name says what only a few of its kernels do.
FBGEMM = re.compile(r"fbgemm(_gpu)?(::|_)?", re.IGNORECASE)
OTHERS = 0.2  # A share of the time.
LISTED = 5  # A number of kernels.
COPIES = ("copy", "cat", "fill", "zero", "index", "index_select", "gather", "index_put")
ATEN = {
    **dict.fromkeys((*COPIES, "_index_put_impl"), "copies"),
    **dict.fromkeys(operators.ELEMENTWISE, "elementwise"),
    **dict.fromkeys(operators.REDUCTIONS, "reductions"),
    **dict.fromkeys(operators.MATRIX_PRODUCTS, "matrix products"),
}


@functools.cache
def kind(name: str) -> str:
    """The kind of work that a kernel or an ATen operator does: matrix products, convolutions,
    communication (collectives), attention (fused kernels), reductions (sums, norms, softmax,
    losses), elementwise, copies (also fills, and reads and writes by index), or other (all other
    kernels, known or not).

    The function's own name decides, without namespaces, template arguments and types of parameters;
    of GENERIC functions the template arguments too. The library FBGEMM has few products.
    """
    function = FBGEMM.sub("", own_name(name))
    if GENERIC.search(function):
        function, _, arguments = _without_parameters(name).partition("<")
        function += NAMESPACE.sub("", arguments)
    for work, pattern in PATTERNS:
        if re.search(pattern, function):
            return work
    operator = name.removeprefix("aten::")
    if operator == name:
        return "other"
    return ATEN.get(operator.removeprefix("_foreach_").removesuffix("_"), "other")


def category(name: str) -> str:
    """`memcpy`, `memset` or `kernel`; some sources list copies and fills among the kernels."""
    if COPY.match(name):
        return "memcpy"
    return "memset" if FILL.match(name) else "kernel"


def communication_or(name: str, other: str) -> str:
    """ "communication" if an operator or a kernel of this name is a collective, else `other`."""
    return "communication" if kind(name) == "communication" else other


def unknown(times: Mapping[str, float]) -> str:
    """Where kernels of the kind `other` take more than OTHERS of the time: their share, and the
    names of the longest.
    """
    others = {name: time for name, time in times.items() if kind(name) == "other"}
    share = sum(others.values()) / (sum(times.values()) or 1.0)
    longest = sorted(others, key=lambda name: -others[name])
    named = ", ".join(short_name(name, 40) for name in longest[:LISTED])
    return f"{100 * share:.0f} % of the time, most of it in {named}" if share > OTHERS else ""


def own_name(name: str) -> str:
    """A kernel's name without return type, namespaces, template arguments and parameters; an
    operator's as it is.
    """
    whole = _without_parameters(name)
    if whole == name and "<" not in name:
        return name
    removed = 1
    while removed:
        whole, removed = re.subn(r"<[^<>()]*>|\([^<>()]*\)", "", whole)
    return whole.partition("<")[0].rpartition("::")[
        2
    ]  # A name that was cut off has a bracket left.


def _without_parameters(name: str) -> str:
    """The name without return type and parameters."""
    name = re.sub(
        r" [\[(](clone )?\.kd[\])]$|\.kd$|\(anonymous namespace\)::|<unnamed>::", "", name
    )
    start = depth = 0
    for i, character in enumerate(name):
        if character == "(" and not depth and name[i - 1 : i] not in ("", " "):  # the parameters
            return name[start:i]
        if character == " " and not depth:
            start = i + 1
        depth += (character in "<(") - (character in ">)")
    return name.removeprefix("void ")


NAME_WIDTH = 70
NAMESPACE = re.compile(r"\b[A-Za-z_]\w*::")
PLAIN_ARGUMENTS = re.compile(
    r"(?<=<)((\d+u?l?|true|false|bool|char|int|long|float|double|Half|BFloat16|unsigned \w+), )+"
)


@functools.cache
def short_name(name: str, width: int = NAME_WIDTH) -> str:
    """A kernel's name for a table; CSV and JSON files keep the full name.

    The part that tells PyTorch's kernels apart must fit into `width`:
    `elementwise_kernel<BinaryFunctor<MulFunctor<float>>>`. Therefore return type, namespaces,
    parameters, and leading template arguments that are numbers or plain types are left out.
    """
    short = _without_parameters(name)
    if short != name and "(" in name:
        short = PLAIN_ARGUMENTS.sub("", NAMESPACE.sub("", short)).replace(" >", ">")
    return short if len(short) <= width else short[: width - 3] + "..."
