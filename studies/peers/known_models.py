"""The models that a study can measure: the versions in their folders, variants of them, and the
external baselines.

A name is that of a version (`v2`) or of an external baseline (`hf`). An end can follow it:
`-compile` runs a version with torch.compile, `-fp8` one with products in FP8, and `-captured` runs
a model's whole step as one graph (the last two: GPU only). After these, `-deterministic` runs a
version so in a study whose other models are not. `v4-no-early-update` is Version 4 without one of
its switches, and `v4-fa4` with one that is off by default.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT
from common import device as devices
from common.precision import amp_dtype
from common.training import record
from studies import version_files
from studies.peers import external_baselines
from tracepage.errors import UsageError

COMPILED = "-compile"
FP8 = "-fp8"
CAPTURED = "-captured"
DETERMINISTIC = "-deterministic"
WITHOUT = "-no-"


class Model(NamedTuple):
    """A version by its file and flags, or an external baseline, which has no file."""

    name: str
    path: Path | None = None
    flags: tuple[str, ...] = ()
    captured: bool = False
    deterministic: bool = False

    def load(self) -> Any:
        """The version's module, or the baseline, which has the functions of one."""
        if self.path:
            return version_files.load(self.path)
        return external_baselines.PEERS[self.name.removesuffix(CAPTURED)]


def find(root: Path = ROOT) -> dict[str, Model]:
    """The models by name: the versions in the folders of `root`, of which the first is the
    baseline, their variants, and the external baselines.
    """
    models = []
    eager = []  # those that are captured only when asked to be
    for path in sorted(root.glob("version*_*/tiny_llama_v*.py")):
        version = version_files.load(path)
        name = record.name(version)
        switches = getattr(version, "SWITCHES", {})
        variants = [Model(name, path)]
        for switch, on in switches.items():
            turned = "disable" if on else "enable"
            ending = WITHOUT + switch if on else "-" + switch.removeprefix("torch-")
            variants.append(Model(name + ending, path, (f"--{turned}-{switch}",)))
        models += variants
        if not getattr(version, "CAPTURED", False):
            eager += variants
    for name, peer in external_baselines.PEERS.items():
        models.append(Model(name))
        if not peer.CAPTURED:
            eager.append(Model(name))
    for model in eager:
        models.append(model._replace(name=model.name + CAPTURED, captured=True))
    for model in [model for model in models if model.path]:
        models.append(model._replace(name=model.name + DETERMINISTIC, deterministic=True))
    return {model.name: model for model in models}


def available(options: Namespace, known: dict[str, Model]) -> list[str]:
    """The models that can run here, by name, but captured and deterministic ones and those with a
    switch turned.

    A line says why each other model cannot.
    """
    device = devices.select(options.device)
    names = []
    for name, model in known.items():
        turned = model.flags and not name.endswith(COMPILED)
        if model.captured or model.deterministic or turned:
            continue
        problem = devices.compile_problem(device) if name.endswith(COMPILED) else None
        if not model.path:
            try:
                model.load().check(device, amp_dtype(options))
            except UsageError as error:
                problem = str(error)
        if problem:
            print(f"leaves out {name}: {problem}")
        else:
            names.append(name)
    return names
