"""Words about the causes of a step: what each is, and what people do about it."""

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
        "Call no `torch.cuda.empty_cache()` in a step, let shapes repeat, or set "
        "`PYTORCH_ALLOC_CONF=expandable_segments:True` (older PyTorch: `PYTORCH_CUDA_ALLOC_CONF`).",
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
        "Find this code with `with_stack=True` or a sampling profiler such as py-spy, and take it "
        "out of the step.",
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
    "matrix products": "Use a lower precision (bf16, FP8) and sizes that are multiples of 64.",
    "attention": "Use a fused kernel (`scaled_dot_product_attention`), in a lower precision.",
    "convolutions": "Use a lower precision, `channels_last`, and cuDNN's benchmark mode.",
    "elementwise": "They are limited by bytes: fuse them (`torch.compile`), or use fewer bytes.",
    "reductions": "They are limited by bytes: fuse them with what is before and after them.",
    "copies": "Avoid copies of layout and type: keep one layout, and fuse casts into kernels.",
    "small grids": "They fill less than half of the GPU: use a larger batch, or fuse them.",
    "between kernels": "The GPU passes from one short kernel to the next: fuse them.",
    "other": "No kind of work is known for these kernels.",
}
# How far the profiler disturbs; {} is the number of launches in a step.
OF_PROFILER = " The profiler slows each of {:,.0f} launches: without it, the host is late less."
SLOWED = ("launches", "synchronization", "cpu_operators", "host")
# The cure of launches where a trace has graphs.
GRAPHS = (
    "Kernels are launched as graphs already: put more of the step into them, or give each kernel "
    "more work (a larger batch)."
)
# Operators that bring data to the device.
COPYING = ("aten::to", "aten::_to_copy", "aten::copy_", "aten::pin_memory")


def share(part: float) -> str:
    """0.36 -> "36 %"."""
    return f"{100 * part:.0f} %"
