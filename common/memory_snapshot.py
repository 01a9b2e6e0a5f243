"""The allocations of one training step (`--memory-snapshot FILE`), for PyTorch's viewer and for a
program.

FILE.pickle opens in https://pytorch.org/memory_viz. Loading a pickle runs code, so FILE.json says
the same in short: each allocation, each release, and the line of ours that asked for it. Autograd's
own operations have no such line: `backward`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common import ROOT
from tracepage.files import write_measurement

import torch

SCHEMA = "tiny-llama-memory-snapshot/1"


def take(file: Path, step: Callable[[], object], header: Mapping[str, Any], keep: bool) -> None:
    """Runs the step, a warmed-up one, while the allocator keeps its history; writes both files if
    `keep`.
    """
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    snapshot = torch.cuda.memory._snapshot()
    if keep:
        torch.cuda.memory._dump_snapshot(str(file.with_suffix(".pickle")))
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
        sign = {"alloc": 1, "free_requested": -1}.get(event["action"])
        if not sign or (sign < 0 and event["addr"] not in numbers):  # of a block from before
            continue
        if sign > 0:
            numbers[event["addr"]] = len(rows)
        number = numbers[event["addr"]]
        place = (
            places.setdefault(_place(event["frames"]), len(places)) if sign > 0 else rows[number][2]
        )
        rows.append([number, sign * event["size"], place])
    blocks = [
        block
        for segment in snapshot["segments"]
        if segment["device"] == device
        for block in segment["blocks"]
    ]
    after = sum(block["requested_size"] for block in blocks if block["state"].startswith("active"))
    return {
        "before_bytes": after - sum(size for _, size, _ in rows),
        "places": list(places),
        "events": rows,
    }


def _place(frames: list[Mapping[str, Any]]) -> str:
    """The innermost line in a file of ours, such as `tiny_llama_v2.py:71 swiglu`."""
    for frame in frames:
        if Path(frame["filename"]).is_relative_to(ROOT) and "spans.py" not in frame["filename"]:
            return f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"
    return "backward"
