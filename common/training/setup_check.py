"""Whether a run can fit into the memory; and --validate-setup: what this machine has, and after the run whether every file that
should be there can be read.
"""

import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any

from common import device as devices
from common.analysis.formulas import footprint
from common.config import ModelConfig, TrainingConfig
from common.data import Dataset
from common.errors import RunError, UsageError
from common.options import RunOptions
from common.records import run_record
from common.records.run_record import RunRecord, TimedRun

import torch

# The sizes that memory grows with, and the flag of each; where there is none, the key of --config.
SIZES = {
    "vocab_size": "--vocab-size", "hidden_size": "--hidden-dim", "num_layers": "--num-layers",
    "intermediate_size": "--intermediate-dim", "max_sequence_length": "max_sequence_length in --config",
    "batch_size": "--batch-size", "sequence_length": "--seq-len", "num_steps": "--num-steps",
}  # fmt: skip


def memory(options: RunOptions, device: torch.device) -> None:
    """Refuses a run whose weights, optimizer state and batch can't fit, by formula, before anything is allocated.

    UsageError: names the size that would save most memory, if it were that of the preset tiny.
    """
    described = devices.describe(device)
    training = dict(batch_size=options.batch_size, sequence_length=options.seq_len, num_steps=options.num_steps)
    given = options.model.model_dump() | training
    tiny = ModelConfig().model_dump() | TrainingConfig.model_construct().model_dump()

    def needed(sizes: dict[str, Any]) -> int:
        model = ModelConfig.model_construct(**{name: sizes[name] for name in ModelConfig.model_fields})
        batch_size, length, num_steps = (sizes[name] for name in training)
        return footprint.least_run(model, batch_size, length, num_steps, options.use_amp)

    if needed(given) > described["memory_mib"] * 2**20:
        name = min(SIZES, key=lambda name: needed(given | {name: tiny[name]}))
        raise UsageError(
            f"this run needs at least {needed(given) / 2**30:,.1f} GiB of memory, and {described['name']} has "
            f"{described['memory_mib'] / 2**10:,.1f}: lower {SIZES[name]} (now {given[name]:,}), which takes most of it"
        )


def before(device: torch.device, dataset: Dataset) -> None:
    """Prints one line a fact. Nothing here can fail a run that would otherwise work."""
    versions, described = devices.environment(), devices.describe(device)
    runtime = next((f"{name} {versions[name]}" for name in ("cuda", "hip") if versions[name]), "CPU build")
    print("setup")
    print(f"  python       {versions['python']}, {versions['platform']}")
    print(f"  torch        {versions['torch']} ({runtime})")
    print(f"  triton       {_triton()}")
    print(f"  deepspeed    {'yes' if importlib.util.find_spec('deepspeed') else 'not installed: its FLOP count is left out'}")
    print(f"  device       {described['name']} ({described['kind']})")
    print(f"  data         {dataset.name}, {len(dataset.tokens):,} tokens, sha256 {dataset.sha256[:12]}")


def _triton() -> str:
    if not importlib.util.find_spec("triton"):
        return "not installed: needed from version 3 on"
    owners = sorted(set(importlib.metadata.packages_distributions().get("triton", [])))
    if len(owners) > 1:
        return f"{', '.join(owners)}; two packages own it, reinstall only the one of your torch"
    if not owners:
        return "no package's"
    return importlib.metadata.version(owners[0]) + (f" (package {owners[0]})" if owners != ["triton"] else "")


def after(record: RunRecord | TimedRun, metrics: Path, profiles: list[Path]) -> None:
    """Reads back what the run wrote, and prints a line a check. RunError: another run has written the metrics since."""
    from common.analysis.profiles import chrome_trace

    if run_record.read(metrics) != json.loads(json.dumps(record)):
        raise RunError(f"{metrics} is now another run's: give each of two runs at a time a --metrics-out of its own")
    print(f"setup ok: {record['parameters']:,} parameters get gradients, {metrics} can be read", end="")
    trace = next((path for path in profiles if path.name.startswith("trace_")), None)
    print(f", {trace} holds {len(chrome_trace.load(trace).operators):,} operators" if trace else "")
