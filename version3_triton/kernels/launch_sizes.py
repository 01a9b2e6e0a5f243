"""The sizes of all kernels: how many elements a program takes, and with how many warps.

A test compiles every kernel with these sizes for GPUs of both vendors (tests/offline.py): on AMD
and on "sm_75" (a T4) a kernel must fit into 64 KiB of shared memory, and none may spill. Within
that, what is under "sm_90" was, for 16 bits, the fastest on an H100 or near it (`git show
8d3a7f6:version3_triton/kernel_tiles.py`, LOG.md). No other GPU was there to time: what is under the
other names is what compiles without spills.
"""

import functools
import math
from dataclasses import dataclass

import torch
import triton


def dot_precision(dtype: torch.dtype) -> str:
    """How tl.dot multiplies float32. On NVIDIA in three TF32 products, which keep about 22 of a
    factor's 24 bits, or in one where PyTorch may take TF32; on AMD in float32.
    """
    if dtype != torch.float32 or family() == "hip":
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


@dataclass(frozen=True)
class LaunchConfig:
    """How the work of a memory-bound kernel is divided among programs and warps.

    elements: the elements of a tensor in one program's tile; a norm's tile holds whole rows, so at
    least one row. per_thread: the elements of one thread in a warp of 32 threads, which sets how
    many warps there are; half in AMD's of 64. programs: the programs on each multiprocessor, for a
    kernel that loops over rows. rows: the least number of rows in a tile, where 16 warps can hold
    them.
    """

    elements: int
    per_thread: int
    programs: int = 1
    rows: int = 1


