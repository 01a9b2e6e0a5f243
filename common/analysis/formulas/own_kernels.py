"""What a version's own kernels compute and move, by the formulas that its `kernels/costs.py` gives."""

import importlib
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from common import ROOT
from common.analysis.formulas import operators
from common.config import ModelConfig
from common.records.step_profile import Profile


class Cost(Protocol):
    """All launches of a kernel in one step; `bytes` is None where there is no formula, `flops` where it is memory-bound."""

    @property
    def operation(self) -> str: ...
    @property
    def bytes(self) -> int | None: ...
    @property
    def flops(self) -> int | None: ...


def kernel_costs(profile: Profile) -> Mapping[tuple[str, str], Cost]:
    """The cost of a version's own kernels in a step, by name and phase; empty without kernels/costs.py, or without PyTorch."""
    run, training = profile["run"], profile["run"]["training"]
    for script in ROOT.glob(f"version*_*/tiny_llama_{run['version']}.py"):
        if (script.parent / "kernels/costs.py").exists():
            try:
                costs = importlib.import_module(f"{script.parent.name}.kernels.costs")
            except ModuleNotFoundError:
                return {}
            launched: Counter[tuple[str, str]] = Counter()
            for kernel in profile["kernels"]:
                launched[kernel["name"], kernel["phase"]] += kernel["calls"]
            shape = ModelConfig(**run["model"]), training["batch_size"], training["sequence_length"]
            found = costs.training_step(*shape, operators.element_bytes(run), launched)
            shares = training.get("world_size", 1) if training.get("parallel") == "zero1" else 1  # of an update
            return {
                kernel: cost._replace(bytes=cost.bytes // shares) if kernel[0] == "_adamw" and cost.bytes else cost
                for kernel, cost in found.items()
            }
    return {}
