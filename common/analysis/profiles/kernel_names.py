"""What kind of work a kernel does, by its name: of PyTorch and its libraries on NVIDIA and AMD, and of ATen operators."""

import re

from common.analysis.formulas import operators

# The first pattern that is found in a name counts. torch.compile names its Triton kernels after all that they replace, so their
# prefixes come first; a library's attention kernel can have `cutlass` in its name, so attention comes before matrix products.
PATTERNS = (
    ("elementwise", re.compile(r"^triton_(poi|for)_")),
    ("elementwise", re.compile(r"^_(rope|swiglu)_")),  # of Version 3, whose norms and attention the patterns below know
    ("reductions", re.compile(r"^_linear_cross_entropy_")),
    ("reductions", re.compile(r"^triton_(red|per)_")),
    ("attention", re.compile(r"[Aa]ttention|flash_(fwd|bwd)|[Ff]mha|sdpa|attn_(fwd|bwd)")),
    ("attention", re.compile(r"^bwd_(kernel_(dk_dv|dq|fuse)|preprocess)")),  # of AOTriton, in ROCm builds of PyTorch
    ("matrix products", re.compile(r"[Gg]emm|gemv|Cijk_|cutlass|nvjet|splitK|^triton_tem_fused_(add)?(mm|bmm)")),
    ("reductions", re.compile(r"[Ss]oft_?[Mm]ax|[Nn]orm(?!al)|nll_loss|reduce_kernel")),
    ("copies", re.compile(r"Mem(cpy|set)|rocclr_(copy|fill)|copy_kernel|CatArray|FillFunctor|CopyFunctor")),
    ("copies", re.compile(r"gather_kernel|gpu_index_kernel")),
    ("elementwise", re.compile(r"elementwise|multi_tensor_apply|_fused_adam|triu_tril")),
)
ATEN = {
    **dict.fromkeys(("copy", "cat", "fill", "zero", "index", "index_select", "gather", "index_put", "_index_put_impl"), "copies"),
    **dict.fromkeys(operators.ELEMENTWISE, "elementwise"),
    **dict.fromkeys(operators.REDUCTIONS, "reductions"),
    **dict.fromkeys(operators.MATRIX_PRODUCTS, "matrix products"),
}


def kind(name: str) -> str:
    """One of

    matrix products
    attention          fused kernels of it
    reductions         sums, norms, softmax, losses
    elementwise
    copies             also fills, and reads and writes by index
    other              all else, and what is not known
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
    """A kernel's name for a table; the data keeps the full one.

    Return type, namespaces, parameters and leading template arguments that are numbers or plain types are left out, so that
    what tells PyTorch's kernels from each other fits into `width`: `elementwise_kernel<BinaryFunctor<MulFunctor<float>>>`.
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
