"""--validate-setup: what this machine has, and after the run whether every file that should be there can be read."""

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

from common import device as devices
from common.analysis.profiles import run_record
from common.data import Dataset
from common.errors import RunError

import torch


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
    owners = importlib.metadata.packages_distributions().get("triton", ["no package's"])
    warning = "; two packages own it, reinstall only the one of your torch" if len(set(owners)) > 1 else ""
    return ", ".join(sorted(set(owners))) + warning


def after(record: dict[str, Any], metrics: Path, profiles: list[Path]) -> None:
    """Reads back what the run wrote, and prints one line a check.

    Raises:
        RunError: a file is damaged, or a trace has no operators in it.
    """
    from common.analysis.profiles import chrome_trace

    if run_record.read(metrics)["loss"]["all"] != record["loss"]["all"]:
        raise RunError(f"{metrics} does not hold what was measured: is the disk full?")
    print(f"setup ok: {record['parameters']:,} parameters get gradients, {metrics} can be read", end="")
    trace = next((path for path in profiles if path.name.startswith("trace_")), None)
    print(f", {trace} holds {len(chrome_trace.load(trace).operators):,} operators" if trace else "")
