"""What joins several files: the versions and peers measured beside each other, and losses of runs
from the same seed.
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

# of benchmark_suite.py, as results/measure_versions.sh names them
FILES = re.compile(r"(?:peers|captured)_(\w+)_(fp32|bf16)")
VERSION = re.compile(r"v(\d+)(-.*)?")  # a model's name, not that of a peer


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


def cases(folder: Path) -> list[Case]:
    """The cases of peers_*.json and captured_*.json in the order of presets.

    UsageError: there is none, or two files of a case are of different devices or models.
    """
    found: dict[tuple[str, str], Case] = {}
    for path in sorted(folder.glob("*_*_*.json")):
        if not (named := FILES.fullmatch(path.stem)):
            continue
        study = files.read_json(path)
        shape = study["batch_sizes"][0], study["sequence_lengths"][0]
        case = found.setdefault((named[1], named[2]), Case(named[1], named[2], shape, [], {}))
        case.studies.append(study)
        if (
            len({(run_facts.device(each), tables.letters(each["model"])) for each in case.studies})
            > 1
        ):
            raise UsageError(
                f"{path} is of another device or model than the other benchmark of {case.title()} beside it"
            )
        for cell in study["cells"]:
            case.runs.setdefault(cell["model"], []).extend(cell["runs"])
    if not found:
        raise UsageError(
            f"{folder} has no peers_PRESET_FORMAT.json: measure with results/measure_versions.sh {folder.name}"
        )
    return sorted(
        found.values(), key=lambda case: ([*PRESETS].index(case.preset), case.precision == "bf16")
    )


def models(found: Sequence[Case]) -> list[str]:
    """The versions, then the peers, by name."""
    names = {name for case in found for name in case.runs}
    return sorted(names, key=lambda name: (not VERSION.fullmatch(name), name))


def headline(folder: Path) -> tuple[list[Case], list[str]]:
    """The cases in bf16 and their models, without FP8; of the versions only the first is shown
    captured.
    """
    found = [case for case in cases(folder) if case.precision == "bf16"]
    first, *others = models(found)
    left_out = re.compile(rf".*-fp8|(?!{first})v\d+.*-captured")
    return found, [first, *(name for name in others if not left_out.fullmatch(name))]


def ratio(reference: Sequence[float], times: Sequence[float]) -> tuple[float, float, float]:
    """How many times faster: by the medians, and the least and the most over the processes."""
    return (
        median(reference) / median(times),
        min(reference) / max(times),
        max(reference) / min(times),
    )


def versions(folder: Path) -> str:
    """The table of the versions in bf16, without peers."""
    found, names = headline(folder)
    return _table(found, [name for name in names if VERSION.fullmatch(name)])


def versions_and_peers(folder: Path) -> str:
    """The table of all models in all cases."""
    found = cases(folder)
    return _table(found, models(found))


def _table(found: Sequence[Case], names: Sequence[str]) -> str:
    """A row per model, a column per case: median ms with the range over the processes, how many
    times as fast as the first model, and GiB that the allocator's pools held.
    """
    rows = [[name, *(_cell(case, name, names[0]) for case in found)] for name in names]
    header = ["model", *(case.title() for case in found)]
    return f"{conditions([study for case in found for study in case.studies])}\n\n{tables.markdown(header, rows)}"


def _cell(case: Case, model: str, first: str) -> str | None:
    times = case.times(model)
    if not times:
        return None
    middle, least, most = (
        format_number(value) for value in (median(times), min(times), max(times))
    )
    shown = [middle if least == most else f"{middle} ({least} to {most})"]
    if case.times(first) and model != first:
        shown.append(f"{format_number(ratio(case.times(first), times)[0])}x")
    shown.append(f"{median(run['reserved_mib'] for run in case.runs[model]) / 1024:.2f}")
    return ", ".join(shown)


def limits(folder: Path, last: Path) -> str:
    """A step with a launch for each kernel, and captured, in the last two sizes measured both ways:
    all versions up to that of the folder `last`. One without a captured form beside it is captured
    itself.
    """
    found, names = headline(folder)
    both = [case for case in found if case.times(f"{names[0]}-captured")][-2:]
    newest = int(re.findall(r"\d+", last.name)[0])
    rows = []
    for case in both:
        for model in names:
            named = VERSION.fullmatch(model)
            if named and int(named[1]) <= newest and not model.endswith("-captured"):
                rows.append([case.preset, model, *_limits(case, model, folder / "traces")])
    header = [
        "size",
        "model",
        "kernels",
        "step, us per kernel",
        "step, ms",
        "captured, ms",
        "waits for the host, %",
    ]
    studies = [study | {"packages": {}} for case in both for study in case.studies]
    return f"{conditions(studies)}\n\n{tables.markdown(header, rows)}"


def _limits(case: Case, model: str, traces: Path) -> list[float | None]:
    """Kernels of a step, where there is a trace, and its times in the columns of `limits`."""
    trace = traces / f"{model.replace('-', '_')}_{case.preset}.json.gz"
    captured = case.times(f"{model}-captured")
    kernels = len(step_kernels(trace)) if trace.exists() else None
    if not captured:
        return [kernels, None, None, median(case.times(model)), None]
    step = median(case.times(model))
    alone = median(captured)
    return [
        kernels,
        1e3 * step / kernels if kernels else None,
        step,
        alone,
        max(0.0, 100 * (1 - alone / step)),
    ]


def batches(*paths: Path) -> str:
    """Larger batches in bf16: a row for each cell of benchmarks, with its rate and, but in FP8, its
    MFU.
    """
    rows = []
    studies = [files.read_json(path) for path in paths]
    for study in studies:
        peak = run_facts.peak_flops(study | {"precision": {"compute": "bf16", "tf32": False}})
        config = study["model"]
        for cell in (each for each in study["cells"] if each["runs"]):
            batch = cell["batch_size"]
            length = cell["sequence_length"]
            ms = cell["runs"][0]["step_ms"]["median"]
            rate = flops.training_step(ModelConfig(**config), batch, length)["total"] / ms * 1e3
            mfu = None if cell["model"].endswith("-fp8") or not peak else 100 * rate / peak
            rows.append(
                [
                    cell["model"],
                    f"{batch} x {length}",
                    batch * length,
                    ms,
                    1e3 * batch * length / ms,
                    rate / 1e12,
                    mfu,
                ]
            )
    header = ["model", "B x S", "tokens a step", "ms/step", "tokens/s", "TFLOP/s", "MFU %"]
    return f"{conditions(studies)}\n\n{tables.markdown(header, rows)}"


def kinds(*traces: Path) -> str:
    """The time of a step's kernels by kind, a row for each trace of a GPU."""
    found = {name_of(path): step_kernels(path) for path in traces}
    times = {
        name: step.duration_us.groupby(step.name.map(kernel_names.kind)).sum() / 1e3
        for name, step in found.items()
    }
    ms = pandas.DataFrame(times).fillna(0.0)
    ms = ms.loc[ms.sum(axis=1).sort_values(ascending=False).index]
    rows = [
        [name, len(found[name]), ms[name].sum(), *(100 * ms[name] / ms[name].sum())]
        for name in found
    ]
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
    far = losses.sub(first["loss"]["all"], axis=0).abs().cummax()
    every = len(far) // 5
    rows = [
        [step, *(f"{value:.1e}" for value in far.loc[step - 1])]
        for step in range(every, 5 * every + 1, every)
    ]
    head = f"largest difference to Version {first['version'][1:]} up to step"
    return f"{conditions([first, *others])}\n\n{tables.markdown([head, *far.columns], rows)}"
