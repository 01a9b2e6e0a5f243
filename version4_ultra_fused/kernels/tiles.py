"""Tiles of the matrix products that Triton computes: `matmul.py` says what they are for.

A product [M, K] x [K, N] is cut into tiles of M and N, which a persistent kernel works through: as
many programs as multiprocessors, each with several tiles. A large tile reads fewer bytes for each
FLOP. A small product takes a smaller tile, so that most multiprocessors have one.

The tiles were measured on an H200 (LOG.md). No other GPU was there to measure: elsewhere a library
computes the products, and only tests in Triton's interpreter run the kernels, with INTERPRETED.
"""

import functools
from typing import NamedTuple

from version3_triton.kernels import launch_sizes
from version3_triton.kernels.launch_sizes import ceil_div
from version4_ultra_fused import trials

import torch


class ProductTile(NamedTuple):
    """Rows (m) and columns (n) of a tile of the result, depth (k) of a step, warps, and stages of
    the software pipeline.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int

    @property
    def arguments(self) -> dict[str, int]:
        return {
            "BM": self.m,
            "BN": self.n,
            "BK": self.k,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


# On "sm_90" the tiles that a product in 16 bits can have, by its epilogue, largest first.
TILES: dict[str, tuple[ProductTile, ...]] = {
    "rope": (ProductTile(64, 128, 64, 4, 4), ProductTile(64, 64, 128, 4, 3)),
    "swiglu": (
        ProductTile(128, 256, 64, 8, 3),
        ProductTile(128, 128, 64, 8, 3),
        ProductTile(64, 128, 64, 4, 4),
        ProductTile(64, 64, 64, 4, 4),
    ),
    "swiglu_backward": (ProductTile(64, 128, 128, 8, 3), ProductTile(64, 64, 128, 4, 3)),
    "norm": (ProductTile(64, 64, 128, 4, 4), ProductTile(64, 32, 256, 4, 3)),
}
INTERPRETED = (ProductTile(32, 32, 32, 4, 1),)
# On "sm_90" the most elements of a product that is computed with its epilogue, for "norm" its most
# multiplications. For larger ones a library's product and a kernel take less time (LOG.md has the
# table).
LARGEST = {
    "swiglu_backward": 1 << 22,
    "rope": 1 << 22,
    "swiglu": 1 << 40,
    "norm": 1 << trials.numbers("LARGEST_NORM", 29)[0],
}
PROGRAMS = trials.numbers("PROGRAMS", 1)[0]  # on a multiprocessor


@functools.cache
def multiprocessors() -> int:
    """How many the GPU has; the number decides how many programs a persistent kernel has."""
    if not torch.cuda.is_available():
        return 4
    return torch.cuda.get_device_properties(0).multi_processor_count


def largest(epilogue: str, depth: int = 1) -> int:
    """The most elements of a product in 16 bits that is computed with this epilogue on this GPU; of
    "norm" at this depth.
    """
    return LARGEST[epilogue] // depth if launch_sizes.family() == "sm_90" else 0


@functools.cache
def product_tile(epilogue: str, rows: int, columns: int) -> ProductTile:
    """The largest tile that gives two thirds of the multiprocessors work, or the smallest.

    Args:
        epilogue: of `matmul.py`, or "norm".
        rows, columns: of the product.
    """
    if said := trials.numbers(f"TILE_{epilogue.upper()}"):
        return ProductTile(*said)
    for tile in TILES[epilogue] if launch_sizes.family() == "sm_90" else INTERPRETED:
        if ceil_div(rows, tile.m) * ceil_div(columns, tile.n) >= 2 / 3 * multiprocessors():
            break
    return tile
