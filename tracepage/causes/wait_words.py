"""Words about the causes of a step: what each is, and what people do about it."""

import re

# Subject and verb of the verdict, and the cure.
WORDS = {
    "copy_to_device": (
        "The GPU waits for copies from the host",
        "Copy from pinned memory with `non_blocking=True`, on a stream of its own, while the step "
        "before computes; or keep the data on the GPU.",
    ),
    "copy_to_host": (
        "The GPU waits for copies to the host",
        "Copy less often, or into pinned memory with `non_blocking=True` on a stream of its own.",
    ),
    "communication": (
        "The GPU waits for communication between GPUs",
        "Overlap it with the backward pass, or send fewer bytes. A rank that is late makes the "
        "others wait.",
    ),
    "input": (
        "The GPU waits for input",
        "Load ahead: more `num_workers` with `pin_memory=True`, or data prepared before training.",
    ),
    "synchronization": (
        "The GPU waits for the host after synchronizations",
        "Keep values on the device, and read them seldom, after the loop: no `.item()`, `print` or "
        "`nonzero` of a tensor, no blocking copy in a step.",
    ),
    "allocation": (
        "The GPU waits for memory to be allocated or freed",
        "Let shapes repeat, set `PYTORCH_ALLOC_CONF=expandable_segments:True` (older PyTorch: "
        "`PYTORCH_CUDA_ALLOC_CONF`), and call no `torch.cuda.empty_cache()` in a step.",
    ),
    "compilation": (
        "The GPU waits for code to be compiled or loaded",
        "Profile later steps; where each step compiles, find the recompilations with "
        "`TORCH_LOGS=recompiles`, and mark changing sizes as dynamic.",
    ),
    "cpu_operators": (
        "The GPU waits for operators on the CPU",
        "Move the tensors to the GPU, or do this work before the step.",
    ),
    "saving": (
        "The GPU waits while a checkpoint is saved",
        "Save less often, or asynchronously: copy into pinned memory, and write in another thread.",
    ),
    "host": (
        "The GPU waits for the host, which is in no operator (plain Python, or another thread)",
        "Often it prepares data. Find this code with `with_stack=True` or a sampling profiler such "
        "as py-spy, and take it out of the step.",
    ),
    "launches": (
        "The GPU waits for launches, each of which takes longer than the kernel before",
        'Capture the step as a graph (`torch.compile(mode="reduce-overhead")`), fuse kernels, or '
        "give each more work (a larger batch).",
    ),
    "unknown": (
        "The GPU waits, and the file does not tell for what",
        "Profile with torch.profiler, with activities of the CPU and the GPU.",
    ),
}
# What people do about the largest kind of work.
WORK = {
    "matrix products": "Use sizes that are multiples of 64 for matrix products, and perhaps FP8.",
    "attention": "Attention is fused already: what is left is a lower precision, or fewer keys.",
    "convolutions": "Use a lower precision, `channels_last`, and cuDNN's benchmark mode.",
    "elementwise": "Fuse elementwise kernels (`torch.compile`), or move fewer bytes.",
    "reductions": "Fuse reductions with what is before and after them: bytes limit them.",
    "copies": "Avoid copies of layout and type: keep one layout, and fuse casts into kernels.",
    "small grids": "Small grids fill under half of the GPU: use a larger batch, or fuse them.",
    "between kernels": "The GPU passes from one short kernel to the next: fuse them.",
    "other": "No kind of work is known for these kernels.",
}
# The same where the place tells more: patterns of `NAME: PLACE`.
PLACES = {
    r"allocation: (cuda|hip)Free(,| \()": "A free outside of all operators is usually "
    "`torch.cuda.empty_cache()`: do not call it in a step.",
    r"input: .*_SingleProcess": "`num_workers` is 0: load ahead with more and `pin_memory=True`, "
    "or prepare data before training.",
    r"unknown: before a kernel that .* had launched": "The host had launched these kernels: either "
    "they wait for another stream or GPU, or the profiler holds the GPU up.",
    r"unknown: a profile": "Make the page with the profile's trace beside it.",
    r"launches: .* beside graphs": "Kernels are launched as graphs already: put more of the "
    "step into them, or give each kernel more work (a larger batch).",
    r"launches: .* in optimizer": "Update all parameters in few launches (`fused=True`, in AdamW, "
    "Adam and SGD), then capture the step as a graph.",
    r"matrix products: .*((?<!fp16_)sgemm|tf32|f32f32_f32|_S_?B_)": "Run matrix products in bf16, "
    "with sizes that are multiples of 64.",
}
# How far the profiler disturbs; {} is the number of launches in a step.
OF_PROFILER = " Without the profiler these waits are shorter: it slows each of {:,.0f} launches."
SLOWED = ("launches", "synchronization", "cpu_operators", "host")


def subject(cause: str, has_operators: bool) -> str:
    """Subject and verb of the verdict."""
    if cause == "host" and not has_operators:
        return "The GPU waits for the host, and the file has no operators that tell what it does"
    return WORDS[cause][0]


def cure(name: str, place: str) -> str:
    """What people do about a cause or a kind of work."""
    for pattern, words in PLACES.items():
        if re.match(pattern, f"{name}: {place}"):
            return words
    return WORK.get(name) or WORDS[name][1]


def share(part: float) -> str:
    """0.36 -> "36 %"."""
    return f"{100 * part:.0f} %"
