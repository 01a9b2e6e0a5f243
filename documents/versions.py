"""Tables that join several files: the versions and peers measured beside each other, and losses of
runs from the same seed.
"""

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common.config import PRESETS, ModelConfig
from documents.rows import conditions
from tracepage import files
from tracepage.cost import flops
from tracepage.errors import UsageError
from tracepage.readers import chrome_trace, kernel_names
from tracepage.show import run_facts, tables
from tracepage.show.tables import format_number

import pandas

# Files of benchmark_suite.py, as results/measure_versions.sh names them.
FILES = re.compile(r"(?:peers|captured)_(\w+)_(fp32|bf16)")
VERSION = re.compile(r"v(\d+)(-.*)?")  # a model's name, not that of a peer


class Case(NamedTuple):
    """All benchmarks of one preset, number format and shape."""

    preset: str
    precision: str
    shape: tuple[int, int]  # B and S
    studies: list[dict[str, Any]]
    runs: dict[str, list[dict[str, Any]]]  # the processes by model; none where it failed

    def title(self) -> str:
        return f"{self.preset}, {self.precision}, {self.shape[0]} x {self.shape[1]}"

    def times(self, model: str) -> list[float]:
        """The median step of each process in ms; none if the model was not measured."""
        return [run["step_ms"]["median"] for run in self.runs.get(model, [])]


def read_cases(folder: Path) -> list[Case]:
    """The cases of peers_*.json and captured_*.json in the order of presets.

    UsageError: there is none, or two files of a case are of different devices or models.
    """
    cases: dict[tuple[str, str], Case] = {}
    for path in sorted(folder.glob("*_*_*.json")):
        match = FILES.fullmatch(path.stem)
        if not match:
            continue
        preset, precision = match.groups()
        study = files.read_json(path)
        shape = study["batch_sizes"][0], study["sequence_lengths"][0]
        case = cases.setdefault((preset, precision), Case(preset, precision, shape, [], {}))
        case.studies.append(study)
        measured = {
            (run_facts.device(other), tables.letters(other["model"])) for other in case.studies
        }
        if len(measured) > 1:
            raise UsageError(
                f"{path} is of another device or model than the other benchmark of {case.title()} "
                "beside it"
            )
        for cell in study["cells"]:
            case.runs.setdefault(cell["model"], []).extend(cell["runs"])
    if not cases:
        raise UsageError(
            f"{folder} has no peers_PRESET_FORMAT.json: measure with results/measure_versions.sh "
            f"{folder.name}"
        )
    order = [*PRESETS]
    return sorted(
        cases.values(), key=lambda case: (order.index(case.preset), case.precision == "bf16")
    )


def models(cases: Sequence[Case]) -> list[str]:
    """The versions, then the peers, by name."""
    names = {name for case in cases for name in case.runs}
    return sorted(names, key=lambda name: (not VERSION.fullmatch(name), name))


def headline(folder: Path) -> tuple[list[Case], list[str]]:
    """The cases in bf16 and their models, without FP8; of the versions only the first is shown
    captured.
    """
    cases = [case for case in read_cases(folder) if case.precision == "bf16"]
    first, *others = models(cases)
    left_out = re.compile(rf".*-fp8|(?!{first})v\d+.*-captured")
    return cases, [first, *(name for name in others if not left_out.fullmatch(name))]


def ratio(reference: Sequence[float], times: Sequence[float]) -> tuple[float, float, float]:
    """How many times faster: by the medians, and the least and the most over the processes."""
    return (
        median(reference) / median(times),
        min(reference) / max(times),
        max(reference) / min(times),
    )


def versions(folder: Path) -> str:
    """The table of the versions in bf16, without peers."""
    cases, names = headline(folder)
    return _table(cases, [name for name in names if VERSION.fullmatch(name)])


def versions_and_peers(folder: Path) -> str:
    """The table of all models in all cases."""
    cases = read_cases(folder)
    return _table(cases, models(cases))


def _with_conditions(
    studies: Sequence[dict[str, Any]], header: list[str], rows: list[list[Any]]
) -> str:
    return f"{conditions(studies)}\n\n{tables.markdown(header, rows)}"


def _table(cases: Sequence[Case], names: Sequence[str]) -> str:
    """A row per model, a column per case: median ms with the range over the processes, how many
    times as fast as the first model, and GiB that the allocator's pools held.
    """
    rows = []
    for name in names:
        rows.append([name, *(_cell(case, name, names[0]) for case in cases)])
    header = ["model", *(case.title() for case in cases)]
    return _with_conditions([study for case in cases for study in case.studies], header, rows)


def _cell(case: Case, model: str, first: str) -> str | None:
    times = case.times(model)
    if not times:
        return None
    cell = format_number(median(times))
    least = format_number(min(times))
    most = format_number(max(times))
    if least != most:
        cell += f" ({least} to {most})"
    reference = case.times(first)
    if reference and model != first:
        cell += f", {format_number(median(reference) / median(times))}x"
    return f"{cell}, {median(run['reserved_mib'] for run in case.runs[model]) / 1024:.2f}"


