"""Times the kernels with many sizes on this GPU (`benchmark_kernels.py --tiles`), to choose those in `kernels/launch_sizes.py`.

Only one kernel's sizes change at a time. The time is that of its whole operation, forward and backward, so differences between
two rows are those of the kernel. Sizes that spill registers can be fast, but may not stand in the table: a test refuses them.
"""

import contextlib
import itertools
import statistics
from collections.abc import Sequence
from unittest.mock import patch

from common import device as devices
from common.analysis.output import tables
from common.options import Options
from common.precision import Precision, amp_dtype
from common.terminal import progress
from version3_triton import kernels
from version3_triton.kernel_cases import Shape, case, replayed
from version3_triton.kernels.launch_sizes import LAUNCH, LaunchConfig, TileConfig, place

import torch
from triton.runtime.errors import OutOfResources

SHOWN = 3
KERNELS = {  # of an operation, by their names in `kernels/launch_sizes.py`
    "rms_norm": ("norm_forward", "norm_backward"), "add_rms_norm": ("norm_forward", "norm_backward"), "swiglu": ("swiglu",),
    "apply_rope": ("rope",), "attention": ("forward", "queries", "keys"), "linear_cross_entropy": ("cross_entropy",),
}  # fmt: skip


def candidates(kernel: str, dtype: torch.dtype) -> list[LaunchConfig] | list[TileConfig]:
    """Sizes to try. Attention's are long in what a program owns; in float32 they are half as long, without a pipeline."""
    if kernel in LAUNCH:
        programs, rows = ((2, 4, 8), (1, 2)) if kernel == "norm_backward" else ((1,), (1,))
        return [LaunchConfig(*each) for each in itertools.product((1024, 2048, 4096, 8192), (4, 8, 16, 32), programs, rows)]
    owned, passed, stages = ((32, 64, 128), (16, 32), (1,)) if dtype.itemsize == 4 else ((64, 128), (32, 64, 128), (1, 2, 3, 4))
    m, n = (passed, owned) if kernel == "keys" else (owned, passed)  # `keys` owns keys and goes over queries
    return [TileConfig(*each) for each in itertools.product(m, n, (4, 8), stages)]


def rows(operation: str, shape: Shape, precision: Precision) -> list[list[object]]:
    """For each kernel of the operation the fastest sizes and those in use: their time in microseconds.

    Sizes that do not fit into this GPU's shared memory are left out.
    """
    found: list[list[object]] = []
    step = case(operation, shape, precision).step(kernels.KERNELS[operation])
    for kernel in KERNELS[operation]:
        table, key = place(kernel, shape[0].head_dim, precision.dtype)
        in_use, us = table[key], {}
        for sizes in dict.fromkeys([in_use, *candidates(kernel, precision.dtype)]):
            with patch.dict(table, {key: sizes}), contextlib.suppress(OutOfResources):
                step()
                us[sizes] = 1e3 * statistics.median(replayed({kernel: step}, precision.device)[kernel])
        fastest = sorted(us, key=us.__getitem__)[:SHOWN]
        found += [[kernel, str(sizes), us[sizes], sizes == in_use] for sizes in dict.fromkeys([*fastest, in_use])]
    return found


def compare(options: Options, shapes: list[Shape], operations: Sequence[str]) -> None:
    """Prints a table for each operation and shape."""
    device = devices.select(options.device)
    devices.configure(device, options.seed)
    precision = Precision(device, amp_dtype(options))
    for shape, operation in itertools.product(shapes, operations):
        with progress(f"timing {operation}"):
            found = rows(operation, shape, precision)
        print(f"{operation}, B x S = {shape[1]} x {shape[2]}, D = {shape[0].hidden_size}, {precision.name}")
        print(tables.text(["kernel", "sizes", "us", "in use"], found))
