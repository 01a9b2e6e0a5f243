"""The allocations of one training step (`--memory-snapshot FILE`), for PyTorch's viewer and for a
program.

FILE.pickle opens in https://pytorch.org/memory_viz. Loading a pickle runs code, so FILE.json says
the same in short: each allocation, each release, and the line of ours that asked for it. Autograd's
own operations have no such line: `backward`.
"""

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common import ROOT
from tracepage.files import schema_of, write_bytes, write_measurement
from tracepage.records.study_files import MemorySnapshot

import torch

SCHEMA = schema_of(MemorySnapshot)


def take(file: Path, step: Callable[[], object], header: Mapping[str, Any], keep: bool) -> None:
    """Runs a warmed-up step with the allocator's history on; writes both files if `keep`."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    snapshot = torch.cuda.memory._snapshot()
    if keep:
        write_bytes(file.with_suffix(".pickle"), pickle.dumps(snapshot))
        content = {**header, "peak_bytes": peak, **events(snapshot, torch.cuda.current_device())}
        write_measurement(file.with_suffix(".json"), content, "--memory-snapshot")
    torch.cuda.memory._record_memory_history(enabled=None)


def events(snapshot: Mapping[str, Any], device: int) -> dict[str, Any]:
    """`before_bytes`, which were allocated before the history began; `places`; and `events`, each
    [block, bytes, place].

    A release has the block of its allocation, and less than 0 bytes.
    """
    numbers: dict[int, int] = {}  # of the blocks, by address
    places: dict[str, int] = {}
    rows: list[list[int]] = []
    for event in snapshot["device_traces"][device]:
        address = event["addr"]
        if event["action"] == "alloc":
            numbers[address] = len(rows)
            place = places.setdefault(_place(event["frames"]), len(places))
            rows.append([len(rows), event["size"], place])
        elif event["action"] == "free_requested" and address in numbers:  # not from before
            number = numbers[address]
            rows.append([number, -event["size"], rows[number][2]])
    after = 0
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if segment["device"] == device and block["state"].startswith("active"):
                after += block["requested_size"]
    before = after - sum(size for _, size, _ in rows)
    return {"before_bytes": before, "places": list(places), "events": rows}


def _place(frames: list[Mapping[str, Any]]) -> str:
    """The innermost line in a file of ours, such as `tiny_llama_v2.py:71 swiglu`."""
    for frame in frames:
        if Path(frame["filename"]).is_relative_to(ROOT) and "spans.py" not in frame["filename"]:
            return f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"
    return "backward"
