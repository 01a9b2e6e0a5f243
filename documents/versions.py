"""Tables that join several files: the versions and peers measured beside each other, and losses of
runs from the same seed.

A case is one file of benchmark_suite.py, whose processes took turns. A ratio has both times from
one case and one mode: nothing is joined over files, hosts or days.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common.config import PRESETS
from documents.rows import conditions, preset_of
from tracepage import files
from tracepage.errors import UsageError
from tracepage.readers import chrome_trace, kernel_names
from tracepage.show import run_facts, tables
from tracepage.show.tables import format_number

import pandas

VERSION = re.compile(r"v(\d+)(-.*)?")  # a model's name, not that of a peer
CAPTURED = "-captured"
DETERMINISTIC = "-deterministic"
FP8 = "-fp8"
# A step whose captured form takes less than this share of its time waits for its host.
WAITS = 0.9
BACKENDS = {  # of attention, by a regular expression on a kernel's whole name
    "cuDNN": r"cudnn",
    "memory-efficient": r"fmha_cutlass|MemEffAttention",
    "flash": r"pytorch_flash|\bflash_(fwd|bwd)_",
    "Triton": r"^_\w+_attention_|^attn_(fwd|bwd)",
}


class Case(NamedTuple):
    """A benchmark of one preset, number format and shape: one file."""

    preset: str
    precision: str
    shape: tuple[int, int]  # B and S
    study: dict[str, Any]
    runs: dict[str, list[dict[str, Any]]]  # the processes by model; none where it failed

    def title(self) -> str:
        return f"{self.preset}, {self.precision}, {self.shape[0]} x {self.shape[1]}"

    def processes(self) -> int:
        """How many measured a model, in most cells."""
        return Counter(len(runs) for runs in self.runs.values() if runs).most_common(1)[0][0]

    def times(self, model: str) -> list[float]:
        """The median step of each process in ms; none if the model was not measured."""
        return [run["step_ms"]["median"] for run in self.runs.get(model, [])]

    def milliseconds(self, model: str, shown: Callable[[float], str] = format_number) -> str:
        """The median of the processes with their range, and their number where it is unusual."""
        times = self.times(model)
        text = shown(median(times))
        least = shown(min(times))
        most = shown(max(times))
        if least != most:
            text += f" ({least} to {most})"
        if len(times) != self.processes():
            text += f" (n = {len(times)})"
        return text

    def reference(self) -> str:
        """The first version that was measured, captured where its step waits for the host."""
        first = next(name for name in models([self]) if self.times(name))
        captured = self.times(first + CAPTURED)
        if captured and median(captured) < WAITS * median(self.times(first)):
            return first + CAPTURED
        return first

    def ratio(self, reference: str, model: str) -> tuple[float, float, float]:
        """How many times faster a model is: by the medians, and the least and the most over the
        processes. UsageError: one of the two is deterministic.
        """
        if reference.endswith(DETERMINISTIC) != model.endswith(DETERMINISTIC):
            raise UsageError(
                f"{self.title()}: {reference} and {model} are of different modes; "
                "measure deterministic models in a study of their own"
            )
        times = self.times(model)
        base = self.times(reference)
        return median(base) / median(times), min(base) / max(times), max(base) / min(times)


def read_cases(paths: Sequence[Path]) -> list[Case]:
    """The cases of benchmark files, in the order of presets.

    UsageError: two are of one case, of different devices or PyTorch versions, or one has several
    shapes.
    """
    cases: dict[str, Case] = {}
    machines = set()
    for path in paths:
        study = files.read_json(path)
        shapes = {(cell["batch_size"], cell["sequence_length"]) for cell in study["cells"]}
        if len(shapes) > 1:
            raise UsageError(f"{path} has several shapes: a case has one")
        runs = {cell["model"]: cell["runs"] for cell in study["cells"]}
        [shape] = shapes
        case = Case(preset_of(path), study["precision"]["compute"], shape, study, runs)
        machines.add((run_facts.device(study), study["environment"]["torch"]))
        if case.title() in cases:
            raise UsageError(f"{path} is a second benchmark of {case.title()}: a table has one")
        if len(machines) > 1:
            raise UsageError(f"{path} is of another device or PyTorch than the other benchmarks")
        cases[case.title()] = case
    order = [*PRESETS]
    return sorted(
        cases.values(), key=lambda case: (order.index(case.preset), case.precision == "bf16")
    )


def models(cases: Sequence[Case]) -> list[str]:
    """The versions, then the peers, by name."""
    names = {name for case in cases for name in case.runs}
    return sorted(names, key=lambda name: (not VERSION.fullmatch(name), name))


def headline(cases: Sequence[Case]) -> list[str]:
    """The same without products in FP8, another number format."""
    return [name for name in models(cases) if not name.endswith(FP8)]


def versions(*paths: Path) -> str:
    """The table of the versions, without peers."""
    cases = read_cases(paths)
    return _table(cases, [name for name in headline(cases) if VERSION.fullmatch(name)])


def peers(*paths: Path) -> str:
    """The table of all other models: peers, and products in FP8."""
    cases = read_cases(paths)
    shown = {name for name in headline(cases) if VERSION.fullmatch(name)}
    return _table(cases, [name for name in models(cases) if name not in shown])


def _with_conditions(
    studies: Sequence[dict[str, Any]], header: list[str], rows: list[list[Any]]
) -> str:
    return f"{conditions(studies)}\n\n{tables.markdown(header, rows)}"


def _table(cases: Sequence[Case], names: Sequence[str]) -> str:
    """A row per model, a column per case: median ms with the range over the processes, how many
    times as fast as the case's reference, and GiB that the allocator's pools held.
    """
    rows = []
    for name in names:
        rows.append([name, *(_cell(case, name) for case in cases)])
    header = ["model", *(f"{case.title()} (n = {case.processes()})" for case in cases)]
    return _with_conditions([case.study for case in cases], header, rows)


def _cell(case: Case, model: str) -> str | None:
    if not case.times(model):
        return None
    faster = format_number(case.ratio(case.reference(), model)[0])
    reserved = median(run["reserved_mib"] for run in case.runs[model]) / 1024
    return f"{case.milliseconds(model)}, {faster}x, {reserved:.2f}"


def determinism(*paths: Path) -> str:
    """The price of deterministic algorithms: a row for each case and model that was measured with
    them and without.
    """
    cases = read_cases(paths)
    rows = []
    for case in cases:
        for model in models([case]):
            deterministic = model + DETERMINISTIC
            if not (case.times(model) and case.times(deterministic)):
                continue
            times = [case.milliseconds(name) for name in (model, deterministic)]
            ratio = median(case.times(deterministic)) / median(case.times(model))
            rows.append([case.preset, case.processes(), model, *times, 100 * (ratio - 1)])
    header = ["size", "n", "model", "ms", "deterministic, ms", "price, %"]
    # What a call costs the host differs by mode.
    described = [case.study | {"cells": []} for case in cases]
    return _with_conditions(described, header, rows)


def levers(*paths: Path) -> str:
    """Captured steps of one change each: a row for each model, in the first case the slowest first,
    and a column for each case, with four digits.
    """
    cases = read_cases(paths)
    names = sorted(models(cases), key=lambda name: -median(cases[0].times(name)))
    rows = []
    for name in names:
        rows.append([name, *(case.milliseconds(name, "{:.4g}".format) for case in cases)])
    header = ["model", *(f"{case.preset}, ms (n = {case.processes()})" for case in cases)]
    # Captured steps do not wait for their host.
    return _with_conditions([case.study | {"cells": []} for case in cases], header, rows)


def limits(*paths: Path) -> str:
    """A step with a launch for each kernel, and captured, in the last two cases measured both ways:
    the version of the folder that is the last path, and the one before. One without a captured form
    in any case is captured itself.
    """
    *studies, last = paths
    cases = read_cases(studies)
    names = models(cases)
    launched = {name for name in names if name + CAPTURED in names}
    cases = [case for case in cases if case.times(names[0] + CAPTURED)][-2:]
    newest = int(re.findall(r"\d+", last.name)[0])
    numbers = {int(match[1]) for match in map(VERSION.fullmatch, names) if match}
    last_two = sorted(number for number in numbers if number <= newest)[-2:]
    rows = []
    for case in cases:
        for model in names:
            match = VERSION.fullmatch(model)
            shown = match and int(match[1]) in last_two and not model.endswith(CAPTURED)
            if shown and case.times(model):
                traces = studies[0].parent / "traces"
                columns = _limits(case, model, traces, model in launched)
                rows.append([case.preset, case.processes(), model, *columns])
    header = ["size", "n", "model", "kernels", "step, ms", "captured, ms", "waits for the host, %"]
    described = [case.study | {"packages": {}} for case in cases]
    return _with_conditions(described, header, rows)


def _limits(case: Case, model: str, traces: Path, launched: bool) -> list[float | None]:
    """Kernels of a step, where there is a trace, and its times in the columns of `limits`; one that
    is not `launched` is captured itself.
    """
    trace = traces / f"{model.replace('-', '_')}_{case.preset}.json.gz"
    kernels = len(step_kernels(trace)) if trace.exists() else None
    step = median(case.times(model))
    if not launched:
        return [kernels, None, step, None]
    if not case.times(model + CAPTURED):
        return [kernels, step, None, None]
    captured = median(case.times(model + CAPTURED))
    return [kernels, step, captured, max(0.0, 100 * (1 - captured / step))]


def kinds(*traces: Path) -> str:
    """The time of a step's kernels by kind, and what computes attention, a row for each trace of a
    GPU.
    """
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
        rows.append([name, len(step), whole, backend(step.name), *(100 * ms[name] / whole)])
    header = ["trace", "kernels", "ms of all", "attention by"]
    return tables.markdown([*header, *(f"{kind} %" for kind in ms.index)], rows)


def backend(kernels: Iterable[str]) -> str:
    """What computes attention, by the names of a step's kernels: BACKENDS, or products and softmax
    ("math").
    """
    attention = {name for name in kernels if kernel_names.kind(name) == "attention"}
    names = []
    for name, pattern in BACKENDS.items():
        if any(re.search(pattern, kernel) for kernel in attention):
            names.append(name)
    return ", ".join(names) or ("unknown" if attention else "math")


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