NVIDIA = {  # by kernel
    "norm_forward": LaunchConfig(2048, 32),
    "norm_backward": LaunchConfig(2048, 16, programs=4),
    "swiglu": LaunchConfig(4096, 8),
    "rope": LaunchConfig(2048, 4),
    "cross_entropy": LaunchConfig(4096, 16),
}
AMD = NVIDIA | {
    "norm_forward": LaunchConfig(2048, 16),
    "swiglu": LaunchConfig(4096, 16),
    "rope": LaunchConfig(1024, 8),
}
HOPPER = NVIDIA | {"norm_backward": LaunchConfig(4096, 32, programs=4, rows=2)}
LAUNCH = {"sm_75": NVIDIA, "sm_80": NVIDIA, "sm_90": HOPPER, "hip": AMD}


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a program's tile, its warps, and for kernels that loop over rows how many
    programs there are.
    """

    rows: int
    columns: int
    warps: int
    programs: int = 1


NORM_DWEIGHT = Tile(64, 16, 4)  # parts of a norm's dw, and its columns; on all GPUs


def tile(kernel: str, size: int, device: torch.device) -> Tile:
    """The tile of a kernel of LAUNCH on rows of `size` elements (for `rope`: half a head).

    A norm's tile has whole rows, and SwiGLU's columns divide a size that is a multiple of 128.
    Otherwise the last has idle lanes.
    """
    return tile_of(LAUNCH[family()][kernel], kernel, size, device)


# The power of two and the device's properties would cost the host time at every launch.
@functools.cache
def tile_of(config: LaunchConfig, kernel: str, size: int, device: torch.device) -> Tile:
    columns = triton.next_power_of_2(size)
    if not kernel.startswith("norm"):
        columns = min(columns, config.elements)
    if kernel == "swiglu" and size % 128 == 0:
        columns = math.gcd(size, columns)  # No lane has nothing to do: 5632 = 11 x 512.
    least = max(1, min(config.rows, 16 * 32 * config.per_thread // columns))
    rows = 1 if kernel == "cross_entropy" else max(least, config.elements // columns)
    # Two warps spill, at equal speed.
    per_thread = 32 if kernel == "cross_entropy" and columns <= 1024 else config.per_thread
    warps = min(16, max(1, rows * columns // (32 * per_thread)))
    multiprocessors = 1
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return Tile(rows, columns, warps, config.programs * multiprocessors)


def ceil_div(amount: int, part: int) -> int:
    """How many parts cover the amount; triton.cdiv takes some microseconds outside of kernels."""
    return -(-amount // part)


@dataclass(frozen=True)
class TileConfig:
    """Queries (m) and keys (n) of a tile of scores, warps, and depth of the software pipeline.

    mfma: on AMD the rows and columns that a matrix instruction computes, 16 or 32; 0 leaves it to
    the compiler.
    """

    m: int
    n: int
    warps: int
    stages: int
    mfma: int = 0

    @property
    def arguments(self) -> dict[str, int]:
        sizes = {
            "BLOCK_M": self.m,
            "BLOCK_N": self.n,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }
        return sizes | ({"matrix_instr_nonkdim": self.mfma} if self.mfma else {})


def _tiles(*kernels: tuple[int, ...]) -> dict[str, TileConfig]:
    """The three kernels of attention, each by the fields of a TileConfig in order."""
    names = ("forward", "queries", "keys")
    return {name: TileConfig(*tile) for name, tile in zip(names, kernels, strict=True)}


_NVIDIA_FP32 = {
    64: _tiles((64, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1)),
    128: _tiles((32, 32, 8, 1), (32, 32, 8, 1), (32, 16, 8, 1)),
}
# Triton multiplies without the T4's tensor cores, so 16 bits take no less of its registers than 32.
_T4 = {
    64: _tiles((64, 32, 8, 1), (32, 32, 8, 1), (16, 32, 8, 1)),
    128: _tiles((32, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
}
# By family of GPUs and bytes of a number: tiles for head dimensions to 64 and to 128.
ATTENTION = {
    ("sm_90", 2): {
        64: _tiles((64, 64, 4, 3), (128, 64, 8, 3), (32, 64, 4, 1)),
        128: _tiles((64, 64, 4, 3), (128, 64, 8, 3), (64, 128, 8, 1)),
    },
    ("sm_80", 2): {
        64: _tiles((128, 64, 8, 3), (64, 64, 8, 2), (32, 128, 8, 2)),
        128: _tiles((128, 64, 8, 3), (128, 32, 8, 2), (64, 64, 8, 2)),
    },
    **dict.fromkeys([("sm_75", 2), ("sm_75", 4)], _T4),
    **dict.fromkeys([("sm_80", 4), ("sm_90", 4)], _NVIDIA_FP32),
    # The compiler takes 32 x 32 where a tile has room for it. Four warps that share fewer than four
    # of those repeat each other's products, so such tiles have 16. This is reasoned from the
    # machine code of gfx90a, gfx942 and gfx950 alike, not measured.
    ("hip", 2): dict.fromkeys(
        (64, 128), _tiles((128, 32, 4, 1), (64, 32, 4, 1, 16), (16, 64, 4, 1))
    ),
    ("hip", 4): {
        64: _tiles((64, 32, 4, 1, 16), (32, 32, 4, 1, 16), (32, 32, 4, 1, 16)),
        128: _tiles((32, 32, 4, 1, 16), (32, 16, 4, 1), (16, 32, 4, 1)),
    },
}


@functools.cache
def family() -> str:
    """Whose sizes to take: `hip` for all of AMD's GPUs, and for the interpreter on a CPU, because
    they are the smallest.

    NVIDIA's data-centre GPUs from Hopper on (compute capability 9 and 10) have 227 KiB of shared
    memory for a program and take those of `sm_90`. Those before capability 8 have 64 KiB and take
    those of `sm_75`; all others take those of `sm_80`.
    """
    if torch.version.hip or not torch.cuda.is_available():
        return "hip"
    capability = torch.cuda.get_device_capability()[0]
    if capability in (9, 10):
        return "sm_90"
    return "sm_80" if capability >= 8 else "sm_75"


def attention_blocks(kernel: str, head_dim: int, dtype: torch.dtype) -> TileConfig:
    """The tile of the kernel `forward`, `queries` or `keys`."""
    return ATTENTION[family(), dtype.itemsize][64 if head_dim <= 64 else 128][kernel]