def limits(folder: Path, last: Path) -> str:
    """A step with a launch for each kernel, and captured, in the last two sizes measured both ways:
    all versions up to that of the folder `last`. One without a captured form beside it is captured
    itself.
    """
    cases, names = headline(folder)
    cases = [case for case in cases if case.times(f"{names[0]}-captured")][-2:]
    newest = int(re.findall(r"\d+", last.name)[0])
    rows = []
    for case in cases:
        for model in names:
            match = VERSION.fullmatch(model)
            if match and int(match[1]) <= newest and not model.endswith("-captured"):
                rows.append([case.preset, model, *_limits(case, model, folder / "traces")])
    header = ["size", "model", "kernels", "step, us per kernel", "step, ms", "captured, ms"]
    header.append("waits for the host, %")
    studies = [study | {"packages": {}} for case in cases for study in case.studies]
    return _with_conditions(studies, header, rows)


def _limits(case: Case, model: str, traces: Path) -> list[float | None]:
    """Kernels of a step, where there is a trace, and its times in the columns of `limits`."""
    trace = traces / f"{model.replace('-', '_')}_{case.preset}.json.gz"
    kernels = len(step_kernels(trace)) if trace.exists() else None
    step = median(case.times(model))
    captured_times = case.times(f"{model}-captured")
    if not captured_times:
        return [kernels, None, None, step, None]
    captured = median(captured_times)
    us_per_kernel = 1e3 * step / kernels if kernels else None
    return [kernels, us_per_kernel, step, captured, max(0.0, 100 * (1 - captured / step))]


def batches(*paths: Path) -> str:
    """Larger batches in bf16: a row for each cell of benchmarks, with its rate and, but in FP8, its
    MFU.
    """
    rows = []
    studies = [files.read_json(path) for path in paths]
    for study in studies:
        peak = run_facts.peak_flops(study | {"precision": {"compute": "bf16", "tf32": False}})
        config = ModelConfig(**study["model"])
        for cell in study["cells"]:
            if not cell["runs"]:
                continue
            model = cell["model"]
            batch = cell["batch_size"]
            length = cell["sequence_length"]
            tokens = batch * length
            ms = cell["runs"][0]["step_ms"]["median"]
            rate = flops.training_step(config, batch, length)["total"] / ms * 1e3
            mfu = None if model.endswith("-fp8") or not peak else 100 * rate / peak
            rates = [1e3 * tokens / ms, rate / 1e12, mfu]
            rows.append([model, f"{batch} x {length}", tokens, ms, *rates])
    header = ["model", "B x S", "tokens a step", "ms/step", "tokens/s", "TFLOP/s", "MFU %"]
    return _with_conditions(studies, header, rows)


def kinds(*traces: Path) -> str:
    """The time of a step's kernels by kind, a row for each trace of a GPU."""
    steps = {name_of(path): step_kernels(path) for path in traces}
    sums = {
        name: step.duration_us.groupby(step.name.map(kernel_names.kind)).sum() / 1e3
        for name, step in steps.items()
    }
    ms = pandas.DataFrame(sums).fillna(0.0)
    ms = ms.loc[ms.sum(axis=1).sort_values(ascending=False).index]
    rows = []
    for name, step in steps.items():
        whole = ms[name].sum()
        rows.append([name, len(step), whole, *(100 * ms[name] / whole)])
    return tables.markdown(
        ["trace", "kernels", "ms of all", *(f"{kind} %" for kind in ms.index)], rows
    )


def name_of(trace: Path) -> str:
    """A trace's file as a label: v2_compile_small.json.gz gives "v2, compile, small"."""
    return trace.name.split(".")[0].replace("_", ", ")


@functools.cache
def step_kernels(trace: Path) -> pandas.DataFrame:
    """Kernels, copies and fills of the first profiled step, with their duration_us."""
    kernels = chrome_trace.load(trace).kernels
    kernels["duration_us"] = kernels.duration_ns / 1e3
    return kernels[kernels.step == kernels.step[kernels.step >= 0].min()]


def curves(*paths: Path) -> str:
    """A column per run after the first: the largest difference of its losses to the first run's, up
    to five steps.
    """
    first, *others = [files.read_json(path) for path in paths]
    losses = pandas.DataFrame(
        {run["version"].replace("v", "Version "): run["loss"]["all"] for run in others}
    )
    differences = losses.sub(first["loss"]["all"], axis=0).abs().cummax()
    every = len(losses) // 5
    rows = []
    for step in range(every, 5 * every + 1, every):
        rows.append([step, *(f"{value:.1e}" for value in differences.loc[step - 1])])
    head = f"largest difference to Version {first['version'][1:]} up to step"
    return _with_conditions([first, *others], [head, *losses.columns], rows)
