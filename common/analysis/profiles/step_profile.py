"""The profile of a few training steps (schema tiny-llama-profile/1, written by `common.training.profiler`)."""

from pathlib import Path
from typing import Any

from common.errors import UsageError
from common.files import read_json

SCHEMA = "tiny-llama-profile/1"


def find(path: Path) -> Path:
    """The profile itself, or the newest one in a folder.

    Raises:
        UsageError: there is none.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist: give a profile_*.json or a folder that holds some")
    profiles = sorted(path.glob("profile_*.json")) if path.is_dir() else [path]
    if not profiles:
        raise UsageError(f"{path} holds no profile_*.json: make one with --enable-pytorch-profiler --profile-dir {path}")
    return profiles[-1]


def read(path: Path) -> dict[str, Any]:
    """A profile_*.json.

    Raises:
        UsageError: the file is missing, damaged, not a profile, or holds no finished step.
    """
    profile = read_json(path, SCHEMA)
    if not profile["profiled_steps"] or not profile["operators"]:
        raise UsageError(f"{path} holds no profiled step: its run was stopped early; profile again")
    return profile


def span_milliseconds(profile: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Self time per step in ms, by span and within it by phase (forward, backward, optimizer, other); largest span first."""
    own = "self_device_us" if profile["kernels"] else "self_cpu_us"
    added: dict[str, dict[str, float]] = {}
    for operator in profile["operators"]:
        phases = added.setdefault(operator["span"], {})
        milliseconds = operator[own] / profile["profiled_steps"] / 1e3
        phases[operator["phase"]] = phases.get(operator["phase"], 0.0) + milliseconds
    return dict(sorted(added.items(), key=lambda item: -sum(item[1].values())))
