"""The record of a training run (schema tiny-llama-run/1), and when two runs may be compared."""

from pathlib import Path
from typing import Any

import numpy as np

SCHEMA = "tiny-llama-run/1"
FEW_STEPS = 10


def identity(run: dict[str, Any]) -> dict[str, Any]:
    """What two runs must have in common for their step times to be compared, by name."""
    device = {key: run["device"].get(key) for key in ("kind", "name", "threads", "multiprocessors")}
    named = {
        "version": run["version"],
        "sequence length": run["training"]["sequence_length"],
        "torch": run["environment"]["torch"],
    }
    groups = {"device": device, "model": run["model"], "precision": run["precision"]}
    return named | {f"{group} {key}": value for group, values in groups.items() for key, value in values.items()}


def unusable(path: Path, run: dict[str, Any]) -> list[str]:
    """Why this run's step times say nothing."""
    if run["status"] != "completed":
        return [f"{path.name} was not completed ({run['status']})"]
    if run["step_ms"]["profiled"] >= len(run["step_ms"]["all"]):
        return [f"all steps of {path.name} ran under the profiler, which slows them"]
    return []


def conditions(run: dict[str, Any]) -> dict[str, Any]:
    """What a step's time depends on besides the code."""
    return {"batch size": run["training"]["batch_size"]} | {k: v for k, v in identity(run).items() if k != "version"}


def training_inputs(run: dict[str, Any]) -> dict[str, Any]:
    """What a loss curve depends on besides the code, with the conditions above equal."""
    training = {key.replace("_", " "): run["training"][key] for key in ("seed", "learning_rate")}
    return {"data": run["data"]["name"], "data sha256": run["data"]["sha256"][:12]} | training


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """What differs between two sets of conditions or lessons, with both values."""
    return [f"{name} ({ours[name]} and {theirs[name]})" for name in ours if ours[name] != theirs[name]]


def loss_difference(before: dict[str, Any], after: dict[str, Any]) -> tuple[float, int]:
    """The largest difference in nats over the steps that both have, NaN if one is, and how many these are."""
    pairs = list(zip(before["loss"]["all"], after["loss"]["all"], strict=False))
    return float(np.max([abs(ours - theirs) for ours, theirs in pairs])), len(pairs)


def setting(run: dict[str, Any]) -> str:
    """Device, number format, PyTorch and shape of a run, in a line."""
    training, precision, model = run["training"], run["precision"], run["model"]
    shape = f"batch size {training['batch_size']}, sequence length {training['sequence_length']}"
    tf32 = " (TF32 allowed)" if precision["tf32"] else ""
    return (
        f"{run['device']['name']}, {precision['compute']}{tf32}, torch {run['environment']['torch']}, {shape}, "
        f"D {model['hidden_size']}, L {model['num_layers']}"
    )


def origin(run: dict[str, Any]) -> str:
    """The command of a run, its time, and how the switches of the version's own stood, where the record has them."""
    parts = [f"`{run['command']}` on {run['date']}"]
    for name, value in run.get("settings", {}).items():
        shown = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
        parts.append(f"{name.replace('_', ' ')} {shown}")
    return ", ".join(parts)
