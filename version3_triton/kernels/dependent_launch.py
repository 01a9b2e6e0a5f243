"""Programmatic dependent launch: on NVIDIA's data-centre GPUs from Hopper on a kernel is set up
while the kernel before it ends.

Between two kernels of a stream the GPU is idle for about a microsecond, a large part of a small
kernel's time. Launched in this way a kernel is in place when the one before it ends. It waits
inside, in `begin`, which must be its first statement: after it everything that earlier kernels
wrote is there. A kernel can let the next one be placed while it runs itself (NEXT). That pays for
small kernels; the programs of a product need all of the shared memory.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization". Version 4
launches its kernels like this; a captured step holds them as edges of its graph.
"""

from version3_triton.kernels.checks import INTERPRETED
from version3_triton.kernels.launch_sizes import family

import triton
import triton.language as tl

ARGUMENTS = {"DEPENDENT": True, "launch_pdl": True}


@triton.jit
def begin(DEPENDENT: tl.constexpr, NEXT: tl.constexpr = False):
    """Waits for the kernel before where the launch is DEPENDENT; NEXT: the kernel after it may now
    be placed.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        if NEXT:
            tl.extra.cuda.gdc_launch_dependents()


def dependent() -> dict[str, bool]:
    """The arguments of a dependent launch, for a kernel with DEPENDENT; none in the interpreter and
    on GPUs without them.
    """
    return ARGUMENTS if family() == "sm_90" and not INTERPRETED else {}
