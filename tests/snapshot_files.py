"""Memory snapshots in the form of `torch.cuda.memory._dump_snapshot`, written by hand."""

import pickle
from pathlib import Path
from typing import Any

MIB = 2**20


def stack(*frames: tuple[str, int, str]) -> list[dict[str, Any]]:
    """Frames, the innermost first."""
    return [{"filename": name, "line": line, "name": call} for name, line, call in frames]


LINEAR = ("/site-packages/torch/nn/modules/linear.py", 9, "forward")
FORWARD = stack(LINEAR, ("/home/me/models/llama.py", 71, "forward"), ("/home/me/t.py", 5, "main"))
OPTIMIZER = stack(("/site-packages/torch/optim/adamw.py", 3, "step"), ("/home/me/t.py", 8, "main"))


def entry(action: str, address: int, size: int, frames: list | None = None, **rest) -> dict:
    return {"action": action, "addr": address, "size": size, "frames": frames or [], **rest}


def content(*entries: dict, segment_mib: int = 100, alive: list | None = None) -> dict:
    """A device 1 with one segment; `alive`: (bytes, frames) of its blocks that are in use."""
    blocks = [
        {"size": size, "requested_size": size, "state": "active_allocated", "frames": frames}
        for size, frames in alive or []
    ]
    rest = segment_mib * MIB - sum(block["size"] for block in blocks)
    blocks.append({"size": rest, "requested_size": 0, "state": "inactive", "frames": []})
    segment = {"device": 1, "total_size": segment_mib * MIB, "blocks": blocks}
    for number, row in enumerate(entries):
        row.setdefault("time_us", 1000 * number)
    return {"segments": [segment], "device_traces": [[], list(entries)]}


def step_content(activations_mib: int = 40) -> dict:
    """A step that began with 10 MiB: activations of the forward pass, gradients of a thread without
    stacks, the optimizer's state of 5 MiB, which stays.
    """
    return content(
        entry("alloc", 1, activations_mib * MIB, FORWARD),
        entry("segment_alloc", 2, 50 * MIB),
        entry("alloc", 3, 20 * MIB),
        entry("free_requested", 1, activations_mib * MIB),
        entry("free_completed", 1, activations_mib * MIB),
        entry("alloc", 5, 5 * MIB - 100, OPTIMIZER),
        entry("free_requested", 3, 20 * MIB),
        alive=[(10 * MIB, []), (5 * MIB, OPTIMIZER)],
    )


def write_snapshot(path: Path, snapshot: object) -> Path:
    path.write_bytes(pickle.dumps(snapshot))
    return path
