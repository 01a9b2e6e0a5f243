"""What joins several files: the versions and peers measured beside each other, and losses of runs from the same seed."""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common import files
from common.analysis.output import run_facts, tables
from common.analysis.output.tables import format_number
from common.config import PRESETS
from common.documents.rows import conditions
from common.errors import UsageError

import pandas

CAPTURED, FP8 = "-captured", "-fp8"
VERSION = re.compile(r"v(\d+)(-.*)?")  # a model's name, not that of a peer
FILES = re.compile(r"(?:peers|captured)_(\w+)_(fp32|bf16)")  # of benchmark_suite.py, as results/measure_versions.sh names them


class Case(NamedTuple):
    """All benchmarks of one preset, number format and shape: by model, the processes of every file."""

    preset: str
    precision: str
    shape: tuple[int, int]  # B and S
    studies: list[dict[str, Any]]
    runs: dict[str, list[dict[str, Any]]]  # none where a model failed

    def title(self) -> str:
        return f"{self.preset}, {self.precision}, {self.shape[0]} x {self.shape[1]}"

    def times(self, model: str) -> list[float]:
        """The median step of each process in ms; none if the model was not measured."""
        return [run["step_ms"]["median"] for run in self.runs.get(model, [])]

    def fastest(self) -> str:
        return min(filter(self.times, self.runs), key=lambda model: median(self.times(model)))


def cases(folder: Path, precision: str = "") -> list[Case]:
    """The cases of peers_*.json and captured_*.json, of one number format or all, in the order of presets.

    UsageError: there is none, or two files of a case are of different devices or models.
    """
    found: dict[tuple[str, str], Case] = {}
    for path in sorted(folder.glob("*_*_*.json"), key=lambda path: path.name, reverse=True):
        named = FILES.fullmatch(path.stem)
        if not named or precision not in ("", named[2]):
            continue
        study = files.read_json(path)
        shape = study["batch_sizes"][0], study["sequence_lengths"][0]
        case = found.setdefault((named[1], named[2]), Case(named[1], named[2], shape, [], {}))
        case.studies.append(study)
        if len({(run_facts.device(each), tables.letters(each["model"])) for each in case.studies}) > 1:
            raise UsageError(f"{path} is of another device or model than the other benchmark of {case.title()} beside it")
        for cell in study["cells"]:
            case.runs.setdefault(cell["model"], []).extend(cell["runs"])
    if not found:
        raise UsageError(f"{folder} has no peers_PRESET_FORMAT.json: measure with results/measure_versions.sh {folder.name}")
    return sorted(found.values(), key=lambda case: ([*PRESETS].index(case.preset), case.precision == "bf16"))


def models(found: Sequence[Case]) -> list[str]:
    """The versions, then the peers, by name."""
    names = {name for case in found for name in case.runs}
    return sorted(names, key=lambda name: (not VERSION.fullmatch(name), name))


def ratio(reference: Sequence[float], times: Sequence[float]) -> tuple[float, float, float]:
    """How many times faster: by the medians, and the least and the most over the processes."""
    return median(reference) / median(times), min(reference) / max(times), max(reference) / min(times)


def headline(folder: Path) -> tuple[list[Case], list[str]]:
    """The cases in bf16 and their models, without FP8; of the versions only the first is shown captured."""
    every = cases(folder, "bf16")
    first, *others = [name for name in models(every) if not name.endswith(FP8)]
    names = [
        first,
        *(name for name in others if name == first + CAPTURED or not (VERSION.fullmatch(name) and name.endswith(CAPTURED))),
    ]
    return [case._replace(runs={name: case.runs[name] for name in names if name in case.runs}) for case in every], names


def times_and_speedups(folder: Path) -> str:
    """A row per version, a column per case in bf16: ms per step, and how many times faster than the first, with the range.

    The fastest of a column is bold if no peer is faster.
    """
    found, names = headline(folder)
    own = [name for name in names if VERSION.fullmatch(name)]
    return _table(found, [[name, *(_time_and_ratio(case, name, own[0]) for case in found)] for name in own])


def _time_and_ratio(case: Case, model: str, first: str) -> str | None:
    times = case.times(model)
    if not times:
        return None
    faster, *ends = ratio(case.times(first), times)
    said = f" {_range(times)}" if model == first else f", {format_number(faster)}x {_range(ends)}"
    shown = f"{format_number(median(times))} ms{said}"
    return f"**{shown}**" if model == case.fastest() else shown


def _range(values: Sequence[float]) -> str:
    return f"({format_number(min(values))} to {format_number(max(values))})"


def times_and_memory(folder: Path) -> str:
    """A row per model, a column per case: median ms per step, the range over the processes, and GiB that the pools held."""
    found = cases(folder)
    return _table(found, [[name, *(_time_and_memory(case, name) for case in found)] for name in models(found)])


def _time_and_memory(case: Case, model: str) -> str | None:
    if not case.times(model):
        return None
    held = median(run["reserved_mib"] for run in case.runs[model]) / 1024
    return f"{format_number(median(case.times(model)))} {_range(case.times(model))}, {held:.2f}"


def _table(found: Sequence[Case], rows: Sequence[Sequence[object]]) -> str:
    studies = [study for case in found for study in case.studies]
    return f"{conditions(studies)}\n\n{tables.markdown(['model', *(case.title() for case in found)], rows)}"


def curves(*paths: Path) -> str:
    """A column per run after the first: the largest difference of its losses to the first run's, up to five steps.

    UsageError: there is one run, or they have different numbers of steps.
    """
    first, *others = [files.read_json(path) for path in paths]
    if {len(run["loss"]["all"]) for run in others} != {len(first["loss"]["all"])}:
        raise UsageError(f"{', '.join(map(str, paths))}: give two runs or more with the same --num-steps")
    losses = pandas.DataFrame({run["version"].replace("v", "Version "): run["loss"]["all"] for run in others})
    far = losses.sub(first["loss"]["all"], axis=0).abs().cummax()
    every = len(far) // 5
    rows = [[step, *(f"{value:.1e}" for value in far.loc[step - 1])] for step in range(every, 5 * every + 1, every)]
    head = f"largest difference to Version {first['version'][1:]} up to step"
    return f"{conditions([first, *others])}\n\n{tables.markdown([head, *far.columns], rows)}"
