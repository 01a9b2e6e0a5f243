"""Run records written by hand."""

import copy


def record(**changes) -> dict:
    """What the comparison reads of a run record; `step_ms__median=5` changes a nested value."""
    result = {
        "schema": "tiny-llama-run/1", "status": "completed", "version": "v1",
        "model": {"hidden_size": 256, "num_layers": 4},
        "training": {"preset": "tiny", "batch_size": 8, "sequence_length": 128, "seed": 0, "learning_rate": 1e-3},
        "precision": {"compute": "fp32", "tf32": False},
        "data": {"name": "stdlib", "sha256": "ab" * 32},
        "device": {"kind": "cuda", "name": "A GPU", "multiprocessors": 100},
        "environment": {"torch": "2.13.0"},
        "memory": {"peak_mib": 100.0, "kind": "GPU allocator"},
        "loss": {"all": [7.0, 6.0, 5.0]},
        "step_ms": {"all": [12.0] * 20, "profiled": 0, "median": 12.0, "p20": 11.0, "p80": 13.0, "count": 20},
        "tokens_per_second": 85_000.0,
    }  # fmt: skip
    result = copy.deepcopy(result)
    for key, value in changes.items():
        *path, last = key.split("__")
        place = result
        for part in path:
            place = place[part]
        place[last] = value
    return result
