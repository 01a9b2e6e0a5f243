"""Why a GPU's memory is reserved but not allocated: a small model of PyTorch's caching allocator, on any machine.

    python exercises/fragmentation.py
    python exercises/fragmentation.py --story holes

The model follows the default rules of the allocator. On a GPU the same tensors are also made with PyTorch, and the columns stand
side by side. The numbers are MiB (2^20 bytes).
"""

import sys
from pathlib import Path

ROOT = next((folder for folder in Path(__file__).resolve().parents if (folder / "common/cli.py").is_file()), None)
sys.path.insert(0, str(ROOT or sys.exit("error: no `common` above this file: run it inside a clone of the whole workshop")))

from collections.abc import Iterator
from dataclasses import dataclass

from common import cli
from common.analysis.output import tables

import torch

MIB = 2**20
SMALL, SMALL_SEGMENT = MIB, 2 * MIB  # requests up to 1 MiB come from segments of 2 MiB
LARGE, LARGE_SEGMENT = 10 * MIB, 20 * MIB  # requests below 10 MiB come from segments of 20 MiB
ROUND_SMALL, ROUND_LARGE = 512, 2 * MIB  # sizes of blocks, and of the segments of requests from 10 MiB on

# (action, tensor, MiB); a tensor that is freed needs no size.
Action = tuple[str, str, float]
STORIES: dict[str, list[Action]] = {
    "rounding": [("allocate", "a", 0.0001), ("allocate", "b", 1.5), ("allocate", "c", 15)],
    "reuse": [("allocate", "a", 64), ("free", "a", 0), ("allocate", "b", 40), ("free", "b", 0), ("empty_cache", "", 0)],
    "holes": [
        ("allocate", "a", 128), ("free", "a", 0), *(("allocate", f"b{i}", 32) for i in range(4)),
        ("free", "b0", 0), ("free", "b2", 0), ("allocate", "c", 64), ("empty_cache", "", 0),
    ],
}  # fmt: skip


@dataclass
class Block:
    """A part of a segment; `tensor` is None where it is free."""

    size: int
    tensor: str | None = None


class Allocator:
    """Segments that were taken from the device, each split into blocks."""

    def __init__(self) -> None:
        self.segments: list[list[Block]] = []

    @property
    def reserved(self) -> int:
        return sum(block.size for segment in self.segments for block in segment)

    @property
    def allocated(self) -> int:
        return sum(block.size for segment in self.segments for block in segment if block.tensor is not None)

    def allocate(self, tensor: str, size: int) -> None:
        """Takes the smallest free block that is large enough, or a new segment, and splits off what is not needed."""
        size = max(1, -(-size // ROUND_SMALL)) * ROUND_SMALL
        small = size <= SMALL
        fitting = [
            (block.size, number, place)
            for number, segment in enumerate(self.segments)
            for place, block in enumerate(segment)
            if block.tensor is None and block.size >= size and small == (sum(each.size for each in segment) == SMALL_SEGMENT)
        ]
        if fitting:
            _, number, place = min(fitting)
        else:
            rounded = -(-size // ROUND_LARGE) * ROUND_LARGE
            new = SMALL_SEGMENT if small else LARGE_SEGMENT if size < LARGE else rounded
            self.segments.append([Block(new)])
            number, place = len(self.segments) - 1, 0
        segment = self.segments[number]
        block, rest = segment[place], segment[place].size - size
        if rest >= (ROUND_SMALL if small else SMALL + 1):
            block.size = size
            segment.insert(place + 1, Block(rest))
        block.tensor = tensor

    def free(self, tensor: str) -> None:
        """Keeps the block for later, and joins free neighbours of one segment."""
        for segment in self.segments:
            joined: list[Block] = []
            for block in segment:
                if block.tensor == tensor:
                    block.tensor = None
                if joined and block.tensor is None and joined[-1].tensor is None:
                    joined[-1].size += block.size
                else:
                    joined.append(block)
            segment[:] = joined

    def empty_cache(self) -> None:
        """Gives segments back to the device that no tensor uses, and only those."""
        self.segments = [segment for segment in self.segments if any(block.tensor is not None for block in segment)]


def modelled(story: list[Action]) -> Iterator[tuple[float, float]]:
    """MiB allocated and reserved after each action."""
    allocator = Allocator()
    for action, tensor, size in story:
        if action == "allocate":
            allocator.allocate(tensor, int(size * MIB))
        elif action == "free":
            allocator.free(tensor)
        else:
            allocator.empty_cache()
        yield allocator.allocated / MIB, allocator.reserved / MIB


def measured(story: list[Action]) -> Iterator[tuple[float, float]]:
    """The same with tensors of PyTorch on the GPU."""
    tensors: dict[str, torch.Tensor] = {}
    torch.cuda.empty_cache()
    for action, tensor, size in story:
        if action == "allocate":
            tensors[tensor] = torch.empty(int(size * MIB), dtype=torch.uint8, device="cuda")
        elif action == "free":
            del tensors[tensor]
        else:
            torch.cuda.empty_cache()
        yield torch.cuda.memory_allocated() / MIB, torch.cuda.memory_reserved() / MIB


def main() -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument("--story", choices=STORIES, nargs="+", default=list(STORIES), help="default: all")
    header = ["action", "tensor", "MiB", "allocated", "reserved"]
    on_gpu = torch.cuda.is_available()
    for name in parser.parse_args().story:
        story = STORIES[name]
        both = [modelled(story), *([measured(story)] if on_gpu else [])]
        rows = [
            [action, tensor, size or None, *(number for pair in pairs for number in pair)]
            for (action, tensor, size), *pairs in zip(story, *both, strict=True)
        ]
        print(f"{name}\n{tables.text([*header, *(['PyTorch allocated', 'PyTorch reserved'] if on_gpu else [])], rows)}\n")


if __name__ == "__main__":
    cli.command(main)
