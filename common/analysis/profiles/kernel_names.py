"""Kinds and short names of kernels: those of PyTorch and its libraries on NVIDIA and AMD, and ATen operators."""

import re

from common.analysis.formulas import operators

# The first pattern that matches a name decides. torch.compile names a Triton kernel after all operators that it replaces, so its
# prefixes come first. A library's attention kernel can have `cutlass` in its name, so attention comes before matrix products.
PATTERNS = (
    ("communication", operators.COMMUNICATION),
    ("elementwise", re.compile(r"^triton_(poi|for)_")),
    ("elementwise", re.compile(r"^_(rope|swiglu)_")),  # Version 3; the patterns below match its norms and attention
    ("elementwise", re.compile(r"^_(rotate|swiglu|swiglu_backward|adamw|quantize)$")),  # Version 4; likewise
    ("reductions", re.compile(r"^_(linear_)?cross_entropy|^_embedding_backward$")),
    ("matrix products", re.compile(r"^_matmul(_ogs|_norm|$)")),
    ("reductions", re.compile(r"^triton_(red|per)_")),
    ("attention", re.compile(r"[Aa]ttention|flash_(fwd|bwd)|[Ff]mha|sdpa|attn_(fwd|bwd)|compute_dot_do_o|convert_dq")),
    ("attention", re.compile(r"^bwd_(kernel_(dk_dv|dq|fuse)|preprocess)")),  # AOTriton, in ROCm builds of PyTorch
    ("matrix products", re.compile(r"[Gg]emm|gemv|Cijk_|cutlass|nvjet|[sS]plitK|^triton_tem_fused_(add)?(mm|bmm)")),
    ("reductions", re.compile(r"[Ss]oft_?[Mm]ax|[Nn]orm(?!al)|nll_loss|reduce_kernel")),
    ("copies", re.compile(r"Mem(cpy|set)|rocclr_(copy|fill)|copy_kernel|CatArray|FillFunctor|CopyFunctor")),
    ("copies", re.compile(r"gather_kernel|gpu_index_kernel|indexSelect(Large|Small)Index|batched_transpose_")),
    ("reductions", re.compile(r"rocprim|embedding_backward|compute_grad_weight|sum_and_scatter")),  # sums of rows by index
    ("elementwise", re.compile(r"elementwise|multi_tensor_apply|_fused_adam|triu_tril")),
)
ATEN = {
    **dict.fromkeys(("copy", "cat", "fill", "zero", "index", "index_select", "gather", "index_put", "_index_put_impl"), "copies"),
    **dict.fromkeys(operators.ELEMENTWISE, "elementwise"),
    **dict.fromkeys(operators.REDUCTIONS, "reductions"),
    **dict.fromkeys(operators.MATRIX_PRODUCTS, "matrix products"),
}


def kind(name: str) -> str:
    """The kind of work that a kernel or an ATen operator does: matrix products, communication (collectives of NCCL and RCCL),
    attention (fused kernels), reductions (sums, norms, softmax, losses), elementwise, copies (also fills, and reads and writes by
    index), or other (all other kernels, known or not).
    """
    for found, pattern in PATTERNS:
        if pattern.search(name):
            return found
    if not name.startswith("aten::"):
        return "other"
    return ATEN.get(name.removeprefix("aten::").removeprefix("_foreach_").removesuffix("_"), "other")


NAME_WIDTH = 70
PLAIN_ARGUMENTS = re.compile(r"(?<=<)((\d+u?l?|true|false|bool|char|int|long|float|double|Half|BFloat16|unsigned \w+), )+")


def short_name(name: str, width: int = NAME_WIDTH) -> str:
    """A kernel's name for a table; CSV and JSON files keep the full name.

    The part that distinguishes PyTorch's kernels must fit into `width`: `elementwise_kernel<BinaryFunctor<MulFunctor<float>>>`.
    Therefore return type, namespaces, parameters, and leading template arguments that are numbers or plain types are left out.
    """
    name = re.sub(r" [\[(](clone )?\.kd[\])]$|\.kd$|\(anonymous namespace\)::|<unnamed>::", "", name)
    start = depth = 0
    for i, character in enumerate(name):
        if character == "(" and not depth and name[i - 1 : i] not in ("", " "):  # the parameters
            name = PLAIN_ARGUMENTS.sub("", re.sub(r"\b[A-Za-z_]\w*::", "", name[start:i])).replace(" >", ">")
            break
        if character == " " and not depth:
            start = i + 1
        depth += (character in "<(") - (character in ">)")
    return name if len(name) <= width else name[: width - 3] + "..."
