"""How many numbers each program of a kernel takes, and with how many warps: the one place for it.

`compile_kernels.py` compiles every kernel with these sizes for the GPUs of both vendors and shows registers, spills and shared
memory: on AMD a kernel must fit into 64 KiB of LDS, and none may spill.
"""

import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor


def autocast_dtype(x: Tensor, otherwise: torch.dtype) -> torch.dtype:
    """The type that autocast gives matrix products on x's device; `otherwise` where autocast is off."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else otherwise


def dot_precision(dtype: torch.dtype) -> str:
    """How tl.dot multiplies float32: exactly, unless TF32 was allowed for PyTorch's products."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 and not torch.version.hip else "ieee"


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a program's tile, its warps, and for kernels that loop over rows how many programs there are."""

    rows: int
    columns: int
    warps: int
    programs: int = 1


def _warps(numbers: int, per_thread: int = 16) -> int:
    """Warps (of 32) so that each thread has about `per_thread` numbers; a power of two from 1 to 16."""
    return min(16, max(1, triton.next_power_of_2(triton.cdiv(numbers, 32 * per_thread))))


def norm_blocks(size: int, device: torch.device) -> Tile:
    """Whole rows: a program has one, or as many as make 2048 numbers."""
    columns = triton.next_power_of_2(size)
    rows = max(1, 2048 // columns)
    per_thread = 8 if columns > 2048 and family() != "hip" else 16  # with 16, ptxas spills of a row of 4096 in float32
    programs = 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return Tile(rows, columns, _warps(rows * columns, per_thread), programs)


def rope_blocks(head_dim: int, device: torch.device) -> Tile:
    columns = triton.next_power_of_2(head_dim // 2)
    return Tile(max(1, 1024 // columns), columns, 4)


def row_blocks(size: int, device: torch.device) -> Tile:
    """Elementwise: 4096 numbers a program."""
    columns = min(1024, triton.next_power_of_2(size))
    return Tile(max(1, 4096 // columns), columns, 8)


def cross_entropy_blocks(vocabulary: int, device: torch.device) -> Tile:
    columns = min(4096, triton.next_power_of_2(vocabulary))
    return Tile(1, columns, _warps(columns))


@dataclass(frozen=True)
class Blocks:
    """Queries (m) and keys (n) of a tile of scores, warps, and depth of the software pipeline."""

    m: int
    n: int
    warps: int
    stages: int

    @property
    def arguments(self) -> dict[str, int]:
        return {"BLOCK_M": self.m, "BLOCK_N": self.n, "num_warps": self.warps, "num_stages": self.stages}


# By family of GPUs and bytes of a number: for head dimensions to 64 and to 128, the three kernels of attention.
ATTENTION = {
    ("sm_90", 2): {
        64: {"forward": Blocks(128, 64, 4, 3), "queries": Blocks(128, 64, 8, 2), "keys": Blocks(64, 128, 8, 2)},
        128: {"forward": Blocks(128, 64, 8, 3), "queries": Blocks(128, 32, 8, 2), "keys": Blocks(32, 128, 8, 2)},
    },
    ("sm_90", 4): {
        64: {"forward": Blocks(64, 32, 8, 1), "queries": Blocks(32, 32, 8, 1), "keys": Blocks(32, 32, 8, 1)},
        128: {"forward": Blocks(32, 16, 8, 1), "queries": Blocks(16, 16, 8, 1), "keys": Blocks(16, 16, 8, 1)},
    },
    ("sm_80", 2): {
        64: {"forward": Blocks(128, 64, 8, 3), "queries": Blocks(128, 64, 8, 2), "keys": Blocks(32, 128, 8, 2)},
        128: {"forward": Blocks(128, 64, 8, 3), "queries": Blocks(128, 32, 8, 2), "keys": Blocks(64, 64, 8, 2)},
    },
    ("sm_80", 4): {
        64: {"forward": Blocks(64, 32, 8, 1), "queries": Blocks(32, 32, 8, 1), "keys": Blocks(32, 32, 8, 1)},
        128: {"forward": Blocks(32, 16, 8, 1), "queries": Blocks(16, 16, 8, 1), "keys": Blocks(16, 16, 8, 1)},
    },
    ("hip", 2): {
        64: {"forward": Blocks(128, 32, 4, 1), "queries": Blocks(64, 32, 4, 1), "keys": Blocks(16, 64, 4, 1)},
        128: {"forward": Blocks(128, 32, 4, 1), "queries": Blocks(64, 32, 4, 1), "keys": Blocks(16, 64, 4, 1)},
    },
    ("hip", 4): {
        64: {"forward": Blocks(64, 32, 4, 1), "queries": Blocks(32, 32, 4, 1), "keys": Blocks(32, 32, 4, 1)},
        128: {"forward": Blocks(32, 32, 4, 1), "queries": Blocks(32, 16, 4, 1), "keys": Blocks(16, 32, 4, 1)},
    },
}


@functools.cache
def family() -> str:
    """Whose sizes to take: `hip` for all of AMD's GPUs, and for the interpreter on a CPU, because they are the smallest.

    NVIDIA's data-centre GPUs from Hopper on (compute capability 9 and 10) have 227 KiB of shared memory for a program and take
    those of `sm_90`; all others take those of `sm_80`.
    """
    if torch.version.hip or not torch.cuda.is_available():
        return "hip"
    return "sm_90" if torch.cuda.get_device_capability()[0] in (9, 10) else "sm_80"


def attention_blocks(kernel: str, head_dim: int, dtype: torch.dtype) -> Blocks:
    """Of `forward`, `queries` or `keys`."""
    return ATTENTION[family(), dtype.itemsize][64 if head_dim <= 64 else 128][kernel]
